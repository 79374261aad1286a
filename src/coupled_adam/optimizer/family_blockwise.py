"""The family of second moments in torch operations, for the CPU and every device without a Triton kernel.

The denominator factors into a number per column and a number per row: u_ih = a_h rho_i m_ih, with

    rho_i = (sqrt(r_i) + eps)^-y
    a_h   = -lr / (1 - beta1^t) s^(y/2) / (sqrt(2^-n s (c_h / s)^x) + eps)

rho_i is known after reading row i. The pass that updates m can therefore also compute the column sums of rho_i m_ih,
which mean_free needs. Tables are processed in blocks of rows. If numba is installed, large tables on the CPU use its
compiled loops (`family_numba`). `family_triton` has the same functions. With beta1 = 0 there is no first moment: every
function reads the gradient times its factor instead of m.

Legend: V vocabulary rows, H hidden size, t optimizer step, x column exponent, y row exponent; c, r, s moving averages
of the mean squares of columns, rows and the table, divided by 1 - beta2^t.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.optimizer.blockwise import (
    ONE_THREAD_ELEMENTS,
    advance_average,
    advance_column_moment,
    advance_moment,
    bias_correction,
    blocks_at_a_time,
    column_square_sums,
    converted_bytes,
    for_each,
    gradient_weight,
    numba_kernels_for,
    rounding_keys,
    store_moment,
    weighted_gradient,
)
from coupled_adam.optimizer.stochastic_rounding import StepKeys
from coupled_adam.optimizer.table import Table, sum_dtype

__all__ = [
    "FirstPass",
    "advance_column_moment",
    "advance_first_moment",
    "advance_row_moment",
    "apply_update",
    "coefficients",
    "first_pass",
    "move_rows",
    "square_sums",
]


# Elements of a block on the CPU. With ten operations each, Python takes longer than the arithmetic in smaller blocks.
BLOCK_ELEMENTS = 2**18


class FirstPass(NamedTuple):
    """Results of one pass over gradient and first moment."""

    column_sums: Tensor  # (P, H) float64, sums of g^2 over the real rows
    weighted_sums: Tensor  # (P, H) float64, sums of rho_i m_ih over the real rows
    row_factor: Tensor | None  # rho, (V, 1); None means ones


def square_sums(table: Table) -> tuple[Tensor, Tensor | None]:
    """Sum the squares of the gradient over the real rows and, if there are row moments, over the columns.

    Returns:
        (P, H) partial sums, which the caller adds up over P, and (V, 1) or None; in float64 if the device has it.
    """
    loops = _loops_for(table.grad)
    if loops is not None and table.row_avg_sq is not None:
        sums: tuple[Tensor, Tensor] = loops.square_sums(table.grad, table.real_rows)
        return sums
    column_sums = column_square_sums(table.grad[: table.real_rows])
    return column_sums, None if table.row_avg_sq is None else row_square_sums(table.grad)


def first_pass(table: Table, grad_factor: Tensor | None) -> FirstPass:
    """Update r_t and m_t of a table in place and compute all sums that the rest of the step needs.

    Requires whole rows on this rank, and a `grad_factor` that does not depend on the sums.

    Args:
        table: the table.
        grad_factor: factor of the gradient (loss scale); None means 1.
    """
    loops = _loops_for(table.grad, moment=table.exp_avg)
    if loops is not None:
        keys = rounding_keys(table, _next_step(table))
        return FirstPass(*loops.first_pass(table, gradient_weight(table, grad_factor), keys))
    column_sums, row_sums = square_sums(table)
    row_factor = None if row_sums is None else advance_row_moment(table, row_sums, grad_factor)
    return FirstPass(column_sums, advance_first_moment(table, row_factor, grad_factor), row_factor)


def advance_row_moment(table: Table, row_sums: Tensor, grad_factor: Tensor | None) -> Tensor:
    """Update r_t of a table in place and return rho.

    Args:
        table: the table, with `row_avg_sq`.
        row_sums: row sums of squares of the unmodified gradient, over all ranks, (V, 1).
        grad_factor: factor of the gradient; None means 1.

    Returns:
        rho, (V, 1), in the dtype of `row_avg_sq`. With eps = 0, a row that never had a gradient has rho 0: it stays.
    """
    hyper, row_avg_sq = table.hyper, table.row_avg_sq
    assert row_avg_sq is not None
    loops = _loops_for(table.grad)
    if loops is not None:
        factors: Tensor = loops.advance_row_moment(table, row_sums, gradient_weight(table, grad_factor))
        return factors
    wide = sum_dtype(row_avg_sq.device)
    advance_average(row_avg_sq, row_sums.to(wide) / table.width, grad_factor, hyper.beta2)
    r_hat = row_avg_sq.to(wide) / bias_correction(hyper.beta2, _next_step(table))
    factor = (r_hat.sqrt() + hyper.eps) ** -hyper.row_exponent
    return torch.where(factor.isinf(), 0.0, factor).to(row_avg_sq.dtype)


def advance_first_moment(table: Table, row_factor: Tensor | None, grad_factor: Tensor | None) -> Tensor:
    """Update m_t of a table in place and return the sums of rho_i m_ih over its real rows.

    The sums use m as stored, rounded to its dtype, so that the updates add up to zero.

    Args:
        table: the table.
        row_factor: rho, (V, 1); None means ones.
        grad_factor: factor of the gradient; None means 1.

    Returns:
        (P, H) partial sums, which the caller adds up over P; in float64 if the device has it.
    """
    weight, keys = gradient_weight(table, grad_factor), rounding_keys(table, _next_step(table))
    if torch.compiler.is_compiling():
        _advance_rows(table, slice(None), weight, keys)
        return _weighted_sum(table, slice(0, table.real_rows), row_factor, weight)
    loops = _loops_for(table.grad, moment=table.exp_avg)
    if loops is not None:
        sums: Tensor = loops.advance_first_moment(table, row_factor, weight, keys)
        return sums
    V, H = table.param.shape
    rows, threads = _blocks(table)
    in_blocks = _advances_in_blocks(table)
    if not in_blocks:
        _advance_rows(table, slice(None), weight, keys)
    # Few enough pieces that their sums stay small.
    pieces = max(min(-(-V // rows), ONE_THREAD_ELEMENTS // max(H, 1)), 1)
    rows_per_piece = max(-(-V // (pieces * rows)), 1) * rows
    starts = range(0, V, rows_per_piece)
    dtype = sum_dtype(table.param.device)
    sums = torch.zeros(max(len(starts), 1), H, dtype=dtype, device=table.param.device)

    def advance_piece(start: int) -> None:
        piece_sum = sums[start // rows_per_piece]
        for first in range(start, min(start + rows_per_piece, V), rows):
            if in_blocks and table.exp_avg is not None:
                _advance_rows(table, slice(first, first + rows), weight, keys)
            real = slice(first, min(first + rows, table.real_rows))
            if real.start < real.stop:
                piece_sum.add_(_weighted_sum(table, real, row_factor, weight)[0])

    for_each(starts, advance_piece, threads)
    return sums


def coefficients(
    table: Table, weighted_sums: Tensor | None, mean_second_moment: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the coefficient of rho_i m_ih, and the mean update that mean_free subtracts.

    Args:
        table: the table, with c_t and r_t.
        weighted_sums: sums from `first_pass` or `advance_first_moment`, over all ranks, (P, H); None without mean_free.
        mean_second_moment: mean of `exp_avg_sq` over all columns if the columns are sharded, else None.

    Returns:
        The coefficient a, (1, H), and a times the mean of rho_i m_ih over the real rows, (1, H), or None.
    """
    hyper, t = table.hyper, _next_step(table)
    wide = sum_dtype(table.exp_avg_sq.device)
    c = table.exp_avg_sq.to(wide) / bias_correction(hyper.beta2, t)
    s = c.mean() if mean_second_moment is None else mean_second_moment.to(wide) / bias_correction(hyper.beta2, t)
    x, y = hyper.column_exponent, hyper.row_exponent
    # All ratios are 1 before the first gradient.
    ratio = torch.where(s == 0, 1.0, c / s)
    v = c if not isinstance(x, Tensor) and x == 1.0 else s * ratio**x
    a = (-hyper.lr / bias_correction(hyper.beta1, t)) / ((v * hyper.second_moment_scale).sqrt() + hyper.eps)
    if table.row_avg_sq is not None:
        a = a * s ** (0.5 * y)
    # No gradient yet, or a square beyond the range of the state. AdamW does not move such elements either.
    a = torch.where((s == 0) | s.isposinf(), 0.0, a)
    offset = None
    if weighted_sums is not None:
        mean = weighted_sums.to(wide).sum(dim=0, keepdim=True) / table.rows
        offset = (a * mean).to(table.exp_avg_sq.dtype)
    return a.to(table.exp_avg_sq.dtype), offset


