"""Global-norm clipping inside the step, with the result of torch.nn.utils.clip_grad_norm_ before the step.

The norm covers all groups, coupled and standard, sharded or not. For coupled tables it uses the column sums of squares
that the second moment needs anyway, so their gradients are neither read twice nor written. Squared norms are float64 if
the device has it, because squares of finite float32 gradients overflow float32.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.sharding import PartialSum, process_groups
from coupled_adam.optimizer.table import sum_dtype


def square_norm(grads: list[Tensor]) -> Tensor:
    """Sum the squares of all elements of gradients on one device, in float64 if the device has it.

    Example:
        >>> square_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        tensor(25., dtype=torch.float64)
    """
    grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    # A norm taken in float16 would overflow.
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=wide))
    # The float32 norm of a single tensor can still overflow. The CPU then recomputes it in float64. Other devices would
    # have to wait for that check, so there the norm is infinite, as in clip_grad_norm_.
    on_host = norms.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and wide != torch.float64 and not norms.isfinite().all():
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=sum_dtype(norms.device))
    return norm.square()


def norm_sums(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[PartialSum]:
    """Compute squared norms of gradients on this rank, one per combination of process groups and device.

    Args:
        params: the parameters, which determine the process groups.
        grads: this rank's parts of their gradients.
    """
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for param, grad in zip(params, grads, strict=True):
        alike.setdefault((process_groups(param), grad.device), []).append(grad)
    return [PartialSum(square_norm(some), groups) for (groups, _), some in alike.items()]


def total_square(squares: Iterable[Tensor]) -> Tensor:
    """Add up squared norms on the device of the first."""
    first, *others = squares
    dtype = sum_dtype(first.device)
    total = first.to(dtype)
    for other in others:
        total = total + other.to(first.device, dtype)
    return total


def clip_factor(total: Tensor, grad_scale: Tensor | None, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the norm of the unscaled gradients, and the factor that unscales and clips the scaled gradients.

    Args:
        total: sum of squares of all gradient elements, still scaled; a scalar tensor.
        grad_scale: the loss scale; None means 1.
        max_norm: the norm to clip to.

    Returns:
        norm and grad_factor, scalar tensors with the device and dtype of `total`.

    Example:
        >>> clip_factor(torch.tensor(100.0), None, 1.0)
        (tensor(10.), tensor(0.1000))
    """
    norm = total.sqrt()
    if grad_scale is None:
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)
    norm = norm / grad_scale
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) / grad_scale
