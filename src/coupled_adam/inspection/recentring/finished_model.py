"""Interface of a model for recentring, for any kind of folder.

The one idea: the module in memory is in float64 and is changed and checked first; the files are written from it.

Legend: V vocabulary rows, H hidden size, B texts, T time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from coupled_adam.tokenizer import Tokenizer

NO_POSITIONS = "the model has no learned positions to move the mean to"


class Writer(Protocol):
    """Writes a model with some of its tensors replaced."""

    def __call__(
        self, temporary: Path, tensors: Mapping[str, Tensor], *, untied: bool, dtype: torch.dtype | None
    ) -> None:
        """Write a complete folder.

        Args:
            temporary: an empty folder.
            tensors: changed tensors in float64, by stored name.
            untied: the head now has its own table, which is among the tensors.
            dtype: of the stored tensors; None to keep their type.
        """


@dataclass(frozen=True)
class FinishedModel:
    """A model in memory, with the names of its stored tensors."""

    path: Path
    module: nn.Module
    """In float64 and in evaluation mode. Has `get_input_embeddings` and `get_output_embeddings`, as in transformers."""
    logits: Callable[[Tensor], Tensor]
    """Logits (B, T, V) of tokens (B, T)."""
    table_names: Sequence[str]
    """Names of the stored output table; a tied table may be stored twice."""
    new_head_name: str
    """Name of an untied head."""
    positions: nn.Parameter | None  # (T, H)
    """Position table, one row of which is added to every input embedding; None without one."""
    positions_name: str | None
    """Name of the stored position table."""
    no_positions: str
    """Why the mean of a tied table cannot be moved to the positions; empty if it can."""
    rows: int
    """Later rows are padding."""
    context: int
    dtypes: Mapping[str, torch.dtype]
    """Stored types of tables, positions and a new head, by stored name."""
    bytes: int
    """Size of all weights on disk."""
    write: Writer
    reopen: Callable[[Path], "FinishedModel"]
    """Opens a folder that `write` wrote."""
    tokenizer: Callable[[], Tokenizer] | None = None
    """None if the model has no tokenizer."""
    notes: Sequence[str] = ()
    """Notes for the user."""

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
        """Type of the stored output table."""
        return self.dtypes[self.table_names[0]]

    @torch.no_grad()
    def take_from_head(self, mean: Tensor) -> dict[str, Tensor]:
        """Subtract `mean` (H,) from every row of an untied head; return the changed tensors by stored name."""
        self.head.sub_(mean)
        return dict.fromkeys(self.table_names, self.head.detach())

    @torch.no_grad()
    def move_to_positions(self, mean: Tensor) -> dict[str, Tensor]:
        """Subtract `mean` from every row of a tied table and add it to every position, which keeps their sum."""
        assert self.positions is not None
        assert self.positions_name is not None
        self.head.sub_(mean)
        self.positions.add_(mean)
        return dict.fromkeys(self.table_names, self.head.detach()) | {self.positions_name: self.positions.detach()}

    @torch.no_grad()
    def untie(self, mean: Tensor) -> dict[str, Tensor]:
        """Give the head a copy of the table minus `mean`; the input table does not change."""
        layer = self.module.get_output_embeddings()  # type: ignore[operator]
        layer.weight = nn.Parameter(self.head.detach() - mean)
        return {self.new_head_name: layer.weight.detach()}
