"""Load and convert state dicts of torch.optim.AdamW and CoupledAdamW: which saved state belongs to which parameter.

The moments themselves are converted in saved_moments.py.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from coupled_adam.optimizer.checks import check_exponent, named_params
from coupled_adam.optimizer.inventory import plain_name
from coupled_adam.optimizer.saved_moments import SavedMoments
from coupled_adam.optimizer.sharding import Reduction, is_distributed
from coupled_adam.optimizer.table import needs_first_moment, needs_row_moments

StateDict = dict[str, Any]


def convert_state_dict(
    state_dict: StateDict, optimizer: Optimizer, param_names: Sequence[str] | None = None
) -> StateDict:
    """Rearrange a state dict, by parameter name, for an optimizer with other groups.

    Works in both directions. For CoupledAdamW, the (V, H) second moment of a coupled table is averaged over its rows,
    and its first moment dropped if beta1 is 0. For torch.optim.AdamW, a coupled (1, H) second moment is repeated for
    every row, and a missing first moment starts at 0.

    Args:
        state_dict: result of `state_dict()` of a torch.optim.AdamW or CoupledAdamW.
        optimizer: the torch.optim.AdamW or CoupledAdamW to load it into, built from a model or from named parameters.
        param_names: names of the parameters, in the order of the optimizer that wrote the file, for example
            ``[name for name, _ in model.named_parameters()]``. Not needed if the file has names.

    Returns:
        A state dict for ``optimizer.load_state_dict``, with the learning rates and other options of `optimizer`.

    Example:
        >>> from coupled_adam import CoupledAdamW
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5))
        >>> adamw = torch.optim.AdamW(model.parameters())
        >>> model(torch.tensor([0, 1])).sum().backward()
        >>> adamw.step()
        >>> coupled = CoupledAdamW(model)
        >>> names = [name for name, _ in model.named_parameters()]
        >>> coupled.load_state_dict(convert_state_dict(adamw.state_dict(), coupled, param_names=names))
        >>> tuple(coupled.state[model[1].weight]["exp_avg_sq"].shape)
        (1, 2)
    """
    _refuse_amsgrad(state_dict)
    _refuse_other_optimizers(optimizer)
    live_names = _live_names(optimizer)
    names = without_common_prefix(_saved_names(state_dict, param_names), live_names)
    saved_id = dict(zip(names, _saved_ids(state_dict), strict=True))
    missing = [name for name in live_names if name not in saved_id]
    unknown = [name for name in saved_id if name not in set(live_names)]
    if missing or unknown:
        raise ValueError(
            f"state dict and optimizer have different parameters: the file lacks {_listed(missing)}, the optimizer "
            f"lacks {_listed(unknown)}; build the optimizer from the same parameters (without frozen ones), or correct "
            "param_names, which must be in the order of the optimizer that wrote the file"
        )
    converted = optimizer.state_dict()
    live_ids = _saved_ids(converted)
    converted["state"] = {
        live_id: state_dict["state"][saved_id[name]]
        for live_id, name in zip(live_ids, live_names, strict=True)
        if saved_id[name] in state_dict["state"]
    }
    spare = _rows_without_exponent(state_dict)
    live_spare = {live_id for live_id, name in zip(live_ids, live_names, strict=True) if saved_id[name] in spare}
    _fit_states(converted, optimizer, live_spare)
    return converted


def adapt_state_dict(state_dict: StateDict, optimizer: Optimizer) -> StateDict:
    """Adapt a state dict to a live CoupledAdamW, for torch's `load_state_dict`.

    Args:
        state_dict: state dict of CoupledAdamW or torch.optim.AdamW; not modified.
        optimizer: the live CoupledAdamW.

    Returns:
        A state dict whose groups have all options and whose moments have the live shapes.
    """
    _refuse_amsgrad(state_dict)
    if _groups_differ(state_dict, optimizer):
        if not all("param_names" in group for group in state_dict["param_groups"]):
            raise ValueError(
                f"state dict has groups of {_group_sizes(state_dict['param_groups'])} parameters, the optimizer of "
                f"{_group_sizes(optimizer.param_groups)}, and the file has no names; map it by name with "
                "coupled_adam.convert_state_dict(state_dict, optimizer, param_names=[...]), or convert the checkpoint "
                "with `coupled-adam convert`"
            )
        return convert_state_dict(state_dict, optimizer)
    adapted = dict(state_dict)
    adapted["state"] = dict(state_dict["state"])
    adapted["param_groups"] = [
        _adapted_group(saved, live)
        for saved, live in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    _fit_states(adapted, optimizer, _rows_without_exponent(state_dict))
    return adapted


def restore_dtypes(adapted: StateDict, optimizer: Optimizer) -> None:
    """Restore the dtype of the moments of coupled tables, which torch casts to the dtype of the parameter."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    coupled = {param: group for group in optimizer.param_groups if group["coupled"] for param in group["params"]}
    for saved_id, param in zip(_saved_ids(adapted), params, strict=True):
        if param not in coupled:
            continue
        dtype = torch.promote_types(param.dtype, torch.float32)
        dtypes = {"exp_avg_sq": dtype, "row_avg_sq": dtype}
        if coupled[param]["state_dtype"] not in (None, param.dtype):
            dtypes["exp_avg"] = coupled[param]["state_dtype"]
        for key, kept_dtype in dtypes.items():
            if key in adapted["state"].get(saved_id, {}):
                moment = adapted["state"][saved_id][key]
                optimizer.state[param][key] = moment.to(device=param.device, dtype=kept_dtype, copy=True)


