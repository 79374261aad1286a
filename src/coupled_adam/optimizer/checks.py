"""Checks of user input. Each error names the option or tensor, the value and the remedy."""

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor


def check_amsgrad(amsgrad: bool) -> None:
    """Refuse amsgrad."""
    if amsgrad:
        raise ValueError(
            "Invalid amsgrad value: True. The maximum of amsgrad does not commute with the average over the "
            "vocabulary; use amsgrad=False, or torch.optim.AdamW"
        )


def check_scale_exponent(value: object) -> None:
    """Check that 2^-n fits into float32."""
    if not (isinstance(value, Real) and abs(float(value)) <= 64):
        raise ValueError(
            f"Invalid scale_exponent value: {value!r}. Use a number from -64 to 64; 0 is the paper's method"
        )


def check_exponent(option: str, value: object) -> None:
    """Check for a number in [0, 1] or a one-element tensor. Reading a tensor waits for its device."""
    if isinstance(value, Tensor):
        holds = value.numel() == 1 and value.is_floating_point() and 0 <= value.item() <= 1
    else:
        holds = isinstance(value, Real) and 0 <= float(value) <= 1
    if not holds:
        raise ValueError(f"Invalid {option} value: {value!r}. Use a number or a one-element tensor in [0, 1]")


def check_mean_free(value: object) -> None:
    """Check for a bool: any string would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"Invalid mean_free value: {value!r}. Use True or False")


def check_state_dtype(value: object) -> None:
    """Check the dtype of the first moments."""
    if value not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"Invalid state_dtype value: {value!r}. Use torch.bfloat16, torch.float32, or None for the dtype of the "
            "parameter"
        )


def check_state_seed(value: object) -> None:
    """Check for an unsigned 64-bit integer."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise ValueError(f"Invalid state_seed value: {value!r}. Use an integer in [0, 2^64)")


