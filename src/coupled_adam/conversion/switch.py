"""Convert the state dict of one optimizer to the other: moments, options of the groups, and schedulers.

`convert_state_dict` maps the moments by name. It needs the optimizer that will load them, which is built here on the
meta device. Options such as the learning rate follow the parameters: a new group has the options of the old groups of
its parameters. The weight decay of the old file applies to the groups that the new optimizer decays.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from coupled_adam.base.errors import UserError, blaming_user
from coupled_adam.conversion.adamw_groups import Layout
from coupled_adam.conversion.model_parameters import ModelParameters
from coupled_adam.optimizer import CoupledAdamW, convert_state_dict
from coupled_adam.optimizer.inventory import plain_name
from coupled_adam.optimizer.state_dicts import StateDict

# Options that torch's schedulers add to groups.
SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
# State of schedulers with one value per group.
PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"}
IN_PYTHON = "convert in Python with coupled_adam.convert_state_dict and an optimizer that has the groups you want"


@dataclass(frozen=True)
class ConvertedTable:
    """A table whose second moment was averaged or repeated."""

    name: str
    shape: tuple[int, int]  # (V, H)
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Switched:
    """The state dict of the other optimizer."""

    state_dict: StateDict
    tables: list[ConvertedTable]
    origins: list[list[int]]
    """For every new group, the indices of the old groups of its parameters."""


def to_coupled(
    state_dict: StateDict, names: Sequence[str], model: ModelParameters, couple: str | Sequence[str]
) -> Switched:
    """Convert AdamW to CoupledAdamW: average the second moments of the tables over their rows, and over their columns.

    The exponents of the optimizer that loads the file are unknown. With `row_exponent` 0, it drops the row moments.

    Args:
        state_dict: state dict of an AdamW.
        names: names of its parameters, in its order.
        model: the parameters of the model.
        couple: as in CoupledAdamW; must be a list of name patterns if the modules of the model are not known.
    """
    _take_dtypes_of(state_dict, names, model)
    options: dict[str, Any] = {"row_exponent": 1.0}  # keeps the row moments
    with blaming_user():
        if model.module is not None:
            decay = _strongest_decay(state_dict)
            optimizer = CoupledAdamW(model.module, weight_decay=decay, couple=couple, **options)
        else:
            optimizer = CoupledAdamW(_groups_around_tables(state_dict, names, model, couple), **options)
    switched = _switch(state_dict, names, optimizer)
    new = {option for option in optimizer.defaults if option not in _adamw_options()} - {"coupled"}
    for group in switched.state_dict["param_groups"]:
        for option in new:  # the optimizer that loads the file decides these
            group.pop(option, None)
    return switched


def to_adamw(state_dict: StateDict, names: Sequence[str], model: ModelParameters, layout: Layout) -> Switched:
    """Convert CoupledAdamW to AdamW: repeat the second moment of every coupled table for all its rows.

    Args:
        state_dict: state dict of a CoupledAdamW.
        names: names of its parameters, in its order.
        model: the parameters of the model.
        layout: the groups of the AdamW that will load the file.
    """
    _take_dtypes_of(state_dict, names, model)
    decay = _strongest_decay(state_dict)
    groups = [
        {"params": [(name, model.named[name]) for name in group], "weight_decay": decay if i in layout.decayed else 0.0}
        for i, group in enumerate(layout.groups)
    ]
    first = "" if layout.cut == "tables" else "keep the tables in their own groups with --adamw-groups tables, or "
    switched = _switch(state_dict, names, torch.optim.AdamW(groups), first + IN_PYTHON)
    for group in switched.state_dict["param_groups"]:
        # An AdamW without names would keep these, and then refuse add_param_group.
        del group["param_names"]
    return switched


def switch_scheduler(scheduler: dict[str, Any], switched: Switched, groups_before: int) -> dict[str, Any]:
    """Convert the state of a scheduler to the new groups. Its values per group follow the parameters."""
    converted = dict(scheduler)
    for key in PER_GROUP & scheduler.keys():
        values = scheduler[key]
        if isinstance(values, (list, tuple)) and len(values) == groups_before:
            picked = [_common(key, [values[i] for i in origin]) for origin in switched.origins]
            converted[key] = type(values)(picked)
    if isinstance(inner := scheduler.get("_schedulers"), list):  # SequentialLR, ChainedScheduler
        converted["_schedulers"] = [switch_scheduler(each, switched, groups_before) for each in inner]
    return converted


def _switch(state_dict: StateDict, names: Sequence[str], optimizer: Optimizer, remedy: str = IN_PYTHON) -> Switched:
    with blaming_user():
        converted = convert_state_dict(state_dict, optimizer, param_names=names)
    before = _states_by_name(state_dict, names)
    new_names = [[plain_name(name) for name in group["param_names"]] for group in converted["param_groups"]]
    after = _states_by_name(converted, list(chain.from_iterable(new_names)))
    tables = [
        ConvertedTable(name, tuple(state["exp_avg"].shape), _size(before[name]), _size(state))
        for name, state in after.items()
        if state["exp_avg_sq"].shape != before[name]["exp_avg_sq"].shape
    ]

    old_groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in old_groups]
    group_of = dict(zip(names, chain.from_iterable([i] * size for i, size in enumerate(sizes)), strict=True))
    # A group without parameters, which the Trainer may create, gets the options of the first group.
    origins = [sorted({group_of[name] for name in group}) or [0] for group in new_names]
    for group, origin in zip(converted["param_groups"], origins, strict=True):
        group.update(_options([old_groups[i] for i in origin], remedy))
    return Switched(converted, tables, origins)


def _strongest_decay(state_dict: StateDict) -> float:
    return max(float(group["weight_decay"]) for group in state_dict["param_groups"])


def _options(groups: Sequence[dict[str, Any]], remedy: str) -> dict[str, Any]:
    """Return the common options of `groups`: those of AdamW and of schedulers."""
    carried = (_adamw_options() | SCHEDULER_OPTIONS) - {"weight_decay", "decoupled_weight_decay"}
    return {key: _common(key, [group.get(key) for group in groups], remedy) for key in groups[0] if key in carried}


def _common(option: str, values: Sequence[Any], remedy: str = IN_PYTHON) -> Any:
    plain = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    if any(value != plain[0] for value in plain):
        raise UserError(f"{option} is {', '.join(map(str, plain))} in groups that become one group; {remedy}")
    return values[0]


def _adamw_options() -> set[str]:
    return set(torch.optim.AdamW([torch.empty(0)]).defaults)


def _groups_around_tables(
    state_dict: StateDict, names: Sequence[str], model: ModelParameters, couple: str | Sequence[str]
) -> list[dict[str, Any]]:
    """Build groups from names alone: the tables in a coupled group, everything else in the groups of the file."""
    matrices = {name: parameter for name, parameter in model.named.items() if parameter.ndim == 2}
    if isinstance(couple, str):
        largest = sorted(matrices, key=lambda name: -matrices[name].numel())[:3]
        raise UserError(
            f"{model.origin} does not show which parameters are vocabulary tables; pass the model with --model, or "
            f"name them: --couple {largest[0] if largest else 'lm_head.weight'} (largest: {', '.join(largest)})"
        )
    tables = []
    for pattern in couple:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched or not set(matched) <= matrices.keys():
            what = "not a matrix" if matched else "not among the parameters"
            raise UserError(
                f"--couple {pattern}: {what}; {model.origin} has the matrices {', '.join(list(matrices)[:6])}"
            )
        tables += [name for name in matched if name not in tables]

    def pairs(wanted: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
        return [(name, model.named[name]) for name in wanted]

    groups: list[dict[str, Any]] = [{"name": "coupled", "params": pairs(tables), "coupled": True, "weight_decay": 0.0}]
    rest = iter(names)
    for group in state_dict["param_groups"]:
        others = [name for name in islice(rest, len(group["params"])) if name not in tables]
        if others:
            groups.append({"params": pairs(others), "weight_decay": group["weight_decay"]})
    return groups


def _take_dtypes_of(state_dict: StateDict, names: Sequence[str], model: ModelParameters) -> None:
    """Give the parameters their dtypes in training, which are those of AdamW's first moments.

    If the first moments have a `state_dtype`, the parameters become float32; the optimizer that loads the file converts
    the moments. If there are none because beta1 is 0, the parameters keep the dtype that they have in the model, or
    become float64 if their second moments are.
    """
    groups = chain.from_iterable([group] * len(group["params"]) for group in state_dict["param_groups"])
    of_its_own = {name for name, group in zip(names, groups, strict=True) if group.get("state_dtype") is not None}
    for name, state in _states_by_name(state_dict, names).items():
        if name not in model.named:
            continue
        parameter = model.named[name]
        if "exp_avg" not in state:
            dtype = torch.float64 if state["exp_avg_sq"].dtype == torch.float64 else parameter.dtype
        else:
            dtype = torch.float32 if name in of_its_own else state["exp_avg"].dtype
        parameter.data = parameter.data.to(dtype)


def _states_by_name(state_dict: StateDict, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = {name: state_dict["state"].get(saved_id) for name, saved_id in zip(names, ids, strict=True)}
    return {name: state for name, state in states.items() if state}


def _size(state: dict[str, Any]) -> int:
    return sum(value.numel() * value.itemsize for value in state.values() if isinstance(value, Tensor))
