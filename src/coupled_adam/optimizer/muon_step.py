"""The arithmetic of a Muon step: many matrices in few kernels, in batches that bound the temporary memory.

Matrices of the same shape form one (B, m, n) tensor; tall matrices are transposed. On a GPU, the products of a small
matrix take less time than their launch. Small matrices with the same m therefore share a batch, padded with columns of
zeros. These stay zero in every product and change no other number.

Legend: B matrices of a batch, m rows, n columns, m <= n after transposing.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from coupled_adam.optimizer.newton_schulz import iterated, orthogonalised
from coupled_adam.optimizer.sharding import is_distributed
from coupled_adam.optimizer.table_step import is_for_triton, triton_modules
from coupled_adam.optimizer.whole_matrix import gathered, part_on_this_rank

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Elements of a batch, 64 MiB in bfloat16: enough to fill a GPU, little compared to the model.
BATCH_ELEMENTS = 2**25
# Limit of n / m for small matrices that share a batch.
MOST_COLUMNS_PER_ROW = 4


@dataclass(frozen=True, slots=True)
class MuonMatrix:
    """A matrix of the model, with this rank's parts that a step reads and writes."""

    param: Tensor
    """The whole matrix, or a DTensor."""
    local: Tensor
    grad: Tensor
    momentum: Tensor
    """In the dtype of `grad`."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of the batches: matrices of the same kind can share a batch."""
        m, n = sorted(self.param.shape)
        is_small = m * n <= small_elements(self.local.device) and n <= MOST_COLUMNS_PER_ROW * m
        return (m, None if is_small else n, self.local.dtype, self.local.device, is_distributed(self.param))


def small_elements(device: torch.device) -> int:
    """Elements of the largest matrix whose products take less time than their launch; 0 on a CPU."""
    return 0 if device.type == "cpu" else 2**20


def muon_step(matrices: Sequence[MuonMatrix], group: dict[str, Any], grad_factor: Tensor | None = None) -> None:
    """Update the momenta and parameters of a group in place.

    Args:
        matrices: the matrices that have a gradient.
        group: the options.
        grad_factor: factor of the gradients (clipping), a scalar tensor; None means 1.
    """
    for batch in batches(matrices, BATCH_ELEMENTS):
        factor = None if grad_factor is None else grad_factor.reshape(()).to(batch[0].local.device)
        kernels = kernels_for(batch)
        if kernels is None:
            _step_by_operations(batch, group, factor)
        else:
            _step_by_kernels(kernels, batch, group, factor)


