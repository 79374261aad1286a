"""One optimizer step, in the order that keeps the device busy.

First the column sums of squares of the coupled tables start their way over the ranks; meanwhile torch's AdamW
updates the standard groups; then the coupled tables follow. With clipping nothing can be updated before the global
norm is known, so the sums, and the squared norms of the standard groups with them, are awaited first.
"""

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from coupled_adam.optimizer import blockwise, clipping
from coupled_adam.optimizer.checks import named_params
from coupled_adam.optimizer.sharding import (
    PartialSum,
    Reduction,
    local_gradient,
    local_part,
    process_groups,
)
from coupled_adam.optimizer.table import Hyperparameters, Table


@dataclass(slots=True)
class GroupTensors:
    """A param group and the tensors of its parameters that have a gradient, in the same order.

    The gradients are this rank's parts, cut like the parameters; the others are as the optimizer keeps them.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    has_complex: bool

    def __post_init__(self) -> None:
        self.grads = [local_gradient(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]


def idle_tables(groups: list[GroupTensors]) -> list[str]:
    """Names of all coupled tables, if none has a gradient while other parameters have; else nothing.

    Tables of which all are frozen rest on purpose. A single table without a gradient among several is no sign of a
    mistake: a batch need not use all of them.
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
) -> Tensor | None:
    """Update the parameters and state of all groups in place.

    Args:
        groups: all groups, coupled and standard, with their state.
        max_grad_norm: the global norm to clip to, None for no clipping.
        error_if_nonfinite: raise before anything is written when the global norm is not finite.
        grad_scale: what the gradients are still multiplied with (GradScaler with fused=True), None for 1.
        found_inf: a scalar; other than zero, the step is not taken.

    Returns:
        The norm of all unscaled gradients before clipping; None when it was not needed.
    """
    coupled = [tensors for tensors in groups if tensors.group["coupled"] and tensors.params]
    standard = [tensors for tensors in groups if not tensors.group["coupled"] and tensors.params]
    column_sums = [
        _column_sums(param, grad)
        for tensors in coupled
        for param, grad in zip(tensors.params, tensors.grads, strict=True)
    ]
    norm_sums: list[PartialSum] = []
    if max_grad_norm is not None or error_if_nonfinite:
        norm_sums = _norm_sums(coupled, column_sums, standard)
    reduction = Reduction(column_sums + norm_sums)

    norm = None
    grad_factor = None if grad_scale is None else grad_scale.reciprocal()
    if norm_sums:
        reduction.wait()
        limit = float("inf") if max_grad_norm is None else float(max_grad_norm)
        total_square = clipping.total_square(norm_sums)
        norm, clipping_factor = _clip_factor(total_square, grad_scale, limit, coupled + standard)
        if error_if_nonfinite:
            _raise_if_nonfinite(total_square, found_inf, groups)
        if max_grad_norm is not None:
            grad_factor = clipping_factor
            if standard:
                grad_scale = _scale_or_multiply(standard, clipping_factor)

    for tensors in standard:
        _update_standard(tensors, grad_scale, found_inf)
    reduction.wait()
    sums = iter(column_sums)
    for tensors in coupled:
        _update_coupled(tensors, [next(sums).values for _ in tensors.params], grad_factor, found_inf)
    return norm


def kernels_for(tensor: Tensor) -> ModuleType:
    """The module whose functions update this tensor: `triton_kernels` on CUDA and ROCm, `blockwise` elsewhere."""
    # Under torch.compile the plain operations are fused by the compiler; float64 is for checking, not for speed.
    if tensor.is_cuda and tensor.dtype != torch.float64 and not torch.compiler.is_compiling():
        return _triton_kernels() or blockwise
    return blockwise


@functools.cache
def _triton_kernels() -> ModuleType | None:
    try:
        from coupled_adam.optimizer import triton_kernels
    except ImportError as error:
        warnings.warn(
            f"CoupledAdamW: Triton cannot be imported, the slower torch operations are used ({error})", stacklevel=2
        )
        return None
    return triton_kernels


def _column_sums(param: Tensor, grad: Tensor) -> PartialSum:
    """Column sums of squares of a gradient, (P, H) on one rank, (1, H) where they must be added up over ranks."""
    sums = kernels_for(grad).column_square_sums(grad)
    groups = process_groups(param, tensor_dim=0)
    return PartialSum(sums.sum(dim=0, keepdim=True) if groups else sums, groups)


