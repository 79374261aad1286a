"""Clip by the norm of all gradients if several optimizers share a model.

CoupledAdamW computes the norm inside its step, without reading the gradients of its tables again. So it steps first: it
gets the squared norm of the other gradients, and provides their clipping factor. BatchedMuon applies the factor while
reading its gradients; the gradients of other optimizers are multiplied before their step. Nothing leaves the device.
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
    """Clip the gradients of several optimizers by their common norm, in all future steps.

    Call it once, before training. From then on, the norm of `coupled.max_grad_norm` includes the gradients of the other
    optimizers, and their steps clip by the same factor. The result is that of torch.nn.utils.clip_grad_norm_ over all
    parameters before the steps, for plain and sharded parameters. `coupled.grad_norm` is the norm of all gradients.
    Nothing waits for the device, and the steps can be captured in a CUDA graph. BatchedMuon applies the factor while
    reading its gradients and does not write to them.

    Step `coupled` first, then each other optimizer once. As always in torch, copied and unpickled optimizers have no
    hooks: call this function again for them.

    Args:
        coupled: the optimizer that computes the norm.
        others: the optimizers of the other parameters, such as torch.optim.Muon.
        max_norm: new value of `coupled.max_grad_norm`; None keeps the current one.

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
    due: dict[Optimizer, Tensor | None] = {}  # the factor of each optimizer whose step is due

    def count_others() -> None:
        coupled.other_square_norm = square_norm_of(others)

    # Never compiled together with a step: Dynamo would not see the attributes that these hooks set.
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
                f"{type(other).__name__} takes a step before CoupledAdamW, so the norm of all gradients is not known; "
                "step CoupledAdamW first, then each other optimizer"
            )
        factor = due.pop(other)
        return _after_closure(lambda: _clip(other, factor), args, kwargs)

    coupled.register_step_pre_hook(before_coupled)
    coupled.register_step_post_hook(after_coupled)
    for other in others:
        other.register_step_pre_hook(before_other)


def _after_closure(action: Callable[[], None], args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """Run `action` once the gradients exist: now, or in a wrapper around the step's closure. Returns step arguments."""
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
    """Make the next step of an optimizer use its gradients times the factor."""
    if isinstance(optimizer, BatchedMuon):
        optimizer.grad_factor = factor
    else:
        multiply_gradients(optimizer, factor)


@torch.no_grad()
def square_norm_of(optimizers: tuple[Optimizer, ...]) -> Tensor | None:
    """Squared norm of all gradients of some optimizers, over all ranks; None if there are no gradients."""
    params = [param for optimizer in optimizers for param in _with_gradient(optimizer)]
    sums = clipping.norm_sums(params, [local_gradient(_dense(param.grad), param) for param in params])
    Reduction(sums).wait()
    return clipping.total_square(partial_sum.values for partial_sum in sums) if sums else None


@torch.no_grad()
def multiply_gradients(optimizer: Optimizer, factor: Tensor | None) -> None:
    """Multiply all gradients of an optimizer in place by a scalar tensor, without waiting for it; None means 1."""
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
        raise RuntimeError("clip_together does not support sparse gradients; build nn.Embedding with sparse=False")
    return grad


def _check(coupled: CoupledAdamW, others: tuple[Optimizer, ...]) -> None:
    if not isinstance(coupled, CoupledAdamW):
        raise TypeError(f"the first optimizer is a {type(coupled).__name__}; pass the CoupledAdamW first")
    if not others:
        raise ValueError(
            "clip_together needs another optimizer besides CoupledAdamW; for CoupledAdamW alone, set max_grad_norm"
        )
    if coupled.max_grad_norm is None:
        raise ValueError("CoupledAdamW has no max_grad_norm; pass max_norm to clip_together")
    own = {param for group in coupled.param_groups for param in group["params"]}
    for other in others:
        if any(param in own for group in other.param_groups for param in group["params"]):
            raise ValueError(
                f"CoupledAdamW and {type(other).__name__} have parameters in common, which would be updated twice; "
                "use CoupledAdamW(model, exclude=hidden_matrices(model))"
            )


def _refuse_grad_scaler() -> None:
    """Refuse GradScaler: it unscales and skips each optimizer separately, but the first step needs the norm of all.

    Detected by the calling frames: GradScaler leaves no mark on an optimizer that is not fused.
    """
    frame = sys._getframe() if "torch.amp.grad_scaler" in sys.modules else None
    while frame is not None:
        is_of_scaler = frame.f_globals.get("__name__") == "torch.amp.grad_scaler"
        if is_of_scaler and frame.f_locals["self"].is_enabled():
            raise RuntimeError(
                "clip_together does not work with GradScaler, which unscales and skips each optimizer separately. "
                "Train in bfloat16 without GradScaler. Or leave clip_together out, and before the steps call "
                "scaler.unscale_ for each optimizer and torch.nn.utils.clip_grad_norm_ for all parameters"
            )
        frame = frame.f_back
