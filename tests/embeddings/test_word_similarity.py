"""r_cos compared with scipy, and which pairs count.

Legend: V vocabulary rows, H hidden size.
"""

import lzma

import numpy as np
import pytest
from measure_reference import data_path, needs_test_data, word_correlations

from coupled_adam.embeddings import WordPairs, WordSimilarity, load_word_pairs, measure, open_tokenizer
from coupled_adam.embeddings.word_similarity import R_COS, R_COS_5

WORDS = [f"word{i}" for i in range(60)]


class FakeTokens:
    """word<i> is token i."""

    size = 60

    def token_id(self, word: str) -> int | None:
        return WORDS.index(word) if word in WORDS else None

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def table(V: int = 60) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((V, 8)).astype(np.float32)


def random_pairs(name: str, number: int = 40, seed: int = 0) -> WordPairs:
    random = np.random.default_rng(seed)
    pairs = tuple((WORDS[a], WORDS[b]) for a, b in random.integers(0, 60, (number, 2)))
    return WordPairs(name, pairs, tuple(random.integers(0, 8, number).astype(float)))  # including equal scores


def all_benchmarks() -> dict[str, WordPairs]:
    return {name: random_pairs(name, seed=i) for i, name in enumerate({*R_COS, *R_COS_5})}


def test_correlations_agree_with_scipy() -> None:
    E, benchmarks = table(), all_benchmarks()
    metrics = measure(E, tokenizer=FakeTokens(), word_pairs=benchmarks)
    ids = {word: i for i, word in enumerate(WORDS)}
    expected = {}
    for name, benchmark in benchmarks.items():
        triples = [(a, b, s) for (a, b), s in zip(benchmark.pairs, benchmark.scores, strict=True)]
        expected[name] = word_correlations(E, ids, triples)
        result = metrics.word_similarity[name]
        assert (result.pearson, result.spearman) == pytest.approx(expected[name], rel=1e-9)
        assert result.pairs_used == result.pairs_total == 40
    four = ["SimLex-999", "MEN", "WordSim-353", "RW"]
    five = ["MEN", "RW", "SimLex-999", "WordSim-353 similarity", "WordSim-353 relatedness"]
    assert metrics.r_cos == pytest.approx(np.mean([expected[name][0] for name in four]))
    assert metrics.spearman == pytest.approx(np.mean([expected[name][1] for name in four]))
    assert metrics.r_cos_5 == pytest.approx(np.mean([expected[name][0] for name in five]))


def test_pairs_with_a_word_of_several_tokens_or_a_zero_row_do_not_count() -> None:
    E = table()
    E[7] = 0
    pairs = (("word1", "word2"), ("word3", "split"), ("word4", "word5"), ("word7", "word1"), ("word8", "word9"))
    benchmark = WordPairs("MEN", pairs, (1.0, 2.0, 3.0, 4.0, 5.0))
    result = measure(E, tokenizer=FakeTokens(), word_pairs={"MEN": benchmark}).word_similarity["MEN"]
    kept = [(a, b, s) for (a, b), s in zip(pairs, benchmark.scores, strict=True) if "word7" not in (a, b)]
    expected = word_correlations(E, {word: i for i, word in enumerate(WORDS)}, kept)
    assert (result.pearson, result.spearman) == pytest.approx(expected)
    assert (result.pairs_used, result.pairs_total) == (3, 5)


def test_a_benchmark_with_fewer_than_three_pairs_is_missing() -> None:
    benchmarks = all_benchmarks() | {"RW": random_pairs("RW", 2)}
    metrics = measure(table(), tokenizer=FakeTokens(), word_pairs=benchmarks)
    assert metrics.word_similarity["RW"] == WordSimilarity(None, None, 2, 2)
    assert (metrics.r_cos, metrics.r_cos_5, metrics.spearman) == (None, None, None)


def test_a_mean_needs_all_of_its_benchmarks() -> None:
    benchmarks = all_benchmarks()
    del benchmarks["WordSim-353"]
    metrics = measure(table(), tokenizer=FakeTokens(), word_pairs=benchmarks)
    assert (metrics.r_cos, metrics.spearman) == (None, None)
    assert metrics.r_cos_5 is not None


def test_equal_scores_have_no_correlation() -> None:
    benchmark = WordPairs("MEN", random_pairs("MEN").pairs, (3.0,) * 40)
    result = measure(table(), tokenizer=FakeTokens(), word_pairs={"MEN": benchmark}).word_similarity["MEN"]
    assert result == WordSimilarity(None, None, 40, 40)


def test_no_known_word_leaves_the_benchmark_empty() -> None:
    benchmark = WordPairs("MEN", (("split", "apart"),), (3.0,))
    result = measure(table(), tokenizer=FakeTokens(), word_pairs={"MEN": benchmark}).word_similarity["MEN"]
    assert result == WordSimilarity(None, None, 0, 1)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 5\d\b.*\b50 rows"):
        measure(table(50), tokenizer=FakeTokens(), word_pairs=all_benchmarks())


def context_vectors(tokens: np.ndarray, V: int, H: int = 128) -> np.ndarray:
    """log(1 + number of times that each of the H most frequent tokens is within three positions), minus the mean."""
    frequent = np.argsort(-np.bincount(tokens, minlength=V))[:H]
    column = np.full(V, -1)
    column[frequent] = np.arange(H)
    counts = np.zeros((V, H))
    for distance in (1, 2, 3):
        for word, context in ((tokens[distance:], tokens[:-distance]), (tokens[:-distance], tokens[distance:])):
            known = column[context] >= 0
            np.add.at(counts, (word[known], column[context[known]]), 1)
    seen = counts.sum(1) > 0
    features = np.log1p(1000 * counts / np.maximum(counts.sum(1, keepdims=True), 1))
    return np.where(seen[:, None], features - features[seen].mean(0), 0)


@needs_test_data
def test_vectors_from_real_text_correlate_with_human_judgement() -> None:
    tokens = np.frombuffer(lzma.decompress(data_path("corpus", "enwiki_val.u16.xz").read_bytes()), np.uint16)
    tokenizer = open_tokenizer(data_path("gpt2-bpe", "tokenizer.json"))
    E = context_vectors(tokens, tokenizer.size).astype(np.float32)
    benchmarks = load_word_pairs(data_path("wordsim"))
    metrics = measure(E, tokenizer=tokenizer, word_pairs=benchmarks)
    ids = {
        word: token
        for benchmark in benchmarks.values()
        for pair in benchmark.pairs
        for word in pair
        if (token := tokenizer.token_id(word)) is not None and np.abs(E[token]).max() > 0
    }
    for name, benchmark in benchmarks.items():
        triples = [(a, b, s) for (a, b), s in zip(benchmark.pairs, benchmark.scores, strict=True)]
        result = metrics.word_similarity[name]
        assert (result.pearson, result.spearman) == pytest.approx(word_correlations(E, ids, triples), rel=1e-6)
        assert 100 < result.pairs_used < result.pairs_total
    assert metrics.r_cos is not None
    assert metrics.r_cos > 5