def _refuse_amsgrad(state_dict: StateDict) -> None:
    if any(group.get("amsgrad") for group in state_dict["param_groups"]):
        raise ValueError(
            "state dict has amsgrad=True, which Coupled Adam does not support; load it into torch.optim.AdamW"
        )


def _refuse_other_optimizers(optimizer: Optimizer) -> None:
    # Checked by options, because frameworks wrap optimizers. Of torch's optimizers, only Adam and AdamW have these.
    if not all({"betas", "eps", "amsgrad"} <= group.keys() for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, which does not have AdamW's moments; "
            "pass a torch.optim.AdamW or a CoupledAdamW"
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ValueError(
            "optimizer has amsgrad=True, but the file has no maximum of the second moment; "
            "build the optimizer with amsgrad=False"
        )


def _adapted_group(saved: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    group = dict(saved)
    if live["coupled"] and not saved.get("coupled"):
        group["weight_decay"] = live["weight_decay"]
    group["coupled"] = live["coupled"]
    group["error_if_nonfinite"] = live["error_if_nonfinite"]
    group["vocabulary_size"] = live["vocabulary_size"]
    group["state_dtype"] = live["state_dtype"]
    # Without stochastic rounding, the seed in the file has no meaning.
    is_rounded = saved.get("coupled") and saved.get("state_dtype") == torch.bfloat16
    group["state_seed"] = saved["state_seed"] if is_rounded and live["coupled"] else live["state_seed"]
    for key in ("scale_exponent", "row_exponent", "column_exponent", "mean_free"):
        group[key] = group.get(key, live[key]) if live["coupled"] == saved.get("coupled", False) else live[key]
    for key in ("row_exponent", "column_exponent"):
        check_exponent(key, group[key])
    if group.get("max_grad_norm") is None:  # a file without clipping does not turn it off
        group["max_grad_norm"] = live["max_grad_norm"]
    return group


def _rows_without_exponent(state_dict: StateDict) -> set[Any]:
    """Parameters whose group has no `row_exponent`: `coupled-adam convert` writes row moments for any exponent."""
    return {
        saved_id for group in state_dict["param_groups"] if "row_exponent" not in group for saved_id in group["params"]
    }


def _fit_states(state_dict: StateDict, optimizer: Optimizer, spare_rows: set[Any]) -> None:
    """Convert the moments of `state_dict` to those of the live optimizer.

    Args:
        state_dict: its groups have their final options; its states are replaced.
        optimizer: the live optimizer.
        spare_rows: parameters whose row moments are dropped if their group has no use for them.
    """
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    live = [(name, p, final) for group, final in groups for name, p in named_params(group)]
    moments: list[tuple[Any, SavedMoments]] = []
    for saved_id, (name, param, group) in zip(_saved_ids(state_dict), live, strict=True):
        state = state_dict["state"].get(saved_id)
        if state:
            unused = _unused(group, saved_id in spare_rows)
            _check_shapes(name, param, state, unused)
            state = {key: value for key, value in state.items() if key not in unused}
            moments.append((saved_id, SavedMoments(state, param, group)))
    Reduction([partial_sum for _, saved in moments for partial_sum in saved.sums]).wait()
    for saved_id, saved in moments:
        state_dict["state"][saved_id] = saved.fitted()


def _unused(group: dict[str, Any], has_spare_rows: bool) -> set[str]:
    """The moments of a file for which a coupled group has no use."""
    if not group.get("coupled") or "betas" not in group:  # a file of another optimizer is refused by its moments
        return set()
    unused = {"row_avg_sq"} if has_spare_rows and not needs_row_moments(group) else set()
    return unused if needs_first_moment(group) else {*unused, "exp_avg"}


def _check_shapes(name: str, param: Tensor, state: dict[str, Any], unused: set[str]) -> None:
    # CoupledAdamW keeps no row moments with row_exponent=0, and no first moment with beta1 = 0.
    is_coupled = param.dim() == 2 and "exp_avg_sq" in state and state["exp_avg_sq"].shape[:1] == (1,)
    optional = {"row_avg_sq", "exp_avg"} if is_coupled else {"row_avg_sq"}
    for key in ("exp_avg", "exp_avg_sq", "row_avg_sq"):
        if key in unused or (key not in state and key in optional):
            continue
        if key not in state:
            raise ValueError(f"state of {name!r} has no {key!r}, only {sorted(state)}; pass a state dict of AdamW")
        allowed = {tuple(param.shape)}
        if key == "exp_avg_sq" and param.dim() == 2:
            allowed.add((1, param.shape[1]))
        if key == "row_avg_sq":
            allowed = {(*param.shape[:1], 1)}
        if tuple(state[key].shape) not in allowed:
            raise ValueError(
                f"state of {name!r}: {key} has shape {tuple(state[key].shape)}, the parameter {tuple(param.shape)}; "
                "the file is from a model of another size, or has its parameters in another order"
            )
        if is_distributed(param) and not is_distributed(state[key]):
            # The function in the message distributes only the moments that the live optimizer has.
            option = {"exp_avg": "betas", "row_avg_sq": "row_exponent"}.get(key)
            first = f"set the file's {option} in the optimizer's group, then " if is_coupled and option else ""
            raise ValueError(
                f"state of {name!r}: {key} is a plain tensor, but the parameter is sharded; {first}load the file with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


def _groups_differ(state_dict: StateDict, optimizer: Optimizer) -> bool:
    saved_groups, live_groups = state_dict["param_groups"], optimizer.param_groups
    if _group_sizes(saved_groups) != _group_sizes(live_groups):
        return True
    if not all("param_names" in group for group in chain(saved_groups, live_groups)):
        return False
    saved, live = _saved_names(state_dict, None), _live_names(optimizer)
    # The same names in another order would go to the wrong tensors. Different names mean a renamed model.
    return saved != live and sorted(saved) == sorted(live)


def _group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _saved_ids(state_dict: StateDict) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))


def _saved_names(state_dict: StateDict, param_names: Sequence[str] | None) -> list[str]:
    if param_names is None:
        if not all("param_names" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "state dict has no parameter names; pass param_names in the order of the optimizer that wrote it, for "
                "example [name for name, _ in model.named_parameters()]"
            )
        param_names = list(chain.from_iterable(group["param_names"] for group in state_dict["param_groups"]))
    param_names = list(param_names)
    count = len(_saved_ids(state_dict))
    if len(param_names) != count:
        raise ValueError(f"param_names has {len(param_names)} names, but the state dict has {count} parameters")
    return _plain_names(param_names)


def _live_names(optimizer: Optimizer) -> list[str]:
    if not all("param_names" in group for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer's groups have no parameter names; build it from the model, or from (name, tensor) pairs"
        )
    return _plain_names([name for group in optimizer.param_groups for name in group["param_names"]])


def without_common_prefix(saved: list[str], live: list[str]) -> list[str]:
    """Match the saved names to the live ones if they differ by a common prefix: a model and a module around it.

    Example:
        >>> without_common_prefix(["model.head.weight", "model.norm.weight"], ["norm.weight", "head.weight"])
        ['head.weight', 'norm.weight']
    """
    for longer, shorter in ((saved, live), (live, saved)):
        for name in shorter:
            prefix = longer[0].removesuffix(name) if longer and longer[0].endswith(f".{name}") else ""
            if prefix and {prefix + other for other in shorter} == set(longer):
                return [s.removeprefix(prefix) if longer is saved else prefix + s for s in saved]
    return saved


def _listed(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}" if names else "none"


def _plain_names(names: list[str]) -> list[str]:
    """Remove the prefixes of wrappers, unless two parameters would then share a name."""
    plain = [plain_name(name) for name in names]
    chosen = plain if len(set(plain)) == len(plain) else names
    twice = sorted({name for name in chosen if chosen.count(name) > 1}) if len(set(chosen)) < len(chosen) else []
    if twice:
        raise ValueError(f"several parameters are called {twice}; give every parameter its own name")
    return chosen
