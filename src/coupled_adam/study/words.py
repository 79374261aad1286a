"""What the word similarity of a study's runs needs: word pairs, and the tokenizer of the corpus. Loads no torch."""

from collections.abc import Iterable
from typing import Any

from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.data.corpus import Corpus
from coupled_adam.embeddings.download import word_pairs_of
from coupled_adam.training.run_tokens import word_tokenizer


def words_of(corpus: Corpus, wordsim: str | None) -> dict[str, Any]:
    """`tokenizer` and `word_pairs` as `measure` takes them; empty where no word similarity is asked for."""
    if wordsim is None:
        return {}
    return {"word_pairs": word_pairs_of(wordsim), "tokenizer": word_tokenizer(corpus, "evaluation.wordsim")}


def check_words(evaluation: EvaluationSection, corpora: Iterable[Corpus]) -> None:
    """Open what word similarity needs, now and not after the first training.

    Args:
        evaluation: of the study.
        corpora: of all runs.

    Raises:
        ValueError, OSError, ImportError: for tokenizers and word pairs that cannot be had.
    """
    if evaluation.measures and evaluation.wordsim is not None:
        for corpus in corpora:
            words_of(corpus, evaluation.wordsim)
