"""Embeddings and heads without their own (V, H) parameter, and the remedy for each.

Coupling averages over the rows of one parameter, so these cannot be coupled as they are. Ignoring them would be wrong
too: another table would then look like the only one.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.utils import parametrize


@dataclass(frozen=True, eq=False)
class ComputedTable:
    """An embedding or a head without its own (V, H) parameter."""

    name: str  # of the module
    shape: tuple[int, int]  # (V, H)
    role: str  # "output" or "input"
    how: str  # reason, for messages
    remedy: str
    sources: tuple[nn.Parameter, ...]  # parameters it is computed from


def computed_weight(
    name: str, module: nn.Linear | nn.Embedding | nn.EmbeddingBag, names: Mapping[nn.Parameter, list[str]]
) -> ComputedTable:
    """Describe a module whose `weight` is not a parameter, such as those of torch.nn.utils.

    Args:
        name: name of the module.
        module: the module.
        names: names of the parameters of the model.
    """
    if isinstance(module, nn.Linear):
        role, shape = "output", (module.out_features, module.in_features)
    else:
        role, shape = "input", (module.num_embeddings, module.embedding_dim)
    sources = _sources(module)
    source_names = [names[source][0] for source in sources]
    if not sources:
        remedy = f"make the weight of module {name!r} an nn.Parameter"
        return ComputedTable(name, shape, role, "its weight is not a parameter", remedy, sources)
    how = f"its weight is computed from {', '.join(map(repr, source_names))}"
    remedy = f"call {_undoing(module)} for module {name!r}"
    # A single source of the same shape has one row per token. weight_norm has two, length and direction: no table.
    if len(sources) == 1 and tuple(sources[0].shape) == shape:
        remedy = f"couple that tensor, which has one row per token, with couple=[{source_names[0]!r}], or {remedy}"
    return ComputedTable(name, shape, role, how, remedy, sources)


def _sources(module: nn.Module) -> tuple[nn.Parameter, ...]:
    if parametrize.is_parametrized(module, "weight"):
        parametrizations = cast(nn.ModuleDict, module.parametrizations)
        return tuple(parametrizations["weight"].parameters(recurse=False))
    # weight_orig of pruning and of the older spectral_norm, weight_g and weight_v of the older weight_norm
    return tuple(p for key, p in module._parameters.items() if key.startswith("weight_") and p is not None)


def _undoing(module: nn.Module) -> str:
    hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()}
    if "weight_mask" in module._buffers:
        return "torch.nn.utils.prune.remove(module, 'weight')"
    if "WeightNorm" in hooks:
        return "torch.nn.utils.remove_weight_norm(module)"
    if "SpectralNorm" in hooks:
        return "torch.nn.utils.remove_spectral_norm(module)"
    return "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"


def adaptive_softmax(name: str, module: nn.AdaptiveLogSoftmaxWithLoss) -> ComputedTable:
    """Describe a head in several pieces."""
    how = "it is an nn.AdaptiveLogSoftmaxWithLoss, which splits the vocabulary into clusters of different widths"
    shape = (module.n_classes, module.in_features)
    return ComputedTable(name, shape, "output", how, "use one nn.Linear as the head", tuple(module.parameters()))


def transposed(name: str, weight: nn.Parameter) -> ComputedTable:
    """Describe a head stored as (H, V), as in `x @ W_U` and transformers' Conv1D."""
    H, V = weight.shape
    how = f"its shape is {(H, V)}: the tokens are in its columns"
    return ComputedTable(name, (V, H), "output", how, "store it as (V, H), one row per token", (weight,))


def pointwise(name: str, module: nn.Conv1d | nn.Conv2d) -> ComputedTable:
    """Describe a head that is a convolution of width 1."""
    how = f"it is an nn.{type(module).__name__}, whose weight has shape {tuple(module.weight.shape)}"
    shape = (module.out_channels, module.in_channels)
    sources = (cast(nn.Parameter, module.weight),)
    return ComputedTable(name, shape, "output", how, "use an nn.Linear, whose weight is (V, H)", sources)