def _norm_sums(
    coupled: list[GroupTensors], column_sums: list[PartialSum], standard: list[GroupTensors]
) -> list[PartialSum]:
    """Squared gradient norms on this rank, one for each way of being sharded and each device."""
    coupled_params = [param for tensors in coupled for param in tensors.params]
    sums = [
        PartialSum(column_sum.values.sum(), process_groups(param))
        for param, column_sum in zip(coupled_params, column_sums, strict=True)
    ]
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensors in standard:
        for param, grad in zip(tensors.params, tensors.grads, strict=True):
            alike.setdefault((process_groups(param), grad.device), []).append(grad)
    sums += [PartialSum(clipping.square_norm(grads), groups) for (groups, _), grads in alike.items()]
    return sums


def _clip_factor(
    total: Tensor, grad_scale: Tensor | None, max_norm: float, groups: list[GroupTensors]
) -> tuple[Tensor, Tensor]:
    """Norm and factor as in `clipping.clip_factor`, float32 unless a gradient is float64, as clip_grad_norm_'s are."""
    grads = [grad for tensors in groups for grad in tensors.grads]
    widest = next((grad for grad in grads if grad.dtype == torch.float64), grads[0])
    kernels = kernels_for(widest)
    grad_scale = None if grad_scale is None else grad_scale.to(total.device)
    if kernels is not blockwise:
        norm, grad_factor = kernels.clip_factor(total, grad_scale, max_norm)
        return norm, grad_factor
    dtype = torch.float64 if widest.dtype == torch.float64 else torch.float32
    norm, grad_factor = clipping.clip_factor(total, grad_scale, max_norm)
    return norm.to(dtype), grad_factor.to(dtype)


def _raise_if_nonfinite(total_square: Tensor, found_inf: Tensor | None, groups: list[GroupTensors]) -> None:
    if torch.isfinite(total_square) or (found_inf is not None and found_inf.item() != 0):
        return  # finite, or GradScaler knows and skips the step
    names = [
        name
        for tensors in groups
        for name, grad in zip(_names(tensors), tensors.grads, strict=True)
        if not torch.isfinite(grad).all()
    ]
    where = ", ".join(repr(name) for name in names) or "a gradient on another rank, or in the sum of finite ones"
    raise RuntimeError(
        f"gradient norm is {total_square.sqrt().item()}: non-finite values in {where}. Nothing was updated; "
        "skip this batch, lower the learning rate, or set error_if_nonfinite=False"
    )


def _names(tensors: GroupTensors) -> list[str]:
    """Names of the parameters that have a gradient."""
    return [name for name, param in named_params(tensors.group) if param.grad is not None]


def _scale_or_multiply(standard: list[GroupTensors], grad_factor: Tensor) -> Tensor:
    """Clip the gradients of standard groups, or return the `grad_scale` that makes the fused kernels do it.

    The fused kernels divide by grad_scale and write the result back into the gradient.
    """
    for tensors in standard:
        if not tensors.group["fused"]:
            for device in {grad.device for grad in tensors.grads}:
                on_device = [grad for grad in tensors.grads if grad.device == device]
                torch._foreach_mul_(on_device, grad_factor.to(device))
    # A float64 gradient makes the factor float64, but the fused kernels read float32 only.
    return grad_factor.reciprocal().float()


def _update_standard(tensors: GroupTensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """torch's AdamW on each rank's parts: it is elementwise, and plain tensors of any mesh go into one call."""
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


def _update_coupled(
    tensors: GroupTensors, square_sums: list[Tensor], grad_factor: Tensor | None, found_inf: Tensor | None
) -> None:
    hyper = Hyperparameters.from_group(tensors.group)
    for i, (param, grad, exp_avg_sq) in enumerate(zip(tensors.params, tensors.grads, tensors.exp_avg_sqs, strict=True)):
        kernels = kernels_for(grad)
        device = grad.device
        # A float64 parameter elsewhere makes the factor float64, which the Triton kernels must not see.
        factor = None if grad_factor is None else grad_factor.to(device, exp_avg_sq.dtype)
        skip = None if found_inf is None else found_inf.to(device)
        if kernels is blockwise and skip is not None:
            if skip.item() != 0:
                continue
            skip = None
        table = Table(
            rows=param.shape[0],
            param=local_part(param),
            grad=grad,
            exp_avg=local_part(tensors.exp_avgs[i]),
            exp_avg_sq=local_part(exp_avg_sq),
            step=tensors.steps[i],
            hyper=hyper.on(device),
        )
        options = {} if skip is None else {"found_inf": skip}
        coefficient = kernels.advance_second_moment(table, square_sums[i], factor, **options)
        kernels.apply_update(table, coefficient, factor, **options)