def apply_update(table: Table, coefficient: Tensor, row_factor: Tensor | None, grad_factor: Tensor | None) -> None:
    """Update m_t and e_t of a table in place, and count the step.

    Args:
        table: the table.
        coefficient: a, (1, H).
        row_factor: rho, (V, 1); None means ones.
        grad_factor: factor of the gradient; None means 1.
    """
    weight, keys = gradient_weight(table, grad_factor), rounding_keys(table, _next_step(table))

    in_blocks = _advances_in_blocks(table)

    def update(block: slice) -> None:
        moment = _advance_rows(table, block, weight, keys) if in_blocks else _moment(table, block, weight)
        _move_rows(table, block, moment, coefficient, row_factor, None)

    loops = _loops_for(table.param, table.grad, moment=table.exp_avg)
    if loops is not None:
        loops.apply_update(table, coefficient, row_factor, weight, keys)
    else:
        if not in_blocks:
            _advance_rows(table, slice(None), weight, keys)
        _for_blocks(table, update)
    table.step.add_(1)


def move_rows(
    table: Table,
    coefficient: Tensor,
    row_factor: Tensor | None,
    offset: Tensor | None,
    grad_factor: Tensor | None = None,
) -> None:
    """Update e_t of a table in place from its updated m_t, and count the step.

    Args:
        table: the table.
        coefficient: a, (1, H).
        row_factor: rho, (V, 1); None means ones.
        offset: the mean update, (1, H).
        grad_factor: factor of the gradient, which is read only without a first moment; None means 1.
    """
    weight = gradient_weight(table, grad_factor)
    loops = _loops_for(table.param, moment=table.grad if table.exp_avg is None else table.exp_avg)

    def move(block: slice) -> None:
        _move_rows(table, block, _moment(table, block, weight), coefficient, row_factor, offset)

    if loops is not None:
        loops.move_rows(table, coefficient, row_factor, offset, weight)
    else:
        _for_blocks(table, move)
    table.step.add_(1)


