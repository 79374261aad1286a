"""Find the parameters of a model that Muon is for, and check that Muon has no others.

Muon orthogonalizes its updates, which suits the matrices between hidden states. Such a matrix is the weight of a linear
layer inside the layers of the model. Two dimensions alone are not enough: vocabulary tables, heads and position tables
have them too.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from coupled_adam.optimizer.groups import aligned, refuse_flattened_parameters
from coupled_adam.optimizer.inventory import Inventory, plain_name
from coupled_adam.optimizer.vocabulary import find_candidates, possible_tables, with_stars

# Layers of other libraries that multiply by a 2-D `weight`: transformers' Conv1D, Transformer Engine's Linear, ...
LINEAR_CLASS = re.compile(r".*Linear|Conv1D")
ATTENTION_MATRICES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# A router has one row per expert. Gates of MLPs share these names, but have at least as many outputs as inputs.
ROUTERS = re.compile(r"gate|gating|router|wg")

TABLE = "vocabulary table or head"
EMBEDDING = "embedding"
UNDECAYED = "position table, norm or bias"
# Never for Muon. A matrix left out for another reason may go to Muon if the user passes it.
NEVER = (TABLE, EMBEDDING, UNDECAYED)


class HiddenMatrices(list[tuple[str, nn.Parameter]]):
    """(name, matrix) pairs for Muon. `print(matrices)` shows what was left out and why."""

    def __init__(
        self, pairs: Iterable[tuple[str, nn.Parameter]], left_out: dict[str, tuple[nn.Parameter, str]]
    ) -> None:
        super().__init__(pairs)
        self.left_out = left_out

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Format the matrices, then the left-out tensors with two or more dimensions and the reasons, as plain text."""
        rows: list[tuple[str, ...]] = [("hidden matrix", "shape", "count")]
        rows += _counted((name, str(tuple(tensor.shape))) for name, tensor in self)
        other_rows: list[tuple[str, ...]] = [("not for Muon", "shape", "count", "because it is")]
        other_rows += _counted(
            (name, str(tuple(tensor.shape)), reason)
            for name, (tensor, reason) in self.left_out.items()
            if tensor.ndim > 1
        )
        return f"{aligned(rows)}\n\n{aligned(other_rows)}"


def hidden_matrices(model: nn.Module) -> HiddenMatrices:
    """Find the parameters of `model` that Muon is for: `torch.optim.Muon(hidden_matrices(model), ...)`.

    These are the trainable 2-D weights of linear layers: nn.Linear, transformers' Conv1D, other classes called
    `...Linear`, and the projections of nn.MultiheadAttention. Vocabulary tables, heads, all other embeddings, position
    tables, norms, adapters such as LoRA's, routers of experts, and matrices of one row or column are left out. In a
    model with numbered layers (`h.0`, `layers.1`), so are linear layers outside of them: projections of inputs, poolers
    and classifiers.

    Args:
        model: the model. It may be wrapped by DDP or torch.compile, or sharded by fully_shard.

    Returns:
        A list of (name, parameter) pairs in the order of the model. Print it to see what was left out and why.

    Raises:
        ValueError: if there is no such matrix.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32)
        >>> model = nn.ModuleDict({"wte": nn.Embedding(99, 16), "h": nn.ModuleList([layer]), "head": nn.Linear(16, 99)})
        >>> [name for name, _ in hidden_matrices(model)][1:]
        ['h.0.self_attn.out_proj.weight', 'h.0.linear1.weight', 'h.0.linear2.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass the torch.nn.Module to train")
    refuse_flattened_parameters(model)
    inventory = Inventory(model)
    linears = dict(_linear_weights(inventory))
    reasons = _reasons(inventory, linears)
    is_layered = any(reasons[p] is None and p.requires_grad and inventory.is_in_a_layer(linears[p]) for p in linears)

    matrices, left_out = [], {}
    for parameter, (name, *_) in inventory.names.items():
        reason = reasons[parameter]
        if reason is None and is_layered and not inventory.is_in_a_layer(linears[parameter]):
            reason = "outside the numbered layers"
        if parameter.requires_grad and reason is None:
            matrices.append((name, parameter))
        elif parameter.requires_grad:
            left_out[name] = (parameter, reason or "")
    found = HiddenMatrices(matrices, left_out)
    if not matrices:
        raise ValueError(
            f"{type(model).__name__} has no hidden matrix for Muon: no trainable 2-D weight of a linear layer other "
            f"than vocabulary tables and heads. Use another optimizer. Parameters of the model:\n{found}"
        )
    return found


def check_muon(model: nn.Module, muon: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
    """Raise a ValueError if Muon has parameters that it is not for.

    Args:
        model: the model to train.
        muon: any optimizer that orthogonalizes. It must not have vocabulary tables, heads, embeddings, position tables
            or norms, nor tensors that are not parameters of the model.
        others: the optimizers of all other parameters. If given, each trainable parameter must be in exactly one
            optimizer.

    Example:
        >>> model = nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 99))
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]  # not hidden_matrices(model)
        >>> check_muon(model, torch.optim.Muon(matrices))
        Traceback (most recent call last):
        ValueError: Muon has '0.weight' (99, 16): vocabulary table or head; '3.weight' (99, 16): vocabulary table or \
