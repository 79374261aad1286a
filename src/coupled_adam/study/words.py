"""Inputs of the word similarity in a study: word pairs and the tokenizer of the corpus. Does not load torch."""

from collections.abc import Iterable
from typing import Any

from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.data.corpus import Corpus
from coupled_adam.embeddings.download import word_pairs_of
from coupled_adam.training.run_tokens import word_tokenizer


def words_of(corpus: Corpus, wordsim: str | None) -> dict[str, Any]:
    """The arguments `tokenizer` and `word_pairs` of `measure`; empty if word similarity is not requested."""
    if wordsim is None:
        return {}
    word_pairs = word_pairs_of(wordsim, "set evaluation.wordsim to it")
    return {"word_pairs": word_pairs, "tokenizer": word_tokenizer(corpus, "evaluation.wordsim")}


def check_words(evaluation: EvaluationSection, corpora: Iterable[Corpus]) -> None:
    """Open the inputs of word similarity, to fail before the first training and not after it.

    Args:
        evaluation: of the study.
        corpora: of all runs.

    Raises:
        ValueError, OSError, ImportError: a tokenizer or the word pairs are unavailable.
    """
    if evaluation.measures and evaluation.wordsim is not None:
        for corpus in corpora:
            words_of(corpus, evaluation.wordsim)
