"""The parameter groups of a model: vocabulary tables, parameters with weight decay, parameters without.

The groups depend on the model alone; `couple` only marks some of them. State dicts of an AdamW baseline and of
CoupledAdamW on the same model are therefore compatible.

Legend: V vocabulary rows, H hidden size.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from coupled_adam.optimizer.checks import check_couple, is_flattened
from coupled_adam.optimizer.computed_tables import ComputedTable
from coupled_adam.optimizer.group_options import check_options, check_value
from coupled_adam.optimizer.inventory import Inventory
from coupled_adam.optimizer.table import needs_first_moment, needs_row_moments
from coupled_adam.optimizer.vocabulary import (
    VocabularyCandidate,
    VocabularyTable,
    find_candidates,
    only_candidate,
    possible_tables,
)

COUPLED_ROLES = {
    "output": ("output", "tied"),
    "input": ("input", "tied"),
    "all": ("output", "input", "tied"),
    "none": (),
}
GROUP_OF_ROLE = {"output": "output_embeddings", "tied": "output_embeddings", "input": "input_embeddings"}
ADAPTERS_ARE_NO_TABLES = (
    ". Adapters such as LoRA's are never coupled: train the whole table (in peft: modules_to_save), or use "
    "torch.optim.AdamW(param_groups(model, couple='none'))"
)
GROUP_ORDER = ("coupled", "output_embeddings", "input_embeddings", "decay", "no_decay")


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for torch.optim. `print(groups)` shows how the model was split."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        tables: Sequence[VocabularyTable],
        computed: Sequence[ComputedTable] = (),
        options: Mapping[str, Mapping[str, Any]] | None = None,
        excluded: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(groups)
        self.tables = list(tables)
        self.computed = list(computed)
        self.options = {name: dict(given) for name, given in (options or {}).items()}
        self.excluded = set(excluded)

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Format the vocabulary tables, the groups and their bytes of optimizer state as plain text.

        The bytes depend on the options of the groups. Options that only the optimizer gets are not known here.
        """
        coupled = {tensor for group in self if group.get("coupled") for tensor in _tensors(group)}
        table_rows = [("vocabulary table", "shape", "dtype", "role", "coupled", "found by")]
        for table in self.tables:
            mark = "yes" if table.weight in coupled else "no" if table.weight.requires_grad else "no (frozen)"
            mark = "no (excluded)" if table.weight in self.excluded else mark
            shape, dtype = str(tuple(table.weight.shape)), str(table.weight.dtype).removeprefix("torch.")
            table_rows.append((table.name, shape, dtype, table.role, mark, table.rule))
        for computed in self.computed:
            table_rows.append((computed.name, str(computed.shape), "", computed.role, "no", computed.how))

        group_rows: list[tuple[str, ...]] = [("group", "tensors", "parameters", "weight decay")]
        for group in self:
            sizes = [tensor.numel() for tensor in _tensors(group)]
            group_rows.append((group["name"], f"{len(sizes)}", f"{sum(sizes):,}", f"{group['weight_decay']}"))
        if self.excluded:
            size = sum(tensor.numel() for tensor in self.excluded)
            group_rows.append(("(excluded)", f"{len(self.excluded)}", f"{size:,}", ""))
        if self.options:
            given = [", ".join(f"{k}={v}" for k, v in self.options.get(row[0], {}).items()) for row in group_rows[1:]]
            group_rows = [(*row, options) for row, options in zip(group_rows, ["options", *given], strict=True)]

        adamw = sum(2 * tensor.nbytes for group in self for tensor in _tensors(group))
        saving = adamw - sum(_state_bytes(group, tensor) for group in self for tensor in _tensors(group))
        state_rows = [
            ("optimizer state", "bytes"),
            ("these groups", f"{adamw - saving:,}"),
            ("AdamW", f"{adamw:,}"),
            ("saving", f"{saving:,} ({saving / max(adamw, 1):.0%})"),
        ]
        return "\n\n".join(aligned(rows) for rows in (table_rows, group_rows, state_rows))


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-2,
    couple: str | Sequence[str] = "output",
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    exclude: Iterable[Tensor | tuple[str, Tensor]] = (),
) -> ParamGroups:
    """Split the trainable parameters of `model` into groups for CoupledAdamW or torch.optim.AdamW.

    The groups are, in this order: "coupled" (only if `couple` is a list), "output_embeddings" (heads and tied tables),
    "input_embeddings" (input tables that are not tied), "decay" and "no_decay". Empty groups are left out.

    Args:
        model: the model. It may be wrapped by DDP or torch.compile, or sharded by fully_shard.
        weight_decay: weight decay of the group "decay": all matrices except vocabulary tables, heads and position
            tables. The other groups have none.
        couple: which tables to couple: "output" (heads and tied tables), "input" (input and tied tables), "all",
            "none" (the same groups for an AdamW baseline), or a list of fnmatch patterns of parameter names, written
            without `module.` and `_orig_mod.`.
        options: settings per group, by group name, such as `{"output_embeddings": {"lr": 3e-3}}`. Every group has
            "lr", "betas", "eps" and "weight_decay". Coupled groups also have "scale_exponent", "row_exponent",
            "column_exponent", "mean_free", "vocabulary_size", "state_dtype" and "state_seed".
        exclude: parameters that another optimizer trains: tensors or (name, tensor) pairs, such as the result of
            :func:`coupled_adam.hidden_matrices` for Muon.

    Returns:
        A list of dicts with the keys "name", "params" ((name, tensor) pairs) and "weight_decay"; coupled groups also
        have "coupled": True. Print the list to see the tables, the groups and the size of the optimizer state.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"wte": nn.Embedding(100, 16), "lm_head": nn.Linear(16, 100)})
        >>> groups = param_groups(model)
        >>> for group in groups:
        ...     print(group["name"], [name for name, _ in group["params"]], group.get("coupled", False))
        output_embeddings ['lm_head.weight'] True
        input_embeddings ['wte.weight'] False
        no_decay ['lm_head.bias'] False
        >>> print(groups.summary().splitlines()[-1])
        saving           6,336 (24%)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass the torch.nn.Module to train")
    check_value("weight_decay", weight_decay)
    check_couple(couple, COUPLED_ROLES)
    refuse_flattened_parameters(model)

    inventory = Inventory(model)
    excluded = _excluded_parameters(exclude, inventory)
    readings = find_candidates(inventory)
    if isinstance(couple, str):
        reading = only_candidate(readings)
        _require_couplable(reading, couple, model)
        tables, computed = reading.tables, reading.computed
        group_of = {table.weight: GROUP_OF_ROLE[table.role] for table in tables}
        coupled_groups = {group_of[table.weight] for table in tables if table.role in COUPLED_ROLES[couple]}
    else:
        matched = _matched_parameters(couple, inventory)
        tables, computed = _tables_beside(matched, readings, inventory), []
        group_of = {table.weight: GROUP_OF_ROLE[table.role] for table in tables}
        group_of.update(dict.fromkeys(matched, "coupled"))
        coupled_groups = {"coupled"}

    _require_not_excluded([t for t in tables if group_of[t.weight] in coupled_groups], excluded, couple)

    undecayed = inventory.undecayed() | possible_tables(readings, inventory)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in GROUP_ORDER}
    for parameter, (name, *_) in inventory.names.items():
        if parameter.requires_grad and parameter not in excluded:
            group = group_of.get(parameter, "no_decay" if parameter in undecayed else "decay")
            members[group].append((name, parameter))
    if coupled_groups and not any(members[name] for name in coupled_groups):
        frozen = ", ".join(repr(table.name) for table in tables if group_of[table.weight] in coupled_groups)
        raise ValueError(
            f"couple={couple!r}: the tables to couple are frozen ({frozen}); set requires_grad=True on one of them, "
            f"or couple other tables{ADAPTERS_ARE_NO_TABLES if inventory.adapters else ''}"
        )
    groups: list[dict[str, Any]] = [
        {"name": name, "params": pairs, "weight_decay": weight_decay if name == "decay" else 0.0}
        | ({"coupled": True} if name in coupled_groups else {})
        for name, pairs in members.items()
        if pairs
    ]
    check_options(options, GROUP_ORDER, {group["name"]: group.get("coupled", False) for group in groups})
    groups = [group | dict((options or {}).get(group["name"], {})) for group in groups]
    return ParamGroups(groups, tables, computed, options, excluded)


def _require_couplable(reading: VocabularyCandidate, couple: str, model: nn.Module) -> None:
    """Raise an error if a requested table cannot be coupled, instead of silently leaving it to AdamW."""
    roles = COUPLED_ROLES[couple]
    baseline = "For AdamW without coupling, use torch.optim.AdamW(param_groups(model, couple='none'))"
    for table in reading.computed:
        if table.role in roles:
            kind, other = {"output": ("head", "input"), "input": ("embedding", "output")}[table.role]
            raise ValueError(
                f"couple={couple!r}: the {kind} {table.name!r} {table.shape} cannot be coupled, because {table.how}; "
                f"{table.remedy}, or leave it uncoupled with couple={other!r}. {baseline}"
            )
    if couple == "output" and not any(table.role in roles for table in reading.tables):
        inputs = [table.name for table in reading.tables] + [table.name for table in reading.computed]
        names = ", ".join(map(repr, inputs))
        remedy = "to couple the input table anyway, pass couple='input'"
        if reading.tables:
            remedy += f" or couple=[{reading.tables[0].name!r}]"
        raise ValueError(
            f"couple='output': {type(model).__name__} has no output layer over the vocabulary, only the input table "
            f"{names}. Coupled Adam is a method for output layers; {remedy}. {baseline}"
        )


def _matched_parameters(patterns: Sequence[str], inventory: Inventory) -> dict[nn.Parameter, str]:
    """Find the trainable parameters with a matching name or alias. Returns the first matching pattern of each."""
    matched: dict[nn.Parameter, str] = {}
    for pattern in patterns:
        hits = [p for p, names in inventory.names.items() if any(fnmatchcase(n, pattern) for n in names)]
        trainable = [parameter for parameter in hits if parameter.requires_grad]
        if hits and not trainable:
            raise ValueError(
                f"couple pattern {pattern!r} matches only frozen parameters, such as "
                f"{inventory.names[hits[0]][0]!r}; set requires_grad=True, or leave the pattern out"
            )
        if not hits:
            names = [n for p, aliases in inventory.names.items() if p.requires_grad for n in aliases]
            near = difflib.get_close_matches(pattern.replace("*", ""), names, cutoff=0.0)
            raise ValueError(f"couple pattern {pattern!r} matches no trainable parameter; similar names: {near}")
        for parameter in trainable:
            if parameter.ndim != 2:
                raise ValueError(
                    f"couple pattern {pattern!r}: tensor {inventory.names[parameter][0]!r} has shape "
                    f"{tuple(parameter.shape)}, expected (V, H); narrow the pattern to vocabulary tables"
                )
            matched.setdefault(parameter, pattern)
    return matched


def _tables_beside(
    matched: dict[nn.Parameter, str], readings: list[VocabularyCandidate], inventory: Inventory
) -> list[VocabularyTable]:
    """List the matched tables, then the other tables of their vocabulary. The matches select the candidate."""
    settled = [reading for reading in readings if any(table.weight in matched for table in reading.tables)]
    found = {table.weight: table for reading in settled or readings for table in reading.tables}
    tables = []
    for weight, pattern in matched.items():
        role = "input" if weight in inventory.embeddings else "output"
        table = found.get(weight, VocabularyTable(inventory.names[weight][0], weight, role, ""))
        tables.append(replace(table, rule=f"pattern {pattern!r}"))
    return tables + [table for table in found.values() if table.weight not in matched]


def _excluded_parameters(
    exclude: Iterable[Tensor | tuple[str, Tensor]], inventory: Inventory
) -> dict[nn.Parameter, str]:
    """Return the parameters to leave out, with their names in the model."""
    excluded: dict[nn.Parameter, str] = {}
    for entry in exclude:
        tensor = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(tensor, nn.Parameter):
            raise TypeError(f"exclude has a {type(tensor).__name__}; pass parameters or (name, parameter) pairs")
        if tensor not in inventory.names:
            name = repr(entry[0]) if isinstance(entry, tuple) else f"a tensor of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"exclude has {name}, which is not a parameter of the model. If the model has changed since "
                "(tie_weights, to_empty, fully_shard), collect the parameters again"
            )
        excluded[tensor] = inventory.names[tensor][0]
    return excluded


def _require_not_excluded(
    coupled: list[VocabularyTable], excluded: dict[nn.Parameter, str], couple: str | Sequence[str]
) -> None:
    """Raise an error if a table to couple is also excluded."""
    both = [f"{table.name!r} {tuple(table.weight.shape)}" for table in coupled if table.weight in excluded]
    if both:
        raise ValueError(
            f"exclude has {', '.join(both)}, which couple={couple!r} couples. Leave vocabulary tables out of exclude; "
            "for Muon, pass hidden_matrices(model), not all two-dimensional parameters"
        )


def refuse_flattened_parameters(model: nn.Module) -> None:
    """Raise an error for FSDP1, which flattens parameters: their rows and matrices are lost."""
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if "FullyShardedDataParallel" in classes or any(is_flattened(parameter) for parameter in model.parameters()):
        raise ValueError(
            "the model is sharded by FullyShardedDataParallel (FSDP1), whose flattened parameters have no rows; "
            "use torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def _tensors(group: dict[str, Any]) -> list[nn.Parameter]:
    # torch.optim replaces the pairs in its groups by tensors, and adds "param_names".
    return [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]


def _state_bytes(group: dict[str, Any], param: nn.Parameter) -> int:
    """Bytes of the moments of a parameter, with the options of its group."""
    if not group.get("coupled"):
        return 2 * param.nbytes
    V, H = param.shape
    options: dict[str, Any] = {"betas": (0.9, 0.999), "row_exponent": 0.0, "state_dtype": None} | group
    first = V * H * (options["state_dtype"] or param.dtype).itemsize if needs_first_moment(options) else 0
    rows = V if needs_row_moments(options) else 0
    return first + (H + rows) * max(param.itemsize, 4)  # second moments are float32, or float64 for a float64 table


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
