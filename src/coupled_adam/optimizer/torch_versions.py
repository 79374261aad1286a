"""Private names of torch, and differences between its versions.

All of them are here, so that a new torch version can break only this file. The oldest supported version is torch 2.6;
`docs/torch-versions.md` lists the tested versions.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as disable_dynamo
from torch.optim.adamw import AdamW
from torch.optim.optimizer import Optimizer
from torch.optim.optimizer import _get_scalar_dtype as scalar_dtype
from torch.optim.optimizer import _use_grad_for_differentiable as use_grad_for_differentiable

__all__ = [
    "check_graph_capture",
    "collect_adamw_group",
    "disable_dynamo",
    "global_offset",
    "scalar_dtype",
    "use_grad_for_differentiable",
]

# Before torch 2.7, AdamW was not a subclass of Adam, and its `_init_group` took `amsgrad`.
TAKES_AMSGRAD = "amsgrad" in inspect.signature(AdamW._init_group).parameters


def collect_adamw_group(
    optimizer: torch.optim.Adam | AdamW,
    group: dict[str, Any],
    params_with_grad: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
) -> bool:
    """Collect the tensors of a group with torch's `_init_group`. Returns whether any of them is complex."""
    amsgrad = (group["amsgrad"],) if TAKES_AMSGRAD else ()
    collect = cast(Callable[..., bool], AdamW._init_group)
    return bool(
        collect(
            optimizer, group, params_with_grad, grads, *amsgrad, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        )
    )


def check_graph_capture(optimizer: Optimizer) -> None:
    """Let torch raise or warn if a graph captures a step without `capturable=True`."""
    # Renamed after torch 2.11. If the new name exists, the old one warns.
    check = getattr(optimizer, "_accelerator_graph_capture_health_check", None)
    cast(Callable[[], None], check or optimizer._cuda_graph_capture_health_check)()


@functools.lru_cache(maxsize=64)
def global_offset(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> tuple[int, int]:
    """Row and column of the whole matrix at which this rank's part of a DTensor begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return int(offset[0]), int(offset[1])
