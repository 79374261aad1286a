"""The tokenizer of an exported model produces the tokens of its training."""

import json
import lzma
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
import torch
from export_models import (
    END,
    TEXT,
    TOKENS,
    small_config,
    trained_model,
    write_corpus,
    write_tokenizer_json,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from coupled_adam.byte_level_bpe import byte_letters, gpt2_json_file, recover_merges
from coupled_adam.evaluation.export import export_model
from coupled_adam.evaluation.run_tokenizer import corpus_tokenizer, open_json_tokenizer

CONTEXT = 32
GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.fixture
def shared() -> Path:
    if "COUPLED_ADAM_TEST_DATA" not in os.environ:
        pytest.skip("needs COUPLED_ADAM_TEST_DATA, a folder with gpt2-bpe/ and corpus/")
    return Path(os.environ["COUPLED_ADAM_TEST_DATA"])


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The tokens of a byte-level BPE as bytes, without special tokens."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    vocabulary = tokenizer.get_vocab()
    return {bytes(letters[c] for c in token): rank for token, rank in vocabulary.items() if token != END}


def small_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """The same BPE in tiktoken's form."""
    end = {END: tokenizer.token_to_id(END)}
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks_of(tokenizer), special_tokens=end)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_tokenizer_of_the_corpus_is_loaded_with_the_model(architecture: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    model = trained_model(small_config(architecture))
    export_model(model.config, dict(model.named_parameters()), corpus_tokenizer(corpus), tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    ours = Tokenizer.from_file(str(corpus.tokenizer_file()))
    assert loaded(TEXT)["input_ids"] == ours.encode(TEXT).ids
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    assert loaded(f"a{END}b")["input_ids"] == ours.encode(f"a{END}b").ids
    assert len(loaded) == TOKENS < model.config.vocabulary_size
    assert loaded.model_max_length == CONTEXT
    special = loaded.eos_token, loaded.bos_token, loaded.unk_token, loaded.pad_token
    assert special == (END,) * 4
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True).config
    assert config.eos_token_id == config.bos_token_id == 0


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_texts_of_different_lengths_in_one_batch_are_continued_as_alone(architecture: str, tmp_path: Path) -> None:
    model = trained_model(small_config(architecture))
    tokenizer = corpus_tokenizer(write_corpus(tmp_path / "corpus"))
    export_model(model.config, dict(model.named_parameters()), tokenizer, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    texts = ["The quick", "They've barked 56"]
    together = theirs.generate(**loaded(texts, return_tensors="pt", padding=True), max_new_tokens=4, do_sample=False)
    for text, generated in zip(texts, together, strict=True):
        alone = theirs.generate(**loaded(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
        assert torch.equal(generated[-4:], alone[0, -4:])


def test_end_of_text_is_the_separator_of_the_corpus_under_any_name(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json", end="[STOP]")
    tokenizer = open_json_tokenizer(tmp_path / "tokenizer.json", separator=0)
    assert (tokenizer.separator, tokenizer.separator_token) == (0, "[STOP]")
    assert open_json_tokenizer(tmp_path / "tokenizer.json").separator is None  # unknown
    for usual in (END, "</s>"):
        write_tokenizer_json(tmp_path / "tokenizer.json", end=usual)
        assert open_json_tokenizer(tmp_path / "tokenizer.json").separator_token == usual


def test_tokenizer_without_end_of_text_gets_no_new_token(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json", end="[STOP]")
    model = trained_model(small_config())
    tokenizer = open_json_tokenizer(tmp_path / "tokenizer.json")
    export_model(model.config, dict(model.named_parameters()), tokenizer, tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(loaded) == TOKENS
    assert loaded.eos_token is loaded.pad_token is None


def test_tokenizers_of_other_kinds_keep_their_unknown_token(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.0), (END, -2.0)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.save(str(tmp_path / "tokenizer.json"))
    opened = open_json_tokenizer(tmp_path / "tokenizer.json")
    assert (opened.separator, opened.unknown_token) == (2, "<unk>")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, END: 2}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    assert open_json_tokenizer(tmp_path / "tokenizer.json").unknown_token == "[UNK]"


def test_merges_recovered_from_ranks_match_the_training(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_json(tmp_path / "tokenizer.json")
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    letters = byte_letters()
    recovered = [
        ["".join(letters[byte] for byte in part) for part in pair] for pair in recover_merges(ranks_of(tokenizer))
    ]
    assert recovered == merges
    assert len(merges) > 30


def test_ranks_that_are_not_a_bpe_are_refused() -> None:
    with pytest.raises(ValueError, match=r"b'abc'.*\b3\b"):
        recover_merges({b"a": 0, b"b": 1, b"c": 2, b"abc": 3, b"ab": 4})


def test_the_gpt2_tokenizer_is_built_from_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = small_tiktoken(write_tokenizer_json(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    corpus = write_corpus(tmp_path / "corpus", tokenizer="gpt2", separator=encoding.eot_token)
    model = trained_model(small_config())
    export_model(model.config, dict(model.named_parameters()), corpus_tokenizer(corpus), tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = TEXT + END + TEXT
    assert loaded(text)["input_ids"] == encoding.encode(text, allowed_special="all")
    assert loaded.eos_token == END


def test_gpt2_tokenizer_equals_the_published_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "gpt2-bpe" / "tiktoken_cache"))
    made = gpt2_json_file(tiktoken.get_encoding("gpt2"))
    parsed = json.loads(made)
    published = json.loads((shared / "gpt2-bpe" / "tokenizer.json").read_text(encoding="utf-8"))
    for part in ("model", "added_tokens", "normalizer", "pre_tokenizer"):
        assert parsed[part] == published[part]
    text = lzma.decompress((shared / "corpus" / "simplewiki_sample.txt.xz").read_bytes()).decode()[:250_000]
    tokens = Tokenizer.from_str(made.decode()).encode(text).ids
    assert tokens == tiktoken.get_encoding("gpt2").encode(text, allowed_special="all")
    assert len(tokens) > 50_000


def test_an_unavailable_tokenizer_gives_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    with pytest.raises(OSError, match=r"tiktoken.*'gpt2'.*TIKTOKEN_CACHE_DIR"):
        open_json_tokenizer("gpt2")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'unknown'} .*\btokenizer\b"):
        corpus_tokenizer(write_corpus(tmp_path / "unknown", tokenizer=None))
    with pytest.raises(ValueError, match=r"'cl100k_base'.*tokenizer\.json.*\bgpt2\b"):
        corpus_tokenizer(write_corpus(tmp_path / "other", tokenizer="cl100k_base"))
    for content in ("[]", '{"model": {"vocab": 3}}', "\x00", '{"model": {"vocab": {}}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{tmp_path / 'tokenizer.json'}"):
            open_json_tokenizer(tmp_path / "tokenizer.json")


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'tokenizer.json'}.*\b{TOKENS}\b"):
        open_json_tokenizer(tmp_path / "tokenizer.json", separator=TOKENS)
    config = small_config(vocabulary_size=TOKENS - 1)
    weights = dict(trained_model(config).named_parameters())
    with pytest.raises(ValueError, match=rf"\b{TOKENS} tokens.*\b{TOKENS - 1} rows"):
        export_model(config, weights, open_json_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "model")
    with pytest.raises(ValueError, match="Invalid end_of_text: 299"):
        export_model(config, weights, None, tmp_path / "model", end_of_text=299)
