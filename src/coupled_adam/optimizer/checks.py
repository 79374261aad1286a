"""What a user can get wrong, each as an error that names the thing, the value and the remedy."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_options(scale_exponent: float, max_grad_norm: float | None, amsgrad: bool) -> None:
    """Check the options that torch.optim.AdamW does not know."""
    if amsgrad:
        raise ValueError(
            "Invalid amsgrad value: True. The maximum of amsgrad does not commute with the average over the "
            "vocabulary; use amsgrad=False, or torch.optim.AdamW"
        )
    if not math.isfinite(scale_exponent):
        raise ValueError(
            f"Invalid scale_exponent value: {scale_exponent}. Use a finite number, 0 for the paper's method"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"Invalid max_grad_norm value: {max_grad_norm}. Use a positive number, or None for no clipping"
        )


def check_couple_unused(couple: str | Sequence[str]) -> None:
    """`couple` selects tables of a model; groups say it themselves."""
    if couple != "output":
        raise ValueError(
            f"Invalid couple value: {couple!r} without a model. Pass the model instead of its parameters, "
            "or mark a group with coupled=True"
        )


def check_any_coupled(groups: list[dict[str, Any]]) -> None:
    """Without a coupled group this would silently be AdamW."""
    if not any(group["coupled"] for group in groups):
        raise ValueError(
            f"No coupled group among the {len(groups)} given: nothing would differ from torch.optim.AdamW. "
            "Pass the model itself, CoupledAdamW(model, ...), or mark the vocabulary tables' group: "
            "{'params': [table], 'coupled': True, 'weight_decay': 0.0}"
        )


def check_group(index: int, group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check one param group after torch has filled in the defaults."""
    check_options(group["scale_exponent"], group["max_grad_norm"], group["amsgrad"])
    for key in ("max_grad_norm", "error_if_nonfinite"):
        if group[key] != defaults[key]:
            raise ValueError(
                f"group {index}: {key} is {group[key]}, but {defaults[key]} for the optimizer. "
                "The gradient norm is taken over all groups; pass it to CoupledAdamW, not to a group"
            )
    if not group["coupled"]:
        return
    if group["differentiable"]:
        raise ValueError(f"coupled group {index}: differentiable=True is not supported; use torch.optim.AdamW")
    for name, param in named_params(group):
        check_table(f"coupled group {index}: tensor {name!r}", param)


def check_table(label: str, param: Tensor) -> None:
    """Check that a tensor can be a vocabulary table."""
    if getattr(param, "_fsdp_flattened", False) or type(param).__name__ == "FlatParameter":
        raise ValueError(
            f"{label} is a flattened FSDP1 parameter of shape {tuple(param.shape)}: its rows are lost. "
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if param.is_complex():
        raise ValueError(f"{label} has complex dtype {param.dtype}; move it to a group without coupled=True")
    if param.dim() != 2:
        raise ValueError(
            f"{label} has shape {tuple(param.shape)}, expected (V, H); move it to a group without coupled=True, "
            "or, if FSDP1 flattened it, shard the model with fully_shard (FSDP2) before building the optimizer"
        )
    if param.shape[0] == 0 or param.shape[1] == 0:
        raise ValueError(f"{label} has shape {tuple(param.shape)}: a table without elements has no second moment")


def check_gradients(group: dict[str, Any]) -> None:
    """Check a coupled group before a step: what was a table at construction may have been wrapped since."""
    for name, param in named_params(group) if any(param.dim() != 2 for param in group["params"]) else []:
        check_table(f"coupled group: tensor {name!r}", param)
    sparse = [param.grad is not None and param.grad.is_sparse for param in group["params"]]
    for (name, _), is_sparse in zip(named_params(group) if any(sparse) else [], sparse, strict=False):
        if is_sparse:
            raise RuntimeError(
                f"CoupledAdamW does not support sparse gradients: tensor {name!r} has one. Build its nn.Embedding "
                "with sparse=False"
            )


def named_params(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The parameters of a group with their names, or their positions where it has none.

    Example:
        >>> import torch
        >>> [name for name, _ in named_params({"params": [torch.zeros(1)]})]
        ['parameter 0']
    """
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))
