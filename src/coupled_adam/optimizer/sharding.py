"""Sharded tables and gradients (FSDP2, HSDP, tensor parallel), as DTensors.

The update itself is elementwise and runs on each rank's part. Only sums cross ranks: the column sums of squares, over
the mesh dimensions that shard rows, and the squared norms for clipping. They share one message per process group.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from coupled_adam.optimizer.table import sum_dtype
from coupled_adam.optimizer.torch_versions import global_offset


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Checked by attribute: importing torch.distributed.tensor takes a second."""
    if type(tensor) is Tensor or type(tensor) is Parameter:  # looking up a missing attribute is slow
        return False
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory; return any other tensor unchanged."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def local_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a gradient, with the rows and columns of its part of the parameter.

    Under tensor parallelism, the gradient of a sharded parameter can be replicated or still partial.
    """
    if not is_distributed(param):
        return grad
    placements = param.placements  # type: ignore[attr-defined]
    if grad.placements != placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
    local = local_part(grad)
    return local.wait() if hasattr(local, "wait") else local


def second_moment_like(param: Tensor) -> Tensor:
    """Create the coupled second moment of a table: zeros (1, H), float32 or wider.

    For a DTensor it is a DTensor on the same mesh: replicated where the table is sharded by rows, sharded where the
    table is sharded by columns.
    """
    local = local_part(param)
    dtype = torch.promote_types(param.dtype, torch.float32)
    zeros = torch.zeros(1, local.shape[1], dtype=dtype, device=local.device)
    return distribute_like(zeros, param)


def distribute_like(row: Tensor, param: Tensor) -> Tensor:
    """Turn this rank's part of a (1, H) tensor into a DTensor sharded like the columns of `param`."""
    if not is_distributed(param):
        return row
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        row,
        param.device_mesh,  # type: ignore[attr-defined]
        row_placements(param),
        run_check=False,
        shape=torch.Size((1, param.shape[1])),
        stride=(param.shape[1], 1),
    )


def row_placements(param: Tensor) -> list[Any]:
    """Placements of a (1, H) tensor that is sharded like the columns of `param`."""
    from torch.distributed.tensor import Replicate

    return [
        placement if not placement.is_replicate() and placement.dim == 1 else Replicate()
        for placement in param.placements  # type: ignore[attr-defined]
    ]


def row_moment_like(param: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Create the row moments of a table, (V, 1), filled with the mean of its column moments.

    Every row then starts with r_i / s = 1, which is Coupled Adam. For a DTensor it is a DTensor on the same mesh:
    sharded where the table is sharded by rows, replicated where the table is sharded by columns.
    """
    local = local_part(param)
    mean = local_part(exp_avg_sq).sum(dtype=sum_dtype(local.device)) / param.shape[1]
    Reduction([PartialSum(mean, process_groups(param, tensor_dim=1))]).wait()
    rows = torch.empty(local.shape[0], 1, dtype=exp_avg_sq.dtype, device=local.device).copy_(
        mean.expand(local.shape[0], 1)
    )
    return column_like(rows, param)


def column_like(column: Tensor, param: Tensor) -> Tensor:
    """Turn this rank's part of a (V, 1) tensor into a DTensor sharded like the rows of `param`."""
    if not is_distributed(param):
        return column
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        placement if not placement.is_replicate() and placement.dim == 0 else Replicate()
        for placement in param.placements  # type: ignore[attr-defined]
    ]
    return DTensor.from_local(
        column,
        param.device_mesh,  # type: ignore[attr-defined]
        placements,
        run_check=False,
        shape=torch.Size((param.shape[0], 1)),
        stride=(1, 1),
    )


def local_real_rows(param: Tensor, vocabulary_size: int | None) -> int:
    """Number of this rank's rows that are not padding. They come first.

    Args:
        param: the table, (V, H).
        vocabulary_size: number of rows of the whole table that are not padding; None means all.
    """
    local_rows = local_part(param).shape[0]
    if vocabulary_size is None or not is_distributed(param):
        return local_rows if vocabulary_size is None else min(vocabulary_size, local_rows)
    return max(min(vocabulary_size - first_row_and_column(param)[0], local_rows), 0)


def first_row_and_column(param: Tensor) -> tuple[int, int]:
    """Row and column of the whole table at which this rank's part begins."""
    if not is_distributed(param):
        return 0, 0
    return global_offset(param.shape, param.device_mesh, tuple(param.placements))  # type: ignore[attr-defined]


def process_groups(param: Tensor, tensor_dim: int | None = None) -> tuple[Any, ...]:
    """Process groups over which a parameter is sharded, along one tensor dimension or, for None, along any.

    Checks `is_replicate`, because `_StridedShard` (tensor parallel with FSDP2) is not a `Shard`.
    """
    if not is_distributed(param):
        return ()
    mesh = param.device_mesh  # type: ignore[attr-defined]
    return tuple(
        mesh.get_group(mesh_dim)
        for mesh_dim, placement in enumerate(param.placements)  # type: ignore[attr-defined]
        if not placement.is_replicate() and tensor_dim in (None, placement.dim)
    )


@dataclass(frozen=True, slots=True)
class PartialSum:
    """A tensor to replace, in place, by its sum over process groups."""

    values: Tensor
    groups: tuple[Any, ...]


class Reduction:
    """All-reduces of many partial sums, started by the constructor and completed by `wait`.

    Sums over the same process group share one message. A sum over two groups (rows sharded by two mesh dimensions)
    needs one message after the other; only the first overlaps with the caller's work.
    """

    def __init__(self, sums: Sequence[PartialSum]) -> None:
        self._unsent: dict[Any, list[Tensor]] = {}  # parts of each group's message, in the same order on all ranks
        for partial_sum in sums:
            for group in partial_sum.groups:
                self._unsent.setdefault(group, []).append(partial_sum.values)
        self._in_flight = self._send()

    def wait(self) -> None:
        """Wait until every sum is complete (on CUDA: for work that is queued on the current stream from now on)."""
        while self._in_flight:
            for message, parts, work in self._in_flight:
                work.wait()
                for part, summed in zip(parts, message.split([part.numel() for part in parts]), strict=True):
                    part.copy_(summed.view_as(part))
            self._in_flight = self._send()

    def _send(self) -> list[tuple[Tensor, list[Tensor], Any]]:
        """Send the messages that share no part with an earlier unfinished message."""
        in_flight: list[tuple[Tensor, list[Tensor], Any]] = []
        taken: set[int] = set()
        for group, parts in list(self._unsent.items()):
            if taken.isdisjoint(map(id, parts)):
                message = torch.cat([part.reshape(-1) for part in parts])
                in_flight.append((message, parts, dist.all_reduce(message, group=group, async_op=True)))
                del self._unsent[group]
            taken.update(map(id, parts))
        return in_flight
