"""One optimizer step, in an order that keeps the device busy.

Start the all-reduce of the coupled tables' sums; meanwhile update the standard groups with torch's AdamW; then update
the coupled tables (`table_step`). With clipping, every update needs the global norm, so the step first waits for the
sums, which then include the squared norms of the standard groups.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from coupled_adam.optimizer import blockwise, clipping, table_step
from coupled_adam.optimizer.checks import named_params
from coupled_adam.optimizer.sharding import (
    PartialSum,
    Reduction,
    first_row_and_column,
    local_gradient,
    local_part,
    local_real_rows,
)
from coupled_adam.optimizer.stochastic_rounding import Rounding, rounding_key
from coupled_adam.optimizer.table import Hyperparameters, Table, needs_first_moment
from coupled_adam.optimizer.table_step import TableStep, build_table_step

# More than the tables of any group; see `table_numbers`.
TABLES_PER_GROUP = 2**16


@dataclass(slots=True)
class GroupTensors:
    """A parameter group, and the tensors of its parameters that have a gradient, in the same order.

    The gradients are this rank's parts, sharded like the parameters. The other tensors are those of the optimizer.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Any]  # Tensor, or None for a coupled table with beta1 = 0
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    row_avg_sqs: list[Tensor | None]
    numbers: list[int]
    """Number of each table. It gives each table its own random bits."""
    has_complex: bool

    def __post_init__(self) -> None:
        self.grads = [local_gradient(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]


class GradientNorm(NamedTuple):
    """The norm of all gradients, and the clipping factor."""

    norm: Tensor
    """Norm of the unscaled gradients, before clipping."""
    factor: Tensor
    """Factor that clips and unscales the gradients. Used only with `max_grad_norm`."""


def table_numbers(groups: list[dict[str, Any]]) -> list[list[int]]:
    """Number the tables with a gradient, per group. Only coupled groups advance the numbers.

    Example:
        >>> table = torch.zeros(2, 2)
        >>> table.grad = torch.zeros(2, 2)
        >>> groups = [{"params": [], "coupled": False}, *({"params": [table], "coupled": True} for _ in range(2))]
        >>> table_numbers(groups)
        [[], [0], [65536]]
    """
    numbers = []
    coupled = 0
    for group in groups:
        first = coupled * TABLES_PER_GROUP
        numbers.append([first + i for i, p in enumerate(group["params"]) if p.grad is not None])
        coupled += bool(group["coupled"])
    return numbers


def idle_tables(groups: list[GroupTensors]) -> list[str]:
    """Names of all coupled tables if none of them has a gradient but other parameters have; otherwise empty.

    If all coupled tables are frozen, this is intended. If only some tables have no gradient, it is no mistake either: a
    batch need not use all of them.
    """
    coupled = [tensors for tensors in groups if tensors.group["coupled"]]
    if any(tensors.params for tensors in coupled) or not any(tensors.params for tensors in groups):
        return []
    tables = [named for tensors in coupled for named in named_params(tensors.group)]
    return [name for name, _ in tables] if any(param.requires_grad for _, param in tables) else []


def coupled_adamw_step(
    groups: list[GroupTensors],
    *,
    max_grad_norm: float | None,
    error_if_nonfinite: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    other_square_norm: Tensor | None = None,
) -> GradientNorm | None:
    """Update the parameters and state of all groups in place.

    Args:
        groups: all groups, coupled and standard, with their state.
        max_grad_norm: the global norm to clip to; None means no clipping.
        error_if_nonfinite: raise before anything is written if the global norm is not finite.
        grad_scale: loss scale still in the gradients (GradScaler with fused=True); None means 1.
        found_inf: a scalar; if it is not zero, skip the step.
        other_square_norm: squared norm of gradients outside these groups, over all ranks, with the same loss scale. The
            global norm includes it.

    Returns:
        The norm of all gradients and the clipping factor; None if the norm was not needed.
    """
    coupled = [tensors for tensors in groups if tensors.group["coupled"] and tensors.params]
    standard = [tensors for tensors in groups if not tensors.group["coupled"] and tensors.params]
    is_norm_needed = max_grad_norm is not None or error_if_nonfinite
    grad_factor = None if grad_scale is None else grad_scale.reciprocal()
    tables = [table for tensors in coupled for table in _table_steps(tensors, grad_factor, found_inf, is_norm_needed)]
    sums = [partial_sum for table in tables for partial_sum in table.start()]
    norm_sums = _norm_sums(tables, standard) if is_norm_needed else []
    reduction = Reduction(sums + norm_sums)

    gradient_norm = None
    squares = [partial_sum.values for partial_sum in norm_sums]
    if is_norm_needed and other_square_norm is not None:
        squares.append(other_square_norm)
    if squares:
        reduction.wait()
        limit = float("inf") if max_grad_norm is None else float(max_grad_norm)
        total_square = clipping.total_square(squares)
        gradient_norm = GradientNorm(*_clip_factor(total_square, grad_scale, limit, coupled + standard))
        if error_if_nonfinite:
            _raise_if_nonfinite(total_square, found_inf, groups)
        if max_grad_norm is not None:
            grad_factor = gradient_norm.factor
            if standard:
                grad_scale = _scale_or_multiply(standard, gradient_norm.factor)

    for tensors in standard:
        _update_standard(tensors, grad_scale, found_inf)
    reduction.wait()
    Reduction([partial_sum for table in tables for partial_sum in table.advance(grad_factor)]).wait()
    for table in tables:
        table.finish()
    return gradient_norm


def _table_steps(
    tensors: GroupTensors, grad_factor: Tensor | None, found_inf: Tensor | None, is_norm_needed: bool
) -> list[TableStep]:
    """Build the steps of all tables of a coupled group."""
    hyper = Hyperparameters.from_group(tensors.group)
    steps = []
    for i, (param, grad) in enumerate(zip(tensors.params, tensors.grads, strict=True)):
        exp_avg, row_avg_sq = tensors.exp_avgs[i], tensors.row_avg_sqs[i]
        vocabulary_size = tensors.group["vocabulary_size"]
        table = Table(
            rows=param.shape[0] if vocabulary_size is None else vocabulary_size,
            param=local_part(param),
            grad=grad,
            exp_avg=None if exp_avg is None else local_part(exp_avg),
            exp_avg_sq=local_part(tensors.exp_avg_sqs[i]),
            step=tensors.steps[i],
            hyper=hyper.on(grad.device),
            width=param.shape[1],
            real_rows=local_real_rows(param, vocabulary_size),
            row_avg_sq=None if row_avg_sq is None else local_part(row_avg_sq),
            rounding=_rounding(tensors.group, param, tensors.numbers[i]),
        )
        steps.append(
            build_table_step(table, param, grad_factor=grad_factor, found_inf=found_inf, is_norm_needed=is_norm_needed)
        )
    return steps


def _rounding(group: dict[str, Any], param: Tensor, number: int) -> Rounding | None:
    """Return the stochastic rounding of the first moment of a table, or None."""
    if group["state_dtype"] != torch.bfloat16 or not needs_first_moment(group):
        return None
    row, column = first_row_and_column(param)
    key = rounding_key(group["state_seed"], number)
    return Rounding(key, first=row * param.shape[1] + column, is_large=param.numel() > 2**32)


def _norm_sums(tables: list[TableStep], standard: list[GroupTensors]) -> list[PartialSum]:
    """Compute squared gradient norms on this rank, per table and per combination of process groups and device."""
    params = [param for tensors in standard for param in tensors.params]
    grads = [grad for tensors in standard for grad in tensors.grads]
    return [table.square_norm() for table in tables] + clipping.norm_sums(params, grads)


def _clip_factor(
    total: Tensor, grad_scale: Tensor | None, max_norm: float, groups: list[GroupTensors]
) -> tuple[Tensor, Tensor]:
    """Call `clipping.clip_factor`. Like clip_grad_norm_, return float32 unless a gradient is float64."""
    grads = [grad for tensors in groups for grad in tensors.grads]
    widest = next((grad for grad in grads if grad.dtype == torch.float64), grads[0] if grads else total.float())
    kernels = table_step.kernels_for(widest)
    grad_scale = None if grad_scale is None else grad_scale.to(total.device)
    if kernels is not blockwise:
        norm, grad_factor = kernels.clip_factor(total, grad_scale, max_norm)
        return norm, grad_factor
    dtype = torch.float64 if widest.dtype == torch.float64 else torch.float32
    norm, grad_factor = clipping.clip_factor(total, grad_scale, max_norm)
    return norm.to(dtype), grad_factor.to(dtype)


def _raise_if_nonfinite(total_square: Tensor, found_inf: Tensor | None, groups: list[GroupTensors]) -> None:
    if torch.isfinite(total_square) or (found_inf is not None and found_inf.item() != 0):
        return  # finite, or GradScaler skips the step
    names = [
        name
        for tensors in groups
        for name, grad in zip(_names(tensors), tensors.grads, strict=True)
        if not torch.isfinite(grad).all()
    ]
    where = ", ".join(repr(name) for name in names) or (
        "a gradient of another rank or optimizer, or in the sum of finite values"
    )
    raise RuntimeError(
        f"gradient norm is {total_square.sqrt().item()}: non-finite values in {where}. Nothing was updated; "
        "skip this batch, lower the learning rate, or set error_if_nonfinite=False"
    )


def _names(tensors: GroupTensors) -> list[str]:
    """Names of the parameters that have a gradient."""
    return [name for name, param in named_params(tensors.group) if param.grad is not None]


def _scale_or_multiply(standard: list[GroupTensors], grad_factor: Tensor) -> Tensor:
    """Clip the gradients of standard groups, and return the `grad_scale` with which the fused kernels do it.

    The fused kernels divide the gradient by `grad_scale` and write it back.
    """
    for tensors in standard:
        if not tensors.group["fused"]:
            for device in {grad.device for grad in tensors.grads}:
                on_device = [grad for grad in tensors.grads if grad.device == device]
                torch._foreach_mul_(on_device, grad_factor.to(device))
    # A float64 gradient makes the factor float64, but the fused kernels only read float32.
    return grad_factor.reciprocal().float()


def _update_standard(tensors: GroupTensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Update a standard group with torch's AdamW on local tensors: it is elementwise, and one call takes all meshes."""
    group = tensors.group
    beta1, beta2 = group["betas"]
    adamw(
        [local_part(param) for param in tensors.params],
        tensors.grads,
        [local_part(exp_avg) for exp_avg in tensors.exp_avgs],
        [local_part(exp_avg_sq) for exp_avg_sq in tensors.exp_avg_sqs],
        [],
        tensors.steps,
        amsgrad=False,
        has_complex=tensors.has_complex,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        capturable=group["capturable"],
        differentiable=group["differentiable"],
        fused=group["fused"],
        grad_scale=grad_scale if group["fused"] else None,
        found_inf=found_inf,
    )
