"""The text of the demo: the documentation of the Python standard library, as token numbers.

Every Python brings it along, so that nothing is downloaded. It differs a little between versions of Python; on one
machine it is always the same, in the same order.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coupled_adam.data.python_docs import docstring_documents, topic_documents

UNKNOWN = "<unk>"
VALIDATION_EVERY = 20

# Words, numbers, runs of one punctuation mark (">>>", "-----"), ends of line; other white space is dropped.
TOKEN = re.compile(r"[^\W\d_]+|\d+|_+|([^\w\s])\1*|\n")


@dataclass(frozen=True)
class Corpus:
    """Token numbers of the training and the validation text."""

    vocabulary: list[str]
    """V tokens; the number of a token is its place here. The first stands for all that are not here."""
    train: Tensor  # (N,) int64
    validation: Tensor  # (M,) int64


def standard_library_corpus(vocabulary_size: int) -> Corpus:
    """The corpus of this Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    documents = docstring_documents(folder) + topic_documents()
    if len(documents) < VALIDATION_EVERY:
        raise ValueError(
            f"the standard library in {folder} has {len(documents)} documented source files, expected at least "
            f"{VALIDATION_EVERY}; use a Python that is installed with its .py files"
        )
    return build_corpus(documents, vocabulary_size)


def tokenize(text: str) -> list[str]:
    r"""Split a text into tokens.

    Example:
        >>> tokenize("os.path: 3.11\n>>> _x")
        ['os', '.', 'path', ':', '3', '.', '11', '\n', '>>>', '_', 'x']
    """
    return [match.group() for match in TOKEN.finditer(text)]


def build_corpus(documents: Sequence[str], vocabulary_size: int) -> Corpus:
    """Number the tokens of the documents; in order of length, every 20th document is for validation.

    Args:
        documents: the texts; an end of line is put behind each.
        vocabulary_size: V; the V - 1 tokens most frequent in the training text get a number of their own, and of
            equally frequent ones the first in the alphabet.
    """
    train: list[str] = []
    validation: list[str] = []
    # By length, so that a twentieth of the documents is about a twentieth of the text; batches are drawn at random.
    for index, document in enumerate(sorted(documents, key=len)):
        part = validation if index % VALIDATION_EVERY == VALIDATION_EVERY // 2 else train
        part += tokenize(document + "\n")
    by_frequency = sorted(Counter(train).items(), key=lambda item: (-item[1], item[0]))
    vocabulary = [UNKNOWN, *(token for token, _ in by_frequency[: vocabulary_size - 1])]
    number = {token: index for index, token in enumerate(vocabulary)}
    return Corpus(
        vocabulary,
        torch.tensor([number.get(token, 0) for token in train]),
        torch.tensor([number.get(token, 0) for token in validation]),
    )