def _step_by_operations(batch: Sequence[MuonMatrix], group: dict[str, Any], grad_factor: Tensor | None) -> None:
    stacked = _stacked(batch, group, grad_factor)
    stacked = orthogonalised(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    _descend(batch, stacked, group)


def _step_by_kernels(
    kernels: ModuleType, batch: Sequence[MuonMatrix], group: dict[str, Any], grad_factor: Tensor | None
) -> None:
    device = batch[0].local.device
    stacked = torch.empty(_batch_shape(batch), dtype=NS_DTYPES[group["ns_dtype"]], device=device)
    square_sums = kernels.gather(
        [matrix.grad for matrix in batch],
        [matrix.momentum for matrix in batch],
        stacked,
        mu=group["momentum"],
        is_nesterov=group["nesterov"],
        grad_factor=None if grad_factor is None else grad_factor.float(),
    )
    kernels.scale(stacked, square_sums, group["eps"])
    stacked = iterated(stacked, group["ns_coefficients"], group["ns_steps"])
    kernels.descend(
        [matrix.local for matrix in batch],
        stacked,
        lr=_on_device(group["lr"], device),
        weight_decay=group["weight_decay"],
        ratio_of=functools.partial(lr_ratio, group["adjust_lr_fn"]),
    )


def kernels_for(batch: Sequence[MuonMatrix]) -> ModuleType | None:
    """Return `muon_kernels` for a batch of plain matrices on CUDA and ROCm, else None for torch operations."""
    if not is_for_triton(batch[0].local) or triton_modules()[0] is None:
        return None
    from coupled_adam.optimizer import muon_kernels

    # The kernels use addresses, so every tensor must be plain memory.
    is_plain = all(
        type(tensor) in (Tensor, Parameter)
        and tensor.dtype in muon_kernels.TRITON_DTYPES
        and tensor.device == matrix.local.device
        and tensor.numel() > 0
        for matrix in batch
        for tensor in (matrix.param, matrix.grad, matrix.momentum)
    )
    return muon_kernels if is_plain else None


def batches(matrices: Sequence[MuonMatrix], most_elements: int) -> Iterator[list[MuonMatrix]]:
    """Batch matrices of the same kind, sorted by shape, in the same order on all ranks.

    Args:
        matrices: the matrices of a group.
        most_elements: maximum elements of a batch; a larger matrix has its own batch.
    """
    kinds: dict[tuple[object, ...], list[MuonMatrix]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.kind, []).append(matrix)
    for alike in kinds.values():
        alike.sort(key=lambda matrix: tuple(matrix.param.shape))
        largest = max(min(matrix.param.shape) * max(matrix.param.shape) for matrix in alike)
        size = max(1, most_elements // max(1, largest))
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _stacked(batch: Sequence[MuonMatrix], group: dict[str, Any], grad_factor: Tensor | None) -> Tensor:
    """Update the momenta and stack the matrices to orthogonalize: (B, m, n), with zeros in missing columns."""
    if grad_factor is not None:
        clipped = torch._foreach_mul([matrix.grad for matrix in batch], grad_factor)
        batch = [replace(matrix, grad=grad) for matrix, grad in zip(batch, clipped, strict=True)]
    torch._foreach_lerp_(
        [matrix.momentum for matrix in batch], [matrix.grad for matrix in batch], 1 - group["momentum"]
    )
    stacked = torch.zeros(_batch_shape(batch), dtype=NS_DTYPES[group["ns_dtype"]], device=batch[0].local.device)
    for alike, into in _by_shape(batch, stacked):
        _stack_updates(alike, into, group["momentum"] if group["nesterov"] else None)
    return stacked


def _batch_shape(batch: Sequence[MuonMatrix]) -> tuple[int, int, int]:
    return len(batch), min(batch[0].param.shape), max(max(matrix.param.shape) for matrix in batch)


def _by_shape(batch: Sequence[MuonMatrix], stacked: Tensor) -> Iterator[tuple[list[MuonMatrix], Tensor]]:
    """Yield the matrices of each shape, with a view of their places in `stacked`, untransposed: (B, rows, columns)."""
    start = 0
    for (rows, columns), group in itertools.groupby(batch, key=lambda matrix: tuple(matrix.param.shape)):
        alike = list(group)
        places = stacked[start : start + len(alike)]
        yield alike, places[..., :columns] if rows <= columns else places[..., :rows].mT
        start += len(alike)


def _stack_updates(matrices: Sequence[MuonMatrix], into: Tensor, mu: float | None) -> None:
    """Fill (B, rows, columns) with the matrices to orthogonalize: the momenta, or Nesterov's if `mu` is given."""
    momenta, grads = [matrix.momentum for matrix in matrices], [matrix.grad for matrix in matrices]
    if is_distributed(matrices[0].param):
        for place, matrix in zip(into.unbind(), matrices, strict=True):
            local = matrix.momentum if mu is None else torch.lerp(matrix.grad, matrix.momentum, mu)
            place.copy_(gathered(local.to(into.dtype), matrix.param))
        return
    # Each matrix is a part of one dense tensor, so three kernels write them all.
    updates = torch.empty(into.shape, dtype=momenta[0].dtype, device=into.device)
    parts = list(updates.unbind())
    torch._foreach_copy_(parts, momenta if mu is None else grads)
    if mu is not None:
        torch._foreach_lerp_(parts, momenta, mu)
    into.copy_(updates)


def _descend(batch: Sequence[MuonMatrix], stacked: Tensor, group: dict[str, Any]) -> None:
    """Decay the parameters and subtract their directions; every rank has the whole directions."""
    params = [matrix.local for matrix in batch]
    # At least float32: in bfloat16, 1 - lr * weight_decay would round to 1.
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    lr = _on_device(group["lr"], stacked.device)
    values = params if params[0].dtype == dtype else [param.to(dtype) for param in params]
    if group["weight_decay"] != 0:
        torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
    changes: list[Tensor] = []
    for alike, directions in _by_shape(batch, stacked):
        factor = -lr * lr_ratio(group["adjust_lr_fn"], *directions.shape[-2:])
        # With dimensions, so that type promotion computes the product in its dtype, not in that of the directions.
        if isinstance(factor, Tensor):
            factor = factor.to(dtype).reshape(1, 1, 1)
        else:
            factor = torch.full((1, 1, 1), factor, dtype=dtype, device=stacked.device)
        dense = torch.empty(directions.shape, dtype=dtype, device=stacked.device)
        torch.mul(directions, factor, out=dense)
        changes += [
            part_on_this_rank(change, matrix.param) for change, matrix in zip(dense.unbind(), alike, strict=True)
        ]
    torch._foreach_add_(values, changes)
    if values is not params:
        torch._foreach_copy_(params, values)


def lr_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Factor of the learning rate for a matrix of this shape.

    Example:
        >>> lr_ratio("original", 400, 100), lr_ratio("original", 100, 400), lr_ratio("match_rms_adamw", 100, 400)
        (2.0, 1.0, 4.0)
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0


def _on_device(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return the learning rate as a number, or as a 0-dimensional tensor on the device. A host tensor is read."""
    if not isinstance(lr, Tensor):
        return lr
    if lr.device.type == "cpu" and device.type != "cpu":
        return lr.item()
    return lr.reshape(()).to(device)
