"""Sources of documents: their protocol, and how to open a source by name.

A source yields its documents in a fixed order. Long documents come in pieces, so a one-gigabyte book does not need a
gigabyte of memory. A source can resume from a stored position.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path

Position = dict[str, Any]
"""Position of a source, as JSON values; each source has its own format."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    content: "str | npt.NDArray[Any]"
    """Text, or tokens for a token source."""
    ends_document: bool = True
    split: str | None = None
    """The split, if the source decides it; otherwise None."""


class Source(Protocol):
    """The interface that `prepare` needs."""

    def found(self) -> dict[str, Any]:
        """State of the source (files, versions); if it changes, the documents may have changed."""

    def default_fraction(self) -> float:
        """Default fraction of the documents for val, and for test."""

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        """Yield all pieces, or those after a position."""

    def position(self) -> Position:
        """Position after the last piece yielded."""

    def progress(self) -> float | None:
        """Fraction of the source yielded so far, 0 to 1; None if its size is unknown."""


NAMES = ("python-docs", "openwebtext", "slimpajama")
KNOWN = f"{', '.join(NAMES)}, hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], text:FILES, tokens:FILES"


def open_source(name: str, *, field: str, separator: int, processes: int, found: dict[str, Any] | None) -> Source:
    """Open a source by name.

    Args:
        name: one of KNOWN.
        field: text field of .jsonl and .parquet files and of datasets.
        separator: the token after every document, for token files.
        processes: number of processes that may read at the same time.
        found: result of `found()` from the start of a resumed preparation.
    """
    kind, _, rest = name.partition(":")
    if name == "python-docs":
        from coupled_adam.data.python_docs import PythonDocs

        return PythonDocs(processes)
    if kind == "text" and rest:
        from coupled_adam.data.text_files import TextFiles

        return TextFiles(rest, field)
    if kind == "tokens" and rest:
        from coupled_adam.data.token_files import TokenFiles

        return TokenFiles(rest, separator)
    if is_hub_dataset(name):
        from coupled_adam.data.hub_datasets import HubDataset

        return HubDataset(name, field, found)
    meant = _closest_source(name)
    hint = f"did you mean {meant}? Expected" if meant else "expected"
    raise UserError(f"source {name!r} is unknown; {hint} one of {KNOWN}")


def _closest_source(name: str) -> str | None:
    """Guess the intended source: files without a prefix, a misspelled name, or a dataset on the hub."""
    if user_path(name).exists() or any(character in name for character in "*?"):
        is_tokens = name.endswith((".bin", ".u16.xz"))
        return f"{'tokens' if is_tokens else 'text'}:{name}"
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.7)
    if near:
        return near[0]
    return f"hf:{name}" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def is_hub_dataset(name: str) -> bool:
    """Whether a source is read over the network."""
    return name in ("openwebtext", "slimpajama") or (name.startswith("hf:") and len(name) > 3)


def has_tokens(name: str) -> bool:
    """Whether a source has tokens instead of text."""
    return name.startswith("tokens:")
