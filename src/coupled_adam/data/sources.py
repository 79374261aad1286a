"""Where documents come from: the protocol of a source, and which source a name means.

A source gives its documents in an order that is always the same, in pieces so that a book of a gigabyte needs no
gigabyte of memory, and it can go on from a position that was written to a file.
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
"""Where a source stands, in its own terms, as JSON."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    content: "str | npt.NDArray[Any]"
    """Text, or tokens where the source has tokens already."""
    ends_document: bool = True
    split: str | None = None
    """Where the source itself decides; else None."""


class Source(Protocol):
    """What `prepare` needs of a source."""

    def found(self) -> dict[str, Any]:
        """What the name means here and now (files, versions): when it changes, so may the documents."""

    def default_fraction(self) -> float:
        """The part of the documents to hold out for val, and for test, when nobody says."""

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        """All pieces, or those after a position."""

    def position(self) -> Position:
        """The place behind the piece given last."""

    def progress(self) -> float | None:
        """The part of the source that was given, 0 to 1; None where its size is not known."""


NAMES = ("python-docs", "openwebtext", "slimpajama")
KNOWN = f"{', '.join(NAMES)}, hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], text:FILES, tokens:FILES"


def open_source(name: str, *, field: str, separator: int, processes: int, found: dict[str, Any] | None) -> Source:
    """The source that a name means.

    Args:
        name: one of KNOWN.
        field: of .jsonl and .parquet files and of datasets that holds the text.
        separator: the token behind every document, for token files.
        processes: that may read at the same time.
        found: what `found()` said when a preparation began that goes on now.
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
    """What was probably meant: files without the word in front of them, a name with a slip, a dataset of the hub."""
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
    """Whether a source has tokens already, and no text."""
    return name.startswith("tokens:")
