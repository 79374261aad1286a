"""One coupled table during one step, in three parts between which numbers cross the ranks.

`start` reads the gradient and takes sums; `advance` updates moments, which may give further sums; `finish` moves the
rows. The caller sends the sums of all tables together. Coupled Adam needs the first sums only.

Legend: V vocabulary rows, H hidden size, P partial sums; rho and a as in `family_blockwise`.
"""

import functools
import warnings
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from coupled_adam.optimizer import blockwise, clipping, family_blockwise
from coupled_adam.optimizer.sharding import PartialSum, process_groups
from coupled_adam.optimizer.table import Table, sum_dtype


class TableStep(Protocol):
    """One coupled table during one step."""

    def start(self) -> list[PartialSum]:
        """Take the first sums; before clipping nothing is written."""

    def square_norm(self) -> PartialSum:
        """Squared norm of the gradient on this rank, from the sums before they cross ranks."""

    def advance(self, grad_factor: Tensor | None) -> list[PartialSum]:
        """Update what the first sums allow, and take further ones.

        Args:
            grad_factor: what the gradient must be multiplied with (loss scale, clipping), None for 1.
        """

    def finish(self) -> None:
        """Update the rest and count the step."""


def build_table_step(
    table: Table, param: Tensor, *, grad_factor: Tensor | None, found_inf: Tensor | None, is_norm_needed: bool
) -> TableStep:
    """The step of one table.

    Args:
        table: this rank's part of the table.
        param: the whole parameter, which knows how it is sharded.
        grad_factor: what the gradient must be multiplied with as far as it is known before clipping.
        found_inf: a scalar; other than zero, the step is not taken.
        is_norm_needed: whether nothing may be written before the global norm is known.
    """
    if table.is_coupled_adam:
        return CoupledAdamStep(table, param, kernels_for(table.grad), found_inf)
    return FamilyStep(table, param, family_kernels_for(table.grad), grad_factor, found_inf, is_norm_needed)


class CoupledAdamStep:
    """The paper's method."""

    def __init__(self, table: Table, param: Tensor, kernels: ModuleType, found_inf: Tensor | None) -> None:
        self.table, self.param, self.kernels = table, param, kernels
        self.found_inf = _on_table(found_inf, table)
        self.grad_factor: Tensor | None = None

    def start(self) -> list[PartialSum]:
        sums = self.kernels.column_square_sums(real_rows(self.table))
        self.column_sums = _over_rows(sums, self.param)
        return [self.column_sums]

    def square_norm(self) -> PartialSum:
        return _square_norm(self.table, self.param, self.column_sums)

    def advance(self, grad_factor: Tensor | None) -> list[PartialSum]:
        self.grad_factor = _on_table(grad_factor, self.table, self.table.exp_avg_sq.dtype)
        return []

    def finish(self) -> None:
        if self.kernels is blockwise and is_skipped(self.found_inf):
            return
        options = _options(self.kernels is not blockwise, self.found_inf)
        coefficient = self.kernels.advance_second_moment(
            self.table, self.column_sums.values, self.grad_factor, **options
        )
        self.kernels.apply_update(self.table, coefficient, self.grad_factor, **options)


