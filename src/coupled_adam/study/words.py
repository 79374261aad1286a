"""What the word similarity of a study's runs needs: word pairs, and the tokenizer of the corpus. Loads no torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.data.corpus import Corpus, open_known_corpus
from coupled_adam.embeddings.download import fetch_word_pairs
from coupled_adam.embeddings.word_pairs import load_word_pairs
from coupled_adam.training.run_tokens import word_tokenizer

DOWNLOAD = "download"


def words_of(corpus: Corpus, wordsim: str | None) -> dict[str, Any]:
    """`tokenizer` and `word_pairs` as `measure` takes them; empty where no word similarity is asked for."""
    if wordsim is None:
        return {}
    return {"word_pairs": word_pairs(wordsim), "tokenizer": word_tokenizer(corpus, "evaluation.wordsim")}


def word_pairs(wordsim: str) -> Any:
    """The benchmarks of a folder, or those that are downloaded once."""
    # A folder of that name comes first.
    is_download = wordsim == DOWNLOAD and not Path(wordsim).is_dir()
    return fetch_word_pairs() if is_download else load_word_pairs(wordsim)


def check_words(evaluation: EvaluationSection, corpus_folders: Iterable[str]) -> None:
    """Open what word similarity needs, now and not after the first training.

    Args:
        evaluation: of the study.
        corpus_folders: `data.folder` of all runs.

    Raises:
        ValueError, OSError, ImportError: for tokenizers and word pairs that cannot be had.
    """
    if evaluation.measures and evaluation.wordsim is not None:
        for folder in dict.fromkeys(corpus_folders):
            words_of(open_known_corpus(Path(folder).expanduser()), evaluation.wordsim)