def row_square_sums(grad: Tensor) -> Tensor:
    """Sum g_h^2 over the columns h: (V, 1), in float64 if the device has it.

    Example:
        >>> row_square_sums(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([[25.],
                [ 4.]], dtype=torch.float64)
    """
    wide = sum_dtype(grad.device)
    compute_dtype = torch.promote_types(grad.dtype, torch.float32)
    if torch.compiler.is_compiling() and compute_dtype != wide:
        # Row norms without overflow, in operations that the compiler fuses.
        g = grad.float()
        largest = g.abs().amax(dim=1, keepdim=True)
        scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        return (g / scale).square().sum(dim=1, keepdim=True).to(wide) * scale.to(wide).square()
    rows, threads = blocks_at_a_time(grad, compute_dtype.itemsize, BLOCK_ELEMENTS)
    if grad.is_cpu and grad.dtype == compute_dtype:
        rows, threads = max(grad.shape[0], 1), 1  # no temporaries: one operation, which torch spreads over the threads
    sums = torch.empty(grad.shape[0], 1, dtype=wide, device=grad.device)

    def sum_block(start: int) -> None:
        block = grad[start : start + rows].to(compute_dtype)
        squares = torch.linalg.vector_norm(block, dim=1, keepdim=True).to(wide).square()
        if not grad.is_cpu or (compute_dtype != wide and not squares.isfinite().all()):
            # float32 is faster, and suffices for gradients up to about 1e17. NaN and infinity are preserved.
            squares = block.to(wide).square().sum(dim=1, keepdim=True)
        sums[start : start + rows] = squares

    for_each(range(0, grad.shape[0], rows), sum_block, threads)
    return sums


