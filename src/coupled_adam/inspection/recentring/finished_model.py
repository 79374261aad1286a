"""What recentring needs of a model, whichever kind of folder it comes from.

The one idea: the module in memory is in float64 and is changed there first. Its files are written from what was proven.

Legend: V vocabulary rows, H hidden size, B texts, T time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from coupled_adam.tokenizer import Tokenizer

NO_POSITIONS = "the model has no learned positions that could take the mean"


class Writer(Protocol):
    """Writes a finished model with some of its tensors replaced."""

    def __call__(
        self, temporary: Path, tensors: Mapping[str, Tensor], *, untied: bool, dtype: torch.dtype | None
    ) -> None:
        """Write a complete folder.

        Args:
            temporary: an empty folder.
            tensors: what changes, in float64, by the names of the files.
            untied: the head has a table of its own from now on, which is among the tensors.
            dtype: how the tensors are stored; None: as they were.
        """


@dataclass(frozen=True)
class FinishedModel:
    """A model in memory, and where its tensors are stored."""

    path: Path
    module: nn.Module
    """In float64 and in evaluation mode. Has `get_input_embeddings` and `get_output_embeddings`, as in transformers."""
    logits: Callable[[Tensor], Tensor]
    """Logits (B, T, V) of tokens (B, T)."""
    table_names: Sequence[str]
    """Of the stored tensors that are the output table; a tied table may be stored twice."""
    new_head_name: str
    """What a head of its own is called."""
    positions: nn.Parameter | None  # (T, H)
    """The table of which one row is added to every input embedding; None: there is none."""
    positions_name: str | None
    """Of the stored tensor."""
    no_positions: str
    """Why the mean of a tied table cannot be moved to the positions; empty: it can."""
    rows: int
    """Rows from this one on are padding."""
    context: int
    dtypes: Mapping[str, torch.dtype]
    """How tables and positions are stored, by stored name; of a new head, how it would be."""
    bytes: int
    """Of all weights on the disk."""
    write: Writer
    reopen: Callable[[Path], "FinishedModel"]
    """Opens a folder that `write` wrote."""
    tokenizer: Callable[[], Tokenizer] | None = None
    """None: there is no tokenizer with the model."""
    notes: Sequence[str] = ()
    """What the user should know."""

    @property
    def head(self) -> nn.Parameter:
        """The output table (V, H)."""
        return self.module.get_output_embeddings().weight  # type: ignore[operator, no-any-return]

    @property
    def tied(self) -> bool:
        """Whether one table is both input and output."""
        return self.head is self.module.get_input_embeddings().weight  # type: ignore[operator]

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored output table."""
        return self.dtypes[self.table_names[0]]

    @torch.no_grad()
    def take_from_head(self, mean: Tensor) -> dict[str, Tensor]:
        """Subtract `mean` (H,) from every row of a head that is not tied; returns what changed, by stored name."""
        self.head.sub_(mean)
        return dict.fromkeys(self.table_names, self.head.detach())

    @torch.no_grad()
    def move_to_positions(self, mean: Tensor) -> dict[str, Tensor]:
        """Subtract `mean` from every row of a tied table, and add it to every position: the sum of both stays."""
        assert self.positions is not None
        assert self.positions_name is not None
        self.head.sub_(mean)
        self.positions.add_(mean)
        return dict.fromkeys(self.table_names, self.head.detach()) | {self.positions_name: self.positions.detach()}

    @torch.no_grad()
    def untie(self, mean: Tensor) -> dict[str, Tensor]:
        """Give the head a copy of the table, minus `mean`; the input table stays as it is."""
        layer = self.module.get_output_embeddings()  # type: ignore[operator]
        layer.weight = nn.Parameter(self.head.detach() - mean)
        return {self.new_head_name: layer.weight.detach()}
