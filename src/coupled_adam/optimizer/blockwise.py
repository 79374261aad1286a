"""The coupled update in torch operations, for the CPU and every device without a Triton kernel.

If numba is installed, large tables on the CPU use its compiled loops instead (`numba_kernels`). Otherwise squares and
dtype conversions work on blocks of rows, so that all temporaries together take at most about a quarter of the bytes of
the table. `triton_kernels` has the same functions.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

import functools
import importlib.util
import math
import warnings
from collections import deque
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from coupled_adam.optimizer import stochastic_rounding
from coupled_adam.optimizer.row_threads import run_on_threads
from coupled_adam.optimizer.stochastic_rounding import StepKeys
from coupled_adam.optimizer.table import Table, sum_dtype

# Limit for the temporaries of all blocks in progress.
BLOCK_BYTES = 6 * 2**20
# torch runs an elementwise operation on fewer elements in the calling thread: without a barrier, and in its cache.
ONE_THREAD_ELEMENTS = 2**15
# Importing numba and loading or compiling its loops takes seconds; a step of a smaller table takes a millisecond.
NUMBA_ELEMENTS = 2**22
# Under torch.compile, larger gradients are summed separately and multiplied by SHRINK before they are squared.
LARGE, SHRINK = 2.0**50, 2.0**-80


def column_square_sums(grad: Tensor) -> Tensor:
    """Sum g_i^2 over the rows i: all that the second moment needs from the gradient.

    Args:
        grad: g, (V, H), any float dtype.

    Returns:
        (P, H) partial sums; the caller adds them up over P, which is 1 here. In float64 if the device has it, because
        squares of finite float32 gradients overflow float32.

    Example:
        >>> column_square_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[10., 20.]], dtype=torch.float64)
    """
    if torch.compiler.is_compiling():
        return _fused_square_sums(grad)
    kernels = numba_kernels_for(grad)
    if kernels is not None:
        sums: Tensor = kernels.column_square_sums(grad)
        return sums
    wide = sum_dtype(grad.device)
    if not grad.is_cpu:
        return _square_sums(grad, wide)
    sums = _square_sums(grad, torch.promote_types(grad.dtype, torch.float32)).to(wide)
    if grad.dtype != wide and not sums.isfinite().all():
        # float32 is twice as fast, and suffices for gradients up to about 1e17. NaN and infinity are preserved.
        sums = torch.where(sums.isfinite(), sums, _square_sums(grad, wide))
    return sums


def advance_second_moment(table: Table, square_sums: Tensor, grad_factor: Tensor | None) -> Tensor:
    """Count the step, update v_t of a table in place, and return the coefficient of the first moment.

    Everything but the stored state is float64: gradients that are fine for AdamW have squares beyond float32.

    Args:
        table: the table.
        square_sums: column sums of squares of the unmodified gradient, over all ranks, (P, H).
        grad_factor: factor of the gradient (loss scale, clipping); None means 1.

    Returns:
        The coefficient -lr / (1 - beta1^t) / (sqrt(2^-n v_t / (1 - beta2^t)) + eps), (1, H).
    """
    hyper = table.hyper
    table.step.add_(1)
    on_host = table.step.device.type == "cpu" and not torch.compiler.is_compiling()
    t = table.step.item() if on_host else table.step
    advance_column_moment(table, square_sums, grad_factor)
    bias_correction1 = bias_correction(hyper.beta1, t)
    bias_correction2 = bias_correction(hyper.beta2, t)
    v_hat = table.exp_avg_sq.to(sum_dtype(table.exp_avg_sq.device)) * (hyper.second_moment_scale / bias_correction2)
    return ((-hyper.lr / bias_correction1) / (v_hat.sqrt() + hyper.eps)).to(table.exp_avg_sq.dtype)


def advance_column_moment(table: Table, square_sums: Tensor, grad_factor: Tensor | None) -> None:
    """Set v_t = beta2 v_{t-1} + (1 - beta2) mean_i(g_i^2) in place; arguments as for `advance_second_moment`."""
    wide = sum_dtype(table.exp_avg_sq.device)
    mean_square = square_sums.to(wide).sum(dim=0, keepdim=True) / table.rows
    advance_average(table.exp_avg_sq, mean_square, grad_factor, table.hyper.beta2)


def advance_average(average: Tensor, mean_square: Tensor, grad_factor: Tensor | None, beta2: float) -> None:
    """Update a moving average of mean squares in place, in float64 if the device has it.

    Args:
        average: one number per column or per row.
        mean_square: mean squares of the unmodified gradient, in the dtype of sums.
        grad_factor: factor of the gradient; None means 1.
        beta2: decay rate.
    """
    wide = mean_square.dtype
    if grad_factor is not None:
        mean_square = mean_square * grad_factor.to(wide).square()
    average.copy_(beta2 * average.to(wide) + (1 - beta2) * mean_square)


def apply_update(table: Table, coefficient: Tensor, grad_factor: Tensor | None) -> None:
    """Update m_t and e_t of a table in place. Without a first moment (beta1 = 0), m_t is the gradient.

    Args:
        table: the table.
        coefficient: result of `advance_second_moment`, (1, H).
        grad_factor: factor of the gradient; None means 1.
    """
    factor = gradient_weight(table, grad_factor)
    keys = rounding_keys(table, table.step)  # the step is already counted
    kernels = numba_kernels_for(table.param, table.grad, moment=table.exp_avg)
    if kernels is not None:
        kernels.apply_update(table, coefficient, factor, keys)
    elif _works_in_place(table, factor) or torch.compiler.is_compiling():
        _update(table, slice(None), coefficient, factor, keys)
    else:
        # Gradient, moment and embedding need a conversion, or the gradient a factor.
        rows, threads = blocks_at_a_time(table.param, converted_bytes(table))
        starts = range(0, table.param.shape[0], rows)
        for_each(starts, lambda start: _update(table, slice(start, start + rows), coefficient, factor, keys), threads)


def rounding_keys(table: Table, t: float | Tensor) -> StepKeys | None:
    """Return the keys of the random bits of step t, or None without stochastic rounding."""
    if table.rounding is None:
        return None
    if isinstance(t, Tensor) and t.is_cpu and not torch.compiler.is_compiling():
        t = t.item()
    return stochastic_rounding.step_keys(table.rounding, t)


def converted_bytes(table: Table) -> int:
    """Bytes of temporaries per element of a block: gradient, moment, embedding and stochastic rounding."""
    converted = 3 * table.exp_avg_sq.itemsize
    return converted if table.rounding is None else converted + stochastic_rounding.BYTES_PER_ELEMENT


def store_moment(table: Table, exp_avg: Tensor, block: slice, moment: Tensor, keys: StepKeys | None) -> None:
    """Write m_t of some rows to their part of `exp_avg`, rounded to its dtype."""
    if table.rounding is not None and keys is not None:
        moment = stochastic_rounding.round_rows(moment, block, table.param.shape, table.width, table.rounding, keys)
    exp_avg.copy_(moment)


def gradient_weight(table: Table, grad_factor: Tensor | None) -> float | Tensor:
    """Factor of the gradient: `grad_factor`, negated for maximize."""
    sign = -1.0 if table.hyper.maximize else 1.0
    if grad_factor is None:
        return sign
    # Reading a CPU scalar is free and allows cheaper operations. On other devices it would wait.
    on_host = grad_factor.device.type == "cpu" and not torch.compiler.is_compiling()
    factor: float | Tensor = sign * (grad_factor.item() if on_host else grad_factor)
    return factor


def weighted_gradient(table: Table, block: slice, factor: float | Tensor) -> Tensor:
    """Return m_t of some rows for beta1 = 0: factor g. It may be the gradient itself, so do not write to it."""
    grad = table.grad[block].to(table.exp_avg_sq.dtype)
    return grad if not isinstance(factor, Tensor) and factor == 1.0 else grad * factor


def _works_in_place(table: Table, factor: float | Tensor) -> bool:
    """Whether `_update` needs no temporaries."""
    dtype = table.exp_avg_sq.dtype
    if table.exp_avg is not None:
        return table.param.dtype == table.exp_avg.dtype == dtype
    return table.param.dtype == table.grad.dtype == dtype and not isinstance(factor, Tensor)


def _update(table: Table, block: slice, coefficient: Tensor, factor: float | Tensor, keys: StepKeys | None) -> None:
    """Update the given rows of a table, without temporaries if no conversion is needed."""
    hyper, compute_dtype = table.hyper, coefficient.dtype
    param = table.param[block]
    embedding = param.to(compute_dtype)  # the tensor itself if no conversion is needed
    if hyper.weight_decay != 0:
        embedding.mul_(1 - hyper.lr * hyper.weight_decay)
    if table.exp_avg is not None:
        exp_avg = table.exp_avg[block]
        moment = exp_avg.to(compute_dtype)
        advance_moment(moment, table.grad[block].to(compute_dtype), hyper.beta1, factor)
        embedding.addcmul_(moment, coefficient)
        if moment is not exp_avg:
            store_moment(table, exp_avg, block, moment, keys)
    elif isinstance(factor, Tensor):
        embedding.addcmul_(weighted_gradient(table, block, factor), coefficient)
    else:  # the same, without a temporary
        embedding.addcmul_(table.grad[block].to(compute_dtype), coefficient, value=factor)
    if embedding is not param:
        param.copy_(embedding)


def advance_moment(moment: Tensor, grad: Tensor, beta1: float, factor: float | Tensor) -> None:
    """Set m_t = beta1 m_{t-1} + (1 - beta1) factor g in place."""
    if isinstance(factor, Tensor):
        moment.mul_(beta1).addcmul_(grad, factor, value=1 - beta1)
    elif factor == 1.0:
        moment.lerp_(grad, 1 - beta1)
    else:
        moment.mul_(beta1).add_(grad, alpha=factor * (1 - beta1))


def bias_correction(beta: float, step: float | Tensor) -> float | Tensor:
    """Return 1 - beta^t. A tensor uses expm1, because 1 - beta^t in float32 loses four digits at t = 1."""
    if isinstance(step, Tensor):
        if beta == 0.0:
            return torch.ones_like(step)
        return torch.expm1(step * math.log(beta)).neg()
    return float(1 - beta**step)


def _fused_square_sums(grad: Tensor) -> Tensor:
    """Column sums of squares, (1, H), in operations that torch.compile fuses into one pass.

    Large gradients have their own sum. Both sums are float32, because float64 per element is slow on most GPUs.
    """
    wide = sum_dtype(grad.device)
    if grad.dtype == torch.float64:
        return grad.square().sum(dim=0, keepdim=True)
    g = grad.float()
    large = g.abs() > LARGE  # False for NaN, which goes into the first sum
    sums = torch.where(large, 0.0, g).square().sum(dim=0, keepdim=True).to(wide)
    large_sums = torch.where(large, g * SHRINK, 0.0).square().sum(dim=0, keepdim=True).to(wide)
    return sums + large_sums / SHRINK / SHRINK  # divide twice: SHRINK^2 underflows if `wide` is float32


def _square_sums(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of squares, (1, H), computed in `dtype`.

    Adding up whole blocks and reducing once is faster and more accurate than one reduction per block.
    """
    V, H = grad.shape
    temporaries = 1 if grad.dtype == dtype else 2  # the accumulator, and the converted gradient
    rows, threads = blocks_at_a_time(grad, temporaries * dtype.itemsize)
    # At least 16 blocks per piece, and few enough pieces that one thread adds up their sums.
    pieces = max(min(-(-V // (16 * rows)), ONE_THREAD_ELEMENTS // max(H, 1)), 1) if grad.is_cpu else 1
    rows_per_piece = max(-(-V // pieces), 1)
    partial_sums = torch.zeros(pieces, H, dtype=dtype, device=grad.device)

    def add_squares(start: int) -> None:
        accumulator = torch.zeros(rows, H, dtype=dtype, device=grad.device)
        blocks = grad[start : start + rows_per_piece].split(rows)
        if grad.is_cpu and grad.dtype == dtype:
            # On a CPU, _foreach_ is the loop below in C++, which is a third faster.
            accumulators = [accumulator] * (len(blocks) - 1) + [accumulator[: blocks[-1].shape[0]]]
            torch._foreach_addcmul_(accumulators, blocks, blocks)
        else:
            for block in blocks:
                block = block.to(dtype)
                accumulator[: block.shape[0]].addcmul_(block, block)
        partial_sums[start // rows_per_piece] = accumulator.sum(dim=0)

    for_each(range(0, V, rows_per_piece), add_squares, threads)
    return partial_sums.sum(dim=0, keepdim=True)


def blocks_at_a_time(tensor: Tensor, bytes_per_element: int, elements: int | None = None) -> tuple[int, int]:
    """Choose the rows per block and the number of threads so that the temporaries stay within their limits.

    The rows do not depend on the number of threads; otherwise, sums over blocks would.

    Args:
        tensor: the table, (V, H).
        bytes_per_element: bytes of temporaries per element of a block.
        elements: maximum size of a block on the CPU; by default one that torch does not split among threads.
    """
    V, H = tensor.shape
    a_quarter = -(-V * tensor.itemsize // (4 * bytes_per_element))
    all_rows = max(min(BLOCK_BYTES // (bytes_per_element * max(H, 1)), a_quarter), 1)
    if elements is None:
        elements = ONE_THREAD_ELEMENTS - 1
    if not tensor.is_cpu or elements < H:
        return all_rows, 1
    rows = min(elements // max(H, 1), all_rows)
    return rows, min(torch.get_num_threads(), all_rows // rows)


def for_each(starts: range, work: Callable[[int], None], threads: int) -> None:
    """Call `work` with each of `starts`, in one or more threads."""
    left = deque(starts)

    def work_on_what_is_left() -> None:
        while True:
            try:
                start = left.popleft()
            except IndexError:
                return
            work(start)

    run_on_threads(work_on_what_is_left, min(threads, len(starts)))


def numba_kernels_for(*tensors: Tensor, moment: Tensor | None = None) -> ModuleType | None:
    """Return the compiled loops if numba is installed and they support these tensors, else None.

    Args:
        *tensors: tensors that must have the same dtype.
        moment: the first moment, if any; its dtype may differ.
    """
    first = tensors[0]
    if torch.compiler.is_compiling() or not first.is_cpu or first.numel() < NUMBA_ELEMENTS:
        return None
    kernels = _numba_kernels()
    if kernels is None or not all(tensor.dtype == first.dtype for tensor in tensors):
        return None
    every = tensors if moment is None else (*tensors, moment)
    # A tensor subclass may not have its own memory.
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in every)
    fit = all(tensor.dtype in kernels.DTYPES and tensor.is_contiguous() for tensor in every)
    return kernels if plain and fit else None


@functools.cache
def _numba_kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba

        if numba.config.DISABLE_JIT:
            return None
        from coupled_adam.optimizer import numba_kernels
    except ImportError as error:
        warnings.warn(
            f"CoupledAdamW: numba is installed but cannot be imported; using slower torch operations ({error})",
            stacklevel=2,
        )
        return None
    return numba_kernels