head. Give it hidden_matrices(model), and the others to CoupledAdamW(model, exclude=hidden_matrices(model))
    """
    inventory = Inventory(model)
    reasons = _reasons(inventory, dict(_linear_weights(inventory)))
    title = type(muon).__name__
    wrong = []
    for parameter in _parameters(muon):
        if parameter not in inventory.names:
            raise ValueError(
                f"{title} has a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model. If the "
                "model has changed since (tie_weights, to_empty, fully_shard), build the optimizer after the change"
            )
        if reasons[parameter] in NEVER:
            wrong.append(f"{inventory.names[parameter][0]!r} {tuple(parameter.shape)}: {reasons[parameter]}")
    if wrong:
        raise ValueError(
            f"{title} has {'; '.join(wrong)}. Give it hidden_matrices(model), and the others to "
            "CoupledAdamW(model, exclude=hidden_matrices(model))"
        )
    if others:
        _check_each_is_in_one(inventory, (muon, *others))


def _counted(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge rows that differ only in the layer number, and put their count into the third column."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *others in rows:
        alike.setdefault((with_stars(name), *others), []).append(name)
    return [
        (names[0] if len(names) == 1 else starred, shape, f"{len(names)}", *reason)
        for (starred, shape, *reason), names in alike.items()
    ]


def _check_each_is_in_one(inventory: Inventory, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    count = Counter(parameter for optimizer in optimizers for parameter in _parameters(optimizer))
    for parameter, (name, *_) in inventory.names.items():
        if count[parameter] > 1:
            raise ValueError(
                f"{name!r} is in {count[parameter]} optimizers, and each would update it; keep it in one: "
                "CoupledAdamW(model, exclude=hidden_matrices(model))"
            )
        if parameter.requires_grad and not count[parameter]:
            raise ValueError(
                f"{name!r} {tuple(parameter.shape)} requires a gradient but is in no optimizer; add it to one, or "
                "freeze it with requires_grad=False"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _linear_weights(inventory: Inventory) -> Iterator[tuple[nn.Parameter, str]]:
    """Yield the weight matrices of linear layers, with the name of the layer."""
    for name, module in inventory.model.named_modules():
        if any(LINEAR_CLASS.fullmatch(cls.__name__) for cls in type(module).__mro__):
            own: tuple[str, ...] = ("weight",)
        elif isinstance(module, nn.MultiheadAttention):
            own = ATTENTION_MATRICES
        else:
            continue
        for attribute in own:
            weight = module._parameters.get(attribute)
            if weight is not None and weight.ndim == 2:
                yield weight, plain_name(name)


def _reasons(inventory: Inventory, linears: dict[nn.Parameter, str]) -> dict[nn.Parameter, str | None]:
    """Return why each parameter is not for Muon. None if it is, provided it is inside a layer."""
    tables = possible_tables(find_candidates(inventory), inventory) | inventory.called_heads().keys()
    undecayed = inventory.undecayed()

    def reason(parameter: nn.Parameter) -> str | None:
        if parameter in tables:
            return TABLE
        if parameter in inventory.embeddings:
            return EMBEDDING
        if parameter.ndim != 2:
            return "not a matrix"
        if parameter in inventory.adapters:
            return "part of an adapter"
        if parameter in undecayed:
            return UNDECAYED
        if parameter not in linears:
            return "not the weight of a linear layer"
        if 1 in parameter.shape:
            return "a single row or column"
        is_called_router = any(map(ROUTERS.fullmatch, linears[parameter].split(".")[-2:]))
        if is_called_router and parameter.shape[0] < parameter.shape[1]:
            return "a router of experts"
        return None

    return {parameter: reason(parameter) for parameter in inventory.names}
