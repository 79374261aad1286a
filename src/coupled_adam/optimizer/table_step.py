"""The step of one coupled table, in three phases. Sums cross ranks between them.

`start` reads the gradient and computes sums. `advance` updates moments, and may compute further sums. `finish` updates
the rows. The caller sends the sums of all tables together. Coupled Adam needs only the first sums.

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
    """The step of one coupled table."""

    def start(self) -> list[PartialSum]:
        """Compute the first sums. If the global norm is needed, write nothing."""

    def square_norm(self) -> PartialSum:
        """Squared norm of the gradient on this rank, from the sums before they cross ranks."""

    def advance(self, grad_factor: Tensor | None) -> list[PartialSum]:
        """Update everything that needs only the first sums, and compute further sums.

        Args:
            grad_factor: factor of the gradient (loss scale, clipping); None means 1.
        """

    def finish(self) -> None:
        """Update the rest and count the step."""


def build_table_step(
    table: Table, param: Tensor, *, grad_factor: Tensor | None, found_inf: Tensor | None, is_norm_needed: bool
) -> TableStep:
    """Build the step of one table.

    Args:
        table: this rank's part of the table.
        param: the whole parameter, which determines the sharding.
        grad_factor: factor of the gradient before clipping (loss scale); None means 1.
        found_inf: a scalar; if it is not zero, skip the step.
        is_norm_needed: whether the global norm must be known before anything is written.
    """
    if table.is_coupled_adam:
        return CoupledAdamStep(table, param, kernels_for(table.grad), found_inf)
    return FamilyStep(table, param, family_kernels_for(table.grad), grad_factor, found_inf, is_norm_needed)


class CoupledAdamStep:
    """The step of the paper's method."""

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
    """The step of any member of the family of second moments, with or without mean_free.

    With mean_free, the rows need a second sum, of rho_i m_ih. If possible, one pass over gradient and first moment
    computes both sums.
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
        # On the host, a step is skipped only after the first sums, because all ranks must send them.
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
            # This rank's share of the mean. In float64, because the sum of large moments overflows float32.
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
            self.kernels.move_rows(self.table, coefficient, self.row_factor, offset, self.grad_factor, **self.options)
        else:
            self.kernels.apply_update(self.table, coefficient, self.row_factor, self.grad_factor, **self.options)

    def _advance_first_moment(self) -> Tensor:
        if self.is_skipped:  # the other ranks still wait for sums
            return torch.zeros_like(self.column_sums.values)
        sums: Tensor = self.kernels.advance_first_moment(self.table, self.row_factor, self.grad_factor, **self.options)
        return sums


def kernels_for(tensor: Tensor) -> ModuleType:
    """Return the module that updates this tensor: `triton_kernels` on CUDA and ROCm, else `blockwise`."""
    return (triton_modules()[0] if is_for_triton(tensor) else None) or blockwise


def family_kernels_for(tensor: Tensor) -> ModuleType:
    """Like `kernels_for`, for the family: `family_triton` or `family_blockwise`."""
    return (triton_modules()[1] if is_for_triton(tensor) else None) or family_blockwise


def is_for_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels support a tensor, if Triton is installed."""
    # torch.compile fuses the torch operations itself. float64 is for tests, not for speed.
    return tensor.is_cuda and tensor.dtype != torch.float64 and not torch.compiler.is_compiling()


@functools.cache
def triton_modules() -> tuple[ModuleType | None, ModuleType | None]:
    """Import `triton_kernels` and `family_triton`; (None, None) if Triton cannot be imported."""
    try:
        from coupled_adam.optimizer import family_triton, triton_kernels
    except ImportError as error:
        warnings.warn(f"coupled_adam: Triton cannot be imported; using slower torch operations ({error})", stacklevel=2)
        return None, None
    return triton_kernels, family_triton


def real_rows(table: Table) -> Tensor:
    """The gradient of this rank's rows that are not padding."""
    return table.grad if table.real_rows == table.grad.shape[0] else table.grad[: table.real_rows]


def is_skipped(found_inf: Tensor | None) -> bool:
    """Whether GradScaler found an infinite gradient. Waits for the device."""
    return found_inf is not None and found_inf.item() != 0


def _over_rows(sums: Tensor, param: Tensor) -> PartialSum:
    """Wrap sums over rows: (P, H) on one rank, (1, H) if they must be added up over ranks."""
    groups = process_groups(param, tensor_dim=0)
    return PartialSum(sums.sum(dim=0, keepdim=True) if groups else sums, groups)


def _square_norm(table: Table, param: Tensor, column_sums: PartialSum) -> PartialSum:
    square = column_sums.values.sum()
    if table.real_rows < table.grad.shape[0]:  # the norm includes padding, unlike the second moment
        square = square + clipping.square_norm([table.grad[table.real_rows :]])
    return PartialSum(square, process_groups(param))


def _on_table(scalar: Tensor | None, table: Table, dtype: torch.dtype | None = None) -> Tensor | None:
    # A float64 parameter elsewhere makes the factor float64, which the Triton kernels do not support.
    return None if scalar is None else scalar.to(table.grad.device, dtype)


def _options(kernels_read_it: bool, found_inf: Tensor | None) -> dict[str, Any]:
    return {"found_inf": found_inf} if kernels_read_it and found_inf is not None else {}
