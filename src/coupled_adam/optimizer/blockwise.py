"""The coupled update in plain torch operations, for the CPU and every device without a Triton kernel.

A table is walked in blocks of rows, so that all temporaries together have about a quarter of its bytes at most. The
blocks stay in the cache, and a step costs about as much memory traffic as torch's fused AdamW. `triton_kernels` has the
same functions.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

import math

import torch
from torch import Tensor

from coupled_adam.optimizer.table import Table

# Of all temporaries of one block. Smaller blocks pay for starting threads, larger ones fall out of the cache (measured
# on 2 cores), and those of bfloat16 tables, three times as large, took four times as long.
BLOCK_BYTES = 6 * 2**20


def column_square_sums(grad: Tensor) -> Tensor:
    """Sum of g_i^2 over the rows i, the only thing the second moment needs to know of the gradient.

    Args:
        grad: g, (V, H), any float dtype.

    Returns:
        (P, H) partial sums, still to be added up over P, in float32 (float64 for a float64 gradient); P is 1 here.

    Example:
        >>> column_square_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[10., 20.]])
    """
    accumulator_dtype = torch.promote_types(grad.dtype, torch.float32)
    if torch.compiler.is_compiling():  # the compiler fuses the square into the sum
        return grad.to(accumulator_dtype).square().sum(dim=0, keepdim=True)
    rows = _rows_per_block(grad)
    # Adding whole blocks and reducing once is faster than a reduction per block, and rounds less.
    accumulator = torch.zeros(rows, grad.shape[1], dtype=accumulator_dtype, device=grad.device)
    for block in grad.split(rows):
        block = block.to(accumulator_dtype)
        accumulator[: block.shape[0]].addcmul_(block, block)
    return accumulator.sum(dim=0, keepdim=True)


def advance_second_moment(table: Table, square_sums: Tensor, grad_factor: Tensor | None) -> Tensor:
    """Count the step, update v_t of one table in place and return what a row's first moment is multiplied with.

    Args:
        table: the table.
        square_sums: column sums of squares of the gradient as it was read, over all ranks, (P, H).
        grad_factor: what the gradient must be multiplied with (loss scale, clipping), None for 1.

    Returns:
        The coefficient -lr / (1 - beta1^t) / (sqrt(2^-n v_t / (1 - beta2^t)) + eps), (1, H).
    """
    hyper = table.hyper
    table.step.add_(1)
    on_host = table.step.device.type == "cpu" and not torch.compiler.is_compiling()
    t = table.step.item() if on_host else table.step
    mean_square = square_sums.sum(dim=0, keepdim=True) / table.rows
    if grad_factor is not None:
        mean_square = mean_square * grad_factor.square()
    table.exp_avg_sq.mul_(hyper.beta2).add_(mean_square, alpha=1 - hyper.beta2)
    bias_correction1 = _bias_correction(hyper.beta1, t)
    bias_correction2 = _bias_correction(hyper.beta2, t)
    denominator = (table.exp_avg_sq * (hyper.second_moment_scale / bias_correction2)).sqrt_().add_(hyper.eps)
    return (-hyper.lr / bias_correction1) / denominator


def apply_update(table: Table, coefficient: Tensor, grad_factor: Tensor | None) -> None:
    """Update m_t and e_t of one table in place.

    Args:
        table: the table.
        coefficient: what `advance_second_moment` returned, (1, H).
        grad_factor: what the gradient must be multiplied with, None for 1.
    """
    hyper = table.hyper
    factor: float | Tensor = -1.0 if hyper.maximize else 1.0
    if grad_factor is not None:
        # Reading a CPU scalar is free and allows the cheaper operations below; elsewhere it would wait for the device.
        on_host = grad_factor.device.type == "cpu" and not torch.compiler.is_compiling()
        factor = factor * (grad_factor.item() if on_host else grad_factor)
    decay = 1 - hyper.lr * hyper.weight_decay
    rows = _rows_per_block(table.param)
    compute_dtype = coefficient.dtype
    for param, grad, exp_avg in zip(
        table.param.split(rows), table.grad.split(rows), table.exp_avg.split(rows), strict=True
    ):
        moment = exp_avg.to(compute_dtype)  # the tensor itself when no conversion is needed
        embedding = param.to(compute_dtype)
        _advance_first_moment(moment, grad.to(compute_dtype), hyper.beta1, factor)
        if hyper.weight_decay != 0:
            embedding.mul_(decay)
        embedding.addcmul_(moment, coefficient)
        if moment is not exp_avg:
            exp_avg.copy_(moment)
        if embedding is not param:
            param.copy_(embedding)


def _advance_first_moment(moment: Tensor, grad: Tensor, beta1: float, factor: float | Tensor) -> None:
    """m_t = beta1 m_{t-1} + (1 - beta1) factor g, in place."""
    if isinstance(factor, Tensor):
        moment.mul_(beta1).addcmul_(grad, factor, value=1 - beta1)
    elif factor == 1.0:
        moment.lerp_(grad, 1 - beta1)
    else:
        moment.mul_(beta1).add_(grad, alpha=factor * (1 - beta1))


def _bias_correction(beta: float, step: float | Tensor) -> float | Tensor:
    """1 - beta^t. On a device by expm1, since 1 - beta^t in float32 loses four digits at t = 1."""
    if isinstance(step, Tensor):
        if beta == 0.0:
            return torch.ones_like(step)
        return torch.expm1(step * math.log(beta)).neg()
    return float(1 - beta**step)


def _rows_per_block(tensor: Tensor) -> int:
    if torch.compiler.is_compiling():  # the compiler fuses the whole update; a loop would only be unrolled
        return max(tensor.shape[0], 1)
    V, H = tensor.shape
    compute_dtype = torch.promote_types(tensor.dtype, torch.float32)
    # The squares of the gradient; narrower types are converted, and then it is gradient, moment and embedding.
    temporaries = 1 if tensor.dtype == compute_dtype else 3
    bytes_per_element = temporaries * compute_dtype.itemsize
    a_quarter = -(-V * tensor.itemsize // (4 * bytes_per_element))
    return max(min(BLOCK_BYTES // (bytes_per_element * max(H, 1)), a_quarter), 1)