class FamilyStep:
    """Any member of the family of second moments, with or without the mean update.

    Without the mean update the rows move after a second sum, of rho_i m_ih. Where nothing stands in the way it is
    taken together with the first, in one pass over gradient and first moment.
    """

    def __init__(
        self,
        table: Table,
        param: Tensor,
        kernels: ModuleType,
        grad_factor: Tensor | None,
        found_inf: Tensor | None,
        is_norm_needed: bool,
    ) -> None:
        self.table, self.param, self.kernels = table, param, kernels
        self.found_inf = _on_table(found_inf, table)
        self.grad_factor = _on_table(grad_factor, table, table.exp_avg_sq.dtype)
        self.column_groups = process_groups(param, tensor_dim=1)
        on_host = kernels is family_blockwise
        self.options = _options(not on_host, self.found_inf)
        # On the host a step is skipped after the first sums, which all ranks must send.
        reads_found_inf = on_host and found_inf is not None
        self.takes_one_pass = (
            table.hyper.mean_free and not is_norm_needed and not self.column_groups and not reads_found_inf
        )
        self.row_factor: Tensor | None = None
        self.row_sums: PartialSum | None = None
        self.weighted_sums: PartialSum | None = None
        self.mean_second_moment: PartialSum | None = None

    def start(self) -> list[PartialSum]:
        if self.takes_one_pass:
            first = self.kernels.first_pass(self.table, self.grad_factor, **self.options)
            self.row_factor = first.row_factor
            self.column_sums = _over_rows(first.column_sums, self.param)
            self.weighted_sums = _over_rows(first.weighted_sums, self.param)
            return [self.column_sums, self.weighted_sums]
        column_sums, row_sums = self.kernels.square_sums(self.table)
        self.column_sums = _over_rows(column_sums, self.param)
        if row_sums is None:
            return [self.column_sums]
        self.row_sums = PartialSum(row_sums, self.column_groups)
        return [self.column_sums, self.row_sums]

    def square_norm(self) -> PartialSum:
        return _square_norm(self.table, self.param, self.column_sums)

    def advance(self, grad_factor: Tensor | None) -> list[PartialSum]:
        table, kernels = self.table, self.kernels
        self.grad_factor = _on_table(grad_factor, table, table.exp_avg_sq.dtype)
        self.is_skipped = kernels is family_blockwise and is_skipped(self.found_inf)
        if not self.is_skipped:
            if self.row_sums is not None:
                self.row_factor = kernels.advance_row_moment(
                    table, self.row_sums.values, self.grad_factor, **self.options
                )
            kernels.advance_column_moment(table, self.column_sums.values, self.grad_factor, **self.options)
        sums = []
        if table.hyper.mean_free and not self.takes_one_pass:
            self.weighted_sums = _over_rows(self._advance_first_moment(), self.param)
            sums.append(self.weighted_sums)
        if self.column_groups:
            # This rank's share of it, in float64 as without sharding: the sum of large moments overflows float32.
            mean = table.exp_avg_sq.sum(dtype=sum_dtype(table.exp_avg_sq.device)) / table.width
            self.mean_second_moment = PartialSum(mean, self.column_groups)
            sums.append(self.mean_second_moment)
        return sums

    def finish(self) -> None:
        if self.is_skipped:
            return
        weighted_sums = None if self.weighted_sums is None else self.weighted_sums.values
        mean = None if self.mean_second_moment is None else self.mean_second_moment.values
        coefficient, offset = self.kernels.coefficients(self.table, weighted_sums, mean)
        if offset is not None:
            self.kernels.move_rows(self.table, coefficient, self.row_factor, offset, **self.options)
        else:
            self.kernels.apply_update(self.table, coefficient, self.row_factor, self.grad_factor, **self.options)

    def _advance_first_moment(self) -> Tensor:
        if self.is_skipped:  # the other ranks wait for sums
            return torch.zeros_like(self.column_sums.values)
        sums: Tensor = self.kernels.advance_first_moment(self.table, self.row_factor, self.grad_factor, **self.options)
        return sums


def kernels_for(tensor: Tensor) -> ModuleType:
    """The module whose functions update this tensor: `triton_kernels` on CUDA and ROCm, `blockwise` elsewhere."""
    return (triton_modules()[0] if is_for_triton(tensor) else None) or blockwise


def family_kernels_for(tensor: Tensor) -> ModuleType:
    """The same for the family: `family_triton` or `family_blockwise`."""
    return (triton_modules()[1] if is_for_triton(tensor) else None) or family_blockwise


def is_for_triton(tensor: Tensor) -> bool:
    """Whether a tensor is one for the Triton kernels, if Triton is there."""
    # Under torch.compile the plain operations are fused by the compiler; float64 is for checking, not for speed.
    return tensor.is_cuda and tensor.dtype != torch.float64 and not torch.compiler.is_compiling()


@functools.cache
def triton_modules() -> tuple[ModuleType | None, ModuleType | None]:
    """`triton_kernels` and `family_triton`, where Triton can be imported."""
    try:
        from coupled_adam.optimizer import family_triton, triton_kernels
    except ImportError as error:
        warnings.warn(
            f"coupled_adam: Triton cannot be imported, the slower torch operations are used ({error})", stacklevel=2
        )
        return None, None
    return triton_kernels, family_triton


def real_rows(table: Table) -> Tensor:
    """The gradient of this rank's rows that are not padding."""
    return table.grad if table.real_rows == table.grad.shape[0] else table.grad[: table.real_rows]


def is_skipped(found_inf: Tensor | None) -> bool:
    """Read whether GradScaler has found an infinite gradient; waits for the device."""
    return found_inf is not None and found_inf.item() != 0


def _over_rows(sums: Tensor, param: Tensor) -> PartialSum:
    """Sums over rows, (P, H) on one rank, (1, H) where they must be added up over ranks."""
    groups = process_groups(param, tensor_dim=0)
    return PartialSum(sums.sum(dim=0, keepdim=True) if groups else sums, groups)


def _square_norm(table: Table, param: Tensor, column_sums: PartialSum) -> PartialSum:
    square = column_sums.values.sum()
    if table.real_rows < table.grad.shape[0]:  # padding counts for the norm, if for nothing else
        square = square + clipping.square_norm([table.grad[table.real_rows :]])
    return PartialSum(square, process_groups(param))


def _on_table(scalar: Tensor | None, table: Table, dtype: torch.dtype | None = None) -> Tensor | None:
    # A float64 parameter elsewhere makes a factor float64, which the Triton kernels must not see.
    return None if scalar is None else scalar.to(table.grad.device, dtype)


def _options(kernels_read_it: bool, found_inf: Tensor | None) -> dict[str, Any]:
    return {"found_inf": found_inf} if kernels_read_it and found_inf is not None else {}
