"""Ways to split parameters into AdamW's groups. The split determines the number of each parameter in a file.

For a file without names, the usual splits are tried. The sizes of the groups and the shapes of the moments must match,
and all matching splits must agree on the names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from coupled_adam.base.errors import UserError, blaming_user
from coupled_adam.conversion.model_parameters import ModelParameters
from coupled_adam.optimizer.groups import param_groups
from coupled_adam.optimizer.state_dicts import StateDict

Cut = Literal["trainer", "single", "matrices", "tables"]
CUTS: tuple[Cut, ...] = get_args(Cut)


@dataclass(frozen=True)
class Layout:
    """The groups of an AdamW."""

    cut: Cut
    """The split that gives these groups."""
    groups: Sequence[Sequence[str]]
    """Names of the parameters of each group."""
    decayed: frozenset[int]
    """Indices of the groups with weight decay."""

    @property
    def sizes(self) -> list[int]:
        return list(map(len, self.groups))

    @property
    def names(self) -> list[str]:
        return list(chain.from_iterable(self.groups))


def layout_of(cut: Cut, model: ModelParameters) -> Layout | None:
    """Split the parameters of `model`. Returns None if the split needs modules or packages that are not available."""
    names = list(model.named)
    if cut == "single":
        return Layout(cut, [names], frozenset({0}))
    if cut == "matrices":
        matrices = [name for name in names if model.named[name].ndim >= 2]
        return Layout(cut, [matrices, [name for name in names if model.named[name].ndim < 2]], frozenset({0}))
    if model.module is None:
        return None
    if cut == "trainer":
        try:
            from transformers import Trainer
        except ModuleNotFoundError:
            return None
        # The method uses only the model, not the Trainer.
        decayed = set(Trainer.get_decay_parameter_names(None, model.module))  # type: ignore[arg-type]
        split = [name for name in names if name in decayed], [name for name in names if name not in decayed]
        return Layout(cut, split, frozenset({0}))
    with blaming_user():
        groups = param_groups(model.module, couple="none")
    decayed_groups = frozenset(i for i, group in enumerate(groups) if group["name"] == "decay")
    return Layout(cut, [[name for name, _ in group["params"]] for group in groups], decayed_groups)


def names_by_position(state_dict: StateDict, model: ModelParameters, cut: Cut | None, path: Any) -> list[str]:
    """Find the parameter names of a file without names, in the order of the file.

    Args:
        state_dict: state dict of an AdamW or CoupledAdamW.
        model: the parameters of the model.
        cut: the split that the user named; None tries all.
        path: the file, for messages.
    """
    layouts = {way: layout_of(way, model) for way in ([cut] if cut else CUTS)}
    fitting = {way: layout for way, layout in layouts.items() if layout and _fits(state_dict, layout, model)}
    orders = {tuple(layout.names) for layout in fitting.values()}
    if len(orders) > 1:
        ways = " or ".join(f"--adamw-groups {way}" for way in fitting)
        raise UserError(f"{path}: its groups match {len(orders)} ways to split the model; choose with {ways}")
    if orders:
        return list(orders.pop())
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = ", ".join(f"{layout.sizes} ({way})" for way, layout in layouts.items() if layout)
    same = sum(sizes) == len(model.named)
    remedy = (
        "the shapes or the order differ: pass the trained model with --model"
        if same
        else "pass the trained model with --model, and parameters that were not trained with --frozen PATTERN"
    )
    raise UserError(
        f"{path}: its groups have {sizes} parameters, but those of {model.origin} would have {expected}; {remedy}"
    )


def _fits(state_dict: StateDict, layout: Layout, model: ModelParameters) -> bool:
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != layout.sizes:
        return False
    ids = chain.from_iterable(group["params"] for group in groups)
    states = ((name, state_dict["state"].get(saved_id)) for name, saved_id in zip(layout.names, ids, strict=True))
    return all(_may_have_shape(state, tuple(model.named[name].shape)) for name, state in states if state)


def _may_have_shape(state: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the moments can be those of a parameter with this shape."""
    if "exp_avg" in state:
        return tuple(state["exp_avg"].shape) == shape
    # A coupled table with beta1 = 0. Only row moments, if any, have its number of rows.
    rows = state["row_avg_sq"].shape[0] if "row_avg_sq" in state else shape[0]
    return (rows, *state["exp_avg_sq"].shape[1:]) == shape