def check_options_have_effect(index: int, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise an error for options of coupled tables in a group that is not coupled.

    Options equal to the optimizer's own are allowed: ZeroRedundancyOptimizer writes them into every group.

    Args:
        index: index of the group.
        given: the group as the user passed it.
        defaults: defaults of the optimizer.
    """
    neutral = {
        "row_exponent": 0,
        "column_exponent": 1,
        "mean_free": False,
        "vocabulary_size": None,
        "state_dtype": None,
        "state_seed": 0,
    }
    if given.get("coupled"):
        return
    for option in [option for option in neutral if option in given]:
        value = given[option]
        if value is defaults[option] or (
            not isinstance(value, Tensor) and value in (neutral[option], defaults[option])
        ):
            continue
        raise ValueError(
            f"group {index}: {option}={value!r} has no effect without coupled=True; mark the group of "
            f"vocabulary tables with coupled=True, or leave {option} out"
        )


def check_vocabulary_size(index: int, group: dict[str, Any]) -> None:
    """Check that `vocabulary_size` is None or at most the rows of each table."""
    size = group["vocabulary_size"]
    if size is None:
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"coupled group {index}: Invalid vocabulary_size value: {size!r}. Use a positive integer or None"
        )
    for name, param in named_params(group):
        if param.dim() == 2 and size > param.shape[0]:
            raise ValueError(
                f"coupled group {index}: vocabulary_size is {size}, but tensor {name!r} has {param.shape[0]} rows; "
                "put tables of another vocabulary into their own group"
            )


def check_placements(label: str, param: Tensor) -> None:
    """Check that a table is sharded by rows or columns, so that sums over ranks are sums over the table."""
    for placement in getattr(param, "placements", ()):
        if not placement.is_replicate() and getattr(placement, "dim", None) not in (0, 1):
            raise ValueError(
                f"{label} has the placement {placement!r}, over which rows cannot be summed; shard it along dimension "
                "0 or 1 (fully_shard, parallelize_module), or replicate it"
            )


def check_max_grad_norm(value: object) -> None:
    """Check for a positive number or None."""
    if value is not None and not (isinstance(value, Real) and float(value) > 0):
        raise ValueError(f"Invalid max_grad_norm value: {value!r}. Use a positive number, or None for no clipping")


def check_couple(couple: object, words: Iterable[str]) -> None:
    """Check for one of `words` or a list of name patterns."""
    expected = ", ".join(repr(word) for word in words)
    if isinstance(couple, str):
        if couple not in words:
            remedy = f"put a name pattern into a list: couple=[{couple!r}]"
            raise ValueError(f"Invalid couple value: {couple!r}; expected {expected}, or {remedy}")
    elif not isinstance(couple, Sequence) or not couple or not all(isinstance(item, str) for item in couple):
        raise ValueError(f"Invalid couple value: {couple!r}; expected {expected} or a list of name patterns")


def check_couple_of_optimizer(couple: object) -> None:
    """Refuse None and "none", which is for the groups of a baseline."""
    if couple is None or couple == "none":
        raise ValueError(
            f"Invalid couple value: {couple!r} would make this AdamW under another name; expected 'output', 'input', "
            "'all' or a list of name patterns; for a baseline with the same groups use "
            "torch.optim.AdamW(param_groups(model, couple='none'))"
        )
    check_couple(couple, ("output", "input", "all"))


def check_couple_unused(couple: str | Sequence[str]) -> None:
    """Refuse `couple` without a model: it selects tables of a model."""
    if couple != "output":
        raise ValueError(
            f"Invalid couple value: {couple!r} without a model. Pass the model instead of its parameters, "
            "or mark a group with coupled=True"
        )


def check_unused_without_model(**given: object) -> None:
    """Refuse `options` and `exclude` without a model: they apply to its groups."""
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"{option} needs a model. Pass the model instead of its parameters, or pass {option} to param_groups"
            )


def check_any_coupled(groups: list[dict[str, Any]]) -> None:
    """Require a coupled group: without one, this would silently be AdamW."""
    if any(group["coupled"] for group in groups):
        return
    for group in groups:
        for name, param in named_params(group):
            if is_flattened(param):  # the remedy below would only lead to the next error
                refuse_flattened(f"tensor {name!r}", param)
    raise ValueError(
        f"No coupled group among the {len(groups)} given: this would be the same as torch.optim.AdamW. "
        "Pass the model itself, CoupledAdamW(model, ...), or mark the group of the vocabulary tables: "
        "{'params': [table], 'coupled': True, 'weight_decay': 0.0}"
    )


def check_groups_are_new(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups of another optimizer: it wrote its options into them, which would override the new ones."""
    for index, group in enumerate(groups):
        if "param_names" in group:
            raise ValueError(
                f"group {index}: these groups were given to another optimizer, which wrote its options into them "
                f"(lr={group.get('lr')}); call param_groups(model) again for every optimizer"
            )


def check_group(index: int, group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check a parameter group after torch has filled in the defaults."""
    check_agreement([group], defaults, first=index)
    check_scale_exponent(group["scale_exponent"])
    check_amsgrad(group["amsgrad"])
    check_finite(index, group)
    if "couple" in group:
        raise ValueError(f"group {index}: unknown option 'couple'; mark a group of vocabulary tables with coupled=True")
    if not group["coupled"]:
        return
    beta1, beta2 = group["betas"]
    limits = {
        "learning rate": group["lr"] >= 0,
        "beta parameter at index 0": 0 <= beta1 < 1,
        "beta parameter at index 1": 0 <= beta2 < 1,
        "epsilon value": group["eps"] >= 0,
        "weight_decay value": group["weight_decay"] >= 0,
    }
    for option, holds in limits.items():
        if not holds:
            values = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            raise ValueError(f"coupled group {index}: Invalid {option} among {values}")
    if group["differentiable"]:
        raise ValueError(f"coupled group {index}: differentiable=True is not supported; use torch.optim.AdamW")
    for option in ("row_exponent", "column_exponent"):
        check_exponent(option, group[option])
    check_mean_free(group["mean_free"])
    check_state_dtype(group["state_dtype"])
    check_state_seed(group["state_seed"])
    for name, param in named_params(group):
        check_table(f"coupled group {index}: tensor {name!r}", param)
        if group["state_dtype"] is not None and param.dtype == torch.float64:
            raise ValueError(
                f"coupled group {index}: state_dtype is {group['state_dtype']}, but tensor {name!r} is float64, and "
                "so are its moments; leave state_dtype out, or convert the model"
            )
    check_vocabulary_size(index, group)


def check_finite(index: int, group: dict[str, Any]) -> None:
    """Refuse infinite options, which make all parameters NaN at the first step. torch refuses negative and NaN."""
    for label, key in {"learning rate": "lr", "epsilon value": "eps", "weight_decay value": "weight_decay"}.items():
        value = group[key]
        if isinstance(value, Tensor):  # reading it from a GPU would wait for the GPU
            finite = value.device.type != "cpu" or bool(torch.isfinite(value).all())
        else:
            finite = math.isfinite(value)
        if not finite:
            raise ValueError(f"group {index}: Invalid {label}: {value}. Use a finite number")


def is_built_by_zero() -> bool:
    """Whether torch's ZeroRedundancyOptimizer is building this optimizer for one rank's share of the parameters.

    Detected by the calling frames, because ZeRO leaves no other mark: it passes ordinary groups with fewer parameters.
    """
    zero = "torch.distributed.optim.zero_redundancy_optimizer"
    frame = sys._getframe() if zero in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == zero:
            return True
        frame = frame.f_back
    return False


def refuse_norm_under_zero(option: str, value: object) -> None:
    """Refuse options that need the global norm: under ZeRO each rank sees only the gradients of its own parameters."""
    raise ValueError(
        f"Invalid {option} value: {value!r} under ZeroRedundancyOptimizer, where each rank would take the norm of its "
        "own share of the gradients. Call torch.nn.utils.clip_grad_norm_(model.parameters(), ...) before each step; "
        "it also takes error_if_nonfinite"
    )


def check_agreement(groups: list[dict[str, Any]], defaults: dict[str, Any], first: int = 0) -> None:
    """Check that all groups have the optimizer's norm options: the gradient norm covers all groups."""
    for index, group in enumerate(groups, first):
        for key in ("max_grad_norm", "error_if_nonfinite"):
            if group[key] != defaults[key]:
                raise ValueError(
                    f"group {index}: {key} is {group[key]}, but {defaults[key]} for the optimizer. The gradient norm "
                    f"covers all groups; pass {key} to CoupledAdamW, or set optimizer.{key} later. Groups that were "
                    "given to another optimizer keep its options: make new ones"
                )


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP1 flattened a parameter. Checked by name, because importing torch.distributed.fsdp is slow."""
    return getattr(param, "_fsdp_flattened", False) or type(param).__name__ == "FlatParameter"


def refuse_flattened(label: str, param: Tensor) -> NoReturn:
    """Refuse a flattened parameter: FSDP1 cuts one long vector of all parameters, so a rank has pieces of rows."""
    raise ValueError(
        f"{label} is a flattened FSDP1 parameter of shape {tuple(param.shape)}: its rows are lost. "
        "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
    )


def check_table(label: str, param: Tensor) -> None:
    """Check that a tensor is a possible vocabulary table."""
    if is_flattened(param):
        refuse_flattened(label, param)
    check_placements(label, param)
    if param.is_complex():
        raise ValueError(f"{label} has complex dtype {param.dtype}; move it to a group without coupled=True")
    if param.dim() != 2:
        raise ValueError(
            f"{label} has shape {tuple(param.shape)}, expected (V, H); move it to a group without coupled=True. If "
            "FSDP1 or DeepSpeed ZeRO flattened it, shard the model with fully_shard (FSDP2) before building the "
            "optimizer instead"
        )
    if param.shape[0] == 0 or param.shape[1] == 0:
        raise ValueError(f"{label} has shape {tuple(param.shape)} and no elements; leave it out of the groups")


def check_gradients(group: dict[str, Any]) -> None:
    """Check a coupled group before a step: a wrapper may have flattened its tables since construction."""
    for option in ("row_exponent", "column_exponent"):
        if not isinstance(group[option], Tensor):  # reading a tensor waits for its device
            check_exponent(option, group[option])
    for i, param in enumerate(group["params"]):
        if param.dim() != 2:
            refuse_late_flattening(group, param)
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                f"CoupledAdamW does not support sparse gradients: tensor {named_params(group)[i][0]!r} has one. "
                "Build its nn.Embedding with sparse=False"
            )


def refuse_late_flattening(group: dict[str, Any], param: Tensor) -> NoReturn:
    """Refuse the flat partition that DeepSpeed ZeRO puts into a group in place of its tensors, keeping their names."""
    names = ", ".join(repr(name) for name in group.get("param_names", ())) or "a table"
    raise ValueError(
        f"coupled group with {names}: a tensor has shape {tuple(param.shape)} now, expected (V, H). DeepSpeed ZeRO "
        "(stages 1 to 3) and FSDP1 flatten parameters, which loses their rows. Shard the model with "
        "torch.distributed.fsdp.fully_shard (FSDP2), or use ZeRO stage 0"
    )


def check_state_shapes(group: dict[str, Any], state: dict[Tensor, Any]) -> None:
    """Check the state of a coupled group: a table may have been resized, and a hook may have created AdamW's state."""
    for i, param in enumerate(group["params"]):
        moments = state.get(param, {})
        if "exp_avg_sq" not in moments:
            continue
        H = moments["exp_avg_sq"].shape[-1]
        if moments["exp_avg_sq"].shape != (1, H):
            raise ValueError(
                f"coupled group: exp_avg_sq of tensor {named_params(group)[i][0]!r} has shape "
                f"{tuple(moments['exp_avg_sq'].shape)}, expected (1, {H}). A hook created AdamW's state, such as "
                "torchtitan's implementation='fused_opt_states_bf16'; remove the hook, CoupledAdamW creates its state"
            )
        # With beta1 = 0 there is no exp_avg, and without a row exponent no state has the number of rows.
        shape = moments["exp_avg"].shape if "exp_avg" in moments else (moments.get("row_avg_sq", param).shape[0], H)
        if shape != param.shape:
            raise ValueError(
                f"coupled group: tensor {named_params(group)[i][0]!r} has shape {tuple(param.shape)}, but its state "
                f"has {tuple(shape)}: it was resized after its first step. Build a new optimizer"
            )


def named_params(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """List the (name, parameter) pairs of a group. Without names, use the positions.

    Example:
        >>> import torch
        >>> [name for name, _ in named_params({"params": [torch.zeros(1)]})]
        ['parameter 0']
    """
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))
