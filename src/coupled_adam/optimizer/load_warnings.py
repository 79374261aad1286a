"""Warnings of `load_state_dict` about a file that changes how a table is trained."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from coupled_adam.optimizer.checks import named_params
from coupled_adam.optimizer.table import needs_first_moment


def warn_of_missing_first_moments(optimizer: Optimizer) -> bool:
    """Warn if a loaded state lacks first moments that the betas of its groups need. Returns whether it does.

    torch.distributed.checkpoint reads only what the state of the live optimizer has, but takes the betas from the file.
    """
    missing = [
        f"{name!r} (betas {group['betas']})"
        for group in optimizer.param_groups
        if group["coupled"] and needs_first_moment(group)
        for name, param in named_params(group)
        if (state := optimizer.state.get(param)) and "exp_avg" not in state and state["step"] > 0
    ]
    if missing:
        warnings.warn(
            f"CoupledAdamW: the loaded state has no exp_avg of {', '.join(missing)}: the first moment starts at 0. "
            "This is right if the checkpoint was written with beta1 = 0. If it has the moment, load it again, with the "
            "checkpoint's betas in the optimizer's group before get_state_dict. To train without momentum, set beta1 "
            "to 0 in the state dict before set_state_dict or load_state_dict",
            stacklevel=3,  # the caller of load_state_dict
        )
    return bool(missing)


def warn_of_replaced_settings(replaced: Sequence[str]) -> None:
    """Warn of the sentences of `replaced_settings`, if there are any."""
    if replaced:
        warnings.warn(
            f"CoupledAdamW: the file is from AdamW and replaces settings of the tables: {'; '.join(replaced)}",
            stacklevel=3,  # the caller of load_state_dict
        )


def replaced_settings(
    live: Sequence[dict[str, Any]], given: Sequence[dict[str, Any]], adapted: Sequence[dict[str, Any]]
) -> list[str]:
    """Describe the settings that a coupled group had for itself and that a file of AdamW replaces.

    Settings that all groups share do not count, so neither does a schedule, which scales all learning rates alike.

    Args:
        live: groups of the optimizer, before loading.
        given: groups of the file.
        adapted: groups that will be loaded, one for each of `live`.
    """
    if any("scale_exponent" in group for group in given):  # CoupledAdamW wrote the file, so its settings are meant
        return []
    # The other groups are trained alike; the first stands for all.
    others = [(now, new) for now, new in zip(live, adapted, strict=True) if not now["coupled"]][:1]
    sentences = []
    for index, (now, new) in enumerate(zip(live, adapted, strict=True)):
        if not now["coupled"]:
            continue
        lost: dict[str, tuple[Any, Any]] = {}
        if _loses_lr(now, new, others):
            lost["lr"] = (_base_lr(now), float(new["lr"]))
        if _loses_betas(now, new, others):
            lost["betas"] = (_betas(now), _betas(new))
        if lost:
            changes = ", ".join(f"{option} {old} becomes {value}" for option, (old, value) in lost.items())
            mine = {option: old for option, (old, _) in lost.items()}
            restart = ""
            if "lr" in lost and "initial_lr" in new:  # a new scheduler would start from the file's
                mine["initial_lr"] = mine["lr"]
                restart = ", and set lr to initial_lr in every group before you build a new scheduler"
            remedy = ", ".join(f"{option}={value}" for option, value in mine.items())
            name = f" ({now['name']!r})" if "name" in now else ""
            sentences.append(
                f"in group {index}{name}, {changes}; to keep yours, call "
                f"optimizer.param_groups[{index}].update({remedy}) after loading{restart}"
            )
    return sentences


def _loses_lr(
    now: dict[str, Any], new: dict[str, Any], others: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> bool:
    """Whether the learning rate changes in proportion to that of the other groups."""
    if _is_close(_base_lr(now), float(new["lr"])):
        return False
    return any(
        not _is_close(_base_lr(now) * _base_lr(other_new), _base_lr(new) * _base_lr(other_now))
        for other_now, other_new in others
    )


def _loses_betas(
    now: dict[str, Any], new: dict[str, Any], others: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> bool:
    """Whether betas change that differ from those of the other groups."""
    return _betas(now) != _betas(new) and any(_betas(now) != _betas(other_now) for other_now, _ in others)


def _base_lr(group: dict[str, Any]) -> float:
    """The learning rate before the schedule, which may start at 0."""
    return float(group.get("initial_lr", group["lr"]))


def _betas(group: dict[str, Any]) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)  # a tensor may hold the learning rate in float32