def _loops_for(*tensors: Tensor, moment: Tensor | None = None) -> ModuleType | None:
    """Return the compiled loops if numba is installed and they support these tensors, else None."""
    if numba_kernels_for(*tensors, moment=moment) is None:
        return None
    from coupled_adam.optimizer import family_numba  # imports numba, which takes a second

    return family_numba


def _converts(table: Table) -> bool:
    """Whether a step must convert gradients or first moments, which is done in blocks to save memory."""
    moment = table.grad if table.exp_avg is None else table.exp_avg
    return not table.param.dtype == table.grad.dtype == moment.dtype == table.exp_avg_sq.dtype


def _advances_in_blocks(table: Table) -> bool:
    """Whether new first moments need temporaries: for a conversion, or because no state holds them."""
    return table.exp_avg is None or _converts(table)


def _blocks(table: Table) -> tuple[int, int]:
    """Choose the rows per block and the number of threads."""
    # The moment times rho and, if no state holds it, the moment itself.
    products = (2 if table.exp_avg is None else 1) * table.param.itemsize
    temporary = converted_bytes(table) if _converts(table) else products
    return blocks_at_a_time(table.param, temporary, BLOCK_ELEMENTS)


def _next_step(table: Table) -> float | Tensor:
    """Return t before the step is counted."""
    on_host = table.step.device.type == "cpu" and not torch.compiler.is_compiling()
    return (table.step.item() if on_host else table.step) + 1


def _advance_rows(table: Table, block: slice, weight: float | Tensor, keys: StepKeys | None) -> Tensor:
    """Update m_t of some rows in place. Returns the m_t that moves them: as stored, but before stochastic rounding."""
    if table.exp_avg is None:
        return weighted_gradient(table, block, weight)
    exp_avg = table.exp_avg[block]
    moment = exp_avg.to(table.exp_avg_sq.dtype)  # the tensor itself if no conversion is needed
    advance_moment(moment, table.grad[block].to(moment.dtype), table.hyper.beta1, weight)
    if moment is exp_avg:
        return moment
    store_moment(table, exp_avg, block, moment, keys)
    return exp_avg.to(moment.dtype) if keys is None else moment


def _moment(table: Table, block: slice, weight: float | Tensor) -> Tensor:
    """Return m_t of some rows after its update. Do not write to it."""
    if table.exp_avg is None:
        return weighted_gradient(table, block, weight)
    return table.exp_avg[block].to(table.exp_avg_sq.dtype)


def _weighted_sum(table: Table, block: slice, row_factor: Tensor | None, weight: float | Tensor) -> Tensor:
    """Sum rho_i m_ih over some rows: (1, H)."""
    moment = _moment(table, block, weight)
    if row_factor is not None:
        moment = moment * row_factor[block]
    return moment.sum(dim=0, keepdim=True).to(sum_dtype(moment.device))


def _move_rows(
    table: Table, block: slice, moment: Tensor, coefficient: Tensor, row_factor: Tensor | None, offset: Tensor | None
) -> None:
    """Update e_t of some rows in place from their m_t."""
    hyper, param = table.hyper, table.param[block]
    embedding = param.to(coefficient.dtype)
    if row_factor is not None:
        moment = moment * row_factor[block]
    if hyper.weight_decay != 0:
        embedding.mul_(1 - hyper.lr * hyper.weight_decay)
    embedding.addcmul_(moment, coefficient)
    if offset is not None:
        embedding.sub_(offset)
    if embedding is not param:
        param.copy_(embedding)


def _for_blocks(table: Table, work: Callable[[slice], None]) -> None:
    if torch.compiler.is_compiling():
        work(slice(None))
        return
    rows, threads = _blocks(table)
    for_each(range(0, table.param.shape[0], rows), lambda start: work(slice(start, start + rows)), threads)
