"""The text of the demo: the documentation of the Python standard library, as token numbers.

Every Python brings it along, so that nothing is downloaded. It differs a little between versions of Python; on one
machine it is always the same, in the same order.
"""

import ast
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

UNKNOWN = "<unk>"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
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


def docstring_documents(folder: Path) -> list[str]:
    """One document for each Python file under `folder`: its docstrings, files in the order of their paths."""
    paths = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += [Path(parent, name) for name in files if name.endswith(".py")]
    texts = (_docstrings(path) for path in sorted(paths))
    return [text for text in texts if text]


def _docstrings(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in somebody else's file
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return ""
    docstrings = (ast.get_docstring(node) for node in _documentable(tree))
    return "\n\n".join(docstring for docstring in docstrings if docstring)


def _documentable(tree: ast.Module) -> Iterator[Documentable]:
    """The module, its classes and functions in the order of the file; not ast.walk, which enters expressions too."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Documentable):
            yield node
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
        pending += reversed(children)


def topic_documents() -> list[str]:
    """The chapters of the language reference that `help()` shows, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return []
    return [text for _, text in sorted(topics.items())]


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
