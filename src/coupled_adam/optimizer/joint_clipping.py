"""Clipping by the norm of all gradients where several optimizers share a model.

CoupledAdamW takes the norm inside its step, without reading the gradients of its tables once more. So it goes first: it
is told the squared norm of the other gradients, and leaves the factor that they are to be multiplied with. BatchedMuon
multiplies while it reads its gradients; those of other optimizers are multiplied before their step. All of it stays on
the device.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from coupled_adam.optimizer import clipping
from coupled_adam.optimizer.coupled_adamw import CoupledAdamW
from coupled_adam.optimizer.muon import BatchedMuon
from coupled_adam.optimizer.sharding import Reduction, local_gradient, local_part
from coupled_adam.optimizer.torch_versions import disable_dynamo

Arguments = tuple[Any, ...]
Options = dict[str, Any]


def clip_together(coupled: CoupledAdamW, *others: Optimizer, max_norm: float | None = None) -> None:
    """Clip the gradients of several optimizers by their common norm, from now on, whenever they take steps.

    Call it once, before training. Then every step of `coupled` counts the gradients of the others for its
    `max_grad_norm`, and every step of the others multiplies their gradients with the same factor first. The result is
    that of torch.nn.utils.clip_grad_norm_ over all parameters before the steps, for plain and for sharded parameters.
    `coupled.grad_norm` is the norm of all gradients. Nothing waits for the device, and the steps can be captured in a
    CUDA graph. The gradients of a BatchedMuon are not written: its step reads them times the factor.

    The steps are taken in this order: `coupled` first, then each of the others once. Copied and unpickled optimizers
    have no hooks, as always in torch: call this again for them.

    Args:
        coupled: the optimizer that clips.
        others: the optimizers of the other parameters, such as torch.optim.Muon.
        max_norm: sets `coupled.max_grad_norm`; None keeps the one it has.

    Example:
        >>> from torch import nn
        >>> from coupled_adam import hidden_matrices
        >>> model = nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 99))
        >>> matrices = hidden_matrices(model)
        >>> muon = torch.optim.Muon(matrices)
        >>> coupled = CoupledAdamW(model, exclude=matrices)
        >>> clip_together(coupled, muon, max_norm=0.5)
        >>> model(torch.arange(9)).sum().backward()
        >>> coupled.step()
        >>> muon.step()
        >>> bool(coupled.grad_norm > 0.5)
        True
    """
    if max_norm is not None:
        coupled.max_grad_norm = max_norm
    _check(coupled, others)
    due: dict[Optimizer, Tensor | None] = {}  # the factor for each of those whose step comes next

    def count_others() -> None:
        coupled.other_square_norm = square_norm_of(others)

    # Not to be compiled with a step: Dynamo would not see the attributes that they set.
    @disable_dynamo
    def before_coupled(_: Optimizer, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        _refuse_grad_scaler()
        return _after_closure(count_others, args, kwargs)

    @disable_dynamo
    def after_coupled(*_: object) -> None:
        coupled.other_square_norm = None
        factor = None if coupled.max_grad_norm is None else coupled.grad_factor
        due.update(dict.fromkeys(others, factor))

    @disable_dynamo
    def before_other(other: Optimizer, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        _refuse_grad_scaler()
        if other not in due:
            raise RuntimeError(
                f"{type(other).__name__} takes a step before CoupledAdamW has taken one, so the norm of all gradients "
                "is not known; take the step of CoupledAdamW first, then that of each other optimizer"
            )
        factor = due.pop(other)
        return _after_closure(lambda: _clip(other, factor), args, kwargs)

    coupled.register_step_pre_hook(before_coupled)
    coupled.register_step_post_hook(after_coupled)
    for other in others:
        other.register_step_pre_hook(before_other)


def _after_closure(action: Callable[[], None], args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """Act when the gradients are there: at once, or in a closure around that of the step, whose arguments these are."""
    closure = kwargs["closure"] if "closure" in kwargs else (*args, None)[1]  # the optimizer comes first
    if closure is None:
        action()
        return args, kwargs

    def closure_then_action() -> float:
        loss: float = closure()
        action()
        return loss

    return args[:1], {"closure": closure_then_action}


def _clip(optimizer: Optimizer, factor: Tensor | None) -> None:
    """Have the step of an optimizer, which comes next, see its gradients times the factor."""
    if isinstance(optimizer, BatchedMuon):
        optimizer.grad_factor = factor
    else:
        multiply_gradients(optimizer, factor)


@torch.no_grad()
def square_norm_of(optimizers: tuple[Optimizer, ...]) -> Tensor | None:
    """Squared norm of all gradients of some optimizers, over all ranks; None without any."""
    params = [param for optimizer in optimizers for param in _with_gradient(optimizer)]
    sums = clipping.norm_sums(params, [local_gradient(_dense(param.grad), param) for param in params])
    Reduction(sums).wait()
    return clipping.total_square(partial_sum.values for partial_sum in sums) if sums else None


@torch.no_grad()
def multiply_gradients(optimizer: Optimizer, factor: Tensor | None) -> None:
    """Multiply all gradients of an optimizer with a scalar tensor, in place and without waiting for it; None is 1."""
    if factor is None:
        return
    grads = [local_part(_dense(param.grad)) for param in _with_gradient(optimizer)]
    for device in {grad.device for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def _with_gradient(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (param for param in group["params"] if param.grad is not None)


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    if grad.is_sparse:
        raise RuntimeError("clip_together does not support sparse gradients; build the nn.Embedding with sparse=False")
    return grad


def _check(coupled: CoupledAdamW, others: tuple[Optimizer, ...]) -> None:
    if not isinstance(coupled, CoupledAdamW):
        raise TypeError(f"the first optimizer is a {type(coupled).__name__}; pass the CoupledAdamW first")
    if not others:
        raise ValueError("clip_together needs another optimizer beside CoupledAdamW, which clips its own gradients")
    if coupled.max_grad_norm is None:
        raise ValueError("CoupledAdamW has no max_grad_norm; pass max_norm to clip_together")
    own = {param for group in coupled.param_groups for param in group["params"]}
    for other in others:
        if any(param in own for group in other.param_groups for param in group["params"]):
            raise ValueError(
                f"CoupledAdamW and {type(other).__name__} have parameters in common, which each step would move twice; "
                "build it with CoupledAdamW(model, exclude=hidden_matrices(model))"
            )


def _refuse_grad_scaler() -> None:
    """GradScaler unscales and skips each optimizer by itself, when the norm of all must be known before the first.

    Told by the calling frames: for an optimizer that is not fused GradScaler leaves no mark.
    """
    frame = sys._getframe() if "torch.amp.grad_scaler" in sys.modules else None
    while frame is not None:
        is_of_scaler = frame.f_globals.get("__name__") == "torch.amp.grad_scaler"
        if is_of_scaler and frame.f_locals["self"].is_enabled():
            raise RuntimeError(
                "clip_together cannot clip under GradScaler, which unscales and skips each optimizer by itself. Train "
                "in bfloat16 without it, or leave clip_together out and call, before the steps, scaler.unscale_ for "
                "each optimizer and torch.nn.utils.clip_grad_norm_ for all parameters"
            )
        frame = frame.f_back
