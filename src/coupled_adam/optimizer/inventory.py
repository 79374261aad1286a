"""Inventory of a model: parameters by name, embeddings, linear layers, adapters and computed weights.

It only collects facts. `vocabulary` decides which of the tensors are vocabulary tables.

Legend: V vocabulary rows, H hidden size.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile

from torch import nn
from torch.nn.utils import parametrize

from coupled_adam.optimizer.computed_tables import (
    ComputedTable,
    adaptive_softmax,
    computed_weight,
    pointwise,
    transposed,
)

# Components that DDP, torch.compile and activation checkpointing put into parameter names.
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
POSITION_TABLES = re.compile(
    r"wpe|embed_positions|rel_pos_[hw]|"
    r"(gated_|rel(ative)?_)?pos(ition(al)?)?_(emb(ed(ding)?)?s?|bias)(_table|_vlm)?"
)
# Biases can have any number of dimensions: one row per expert, or one row per attention head.
BIASES = re.compile(r"(\w+_)?bias(_[a-z])?")
# A Linear with one of these names is a head, whatever its size: a padded head has more rows than the embedding.
HEADS = re.compile(r"lm_head|embed_out|unembed|unembedding|output_projection")
# Other layers have these names too. A head is outside the numbered layers, with at least half the embedding's rows.
PERHAPS_HEADS = re.compile(r"output|output_layer|head|to_logits|decoder|proj_out")
# Names of adapter parts in loralib, torchtune and peft.
ADAPTER_PART = re.compile(r"lora_.*")
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class Inventory:
    """The parameters of a model by name, the weights of its nn.Embedding and nn.Linear modules, and its adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        pairs = list(model.named_parameters(remove_duplicate=False))
        count = Counter(plain_name(name) for name, _ in pairs)
        self.names: dict[nn.Parameter, list[str]] = {}  # the name in named_parameters() first, then aliases
        for name, parameter in pairs:
            plain = plain_name(name)
            # State dicts are matched by name, so two tensors must not share one.
            self.names.setdefault(parameter, []).append(plain if count[plain] == 1 else name)

        self.adapters: dict[nn.Parameter, nn.Module] = {}  # with the adapted layer
        self.embeddings: dict[nn.Parameter, str] = {}  # with the name of the first module that has it
        self.linears: dict[nn.Parameter, str] = {}
        self.bags: set[nn.Parameter] = set()  # the embeddings of nn.EmbeddingBag modules
        self.others: dict[nn.Parameter, str] = {}  # matrices of modules outside torch, with the name of the matrix
        self.computed: list[ComputedTable] = []
        for name, module in self._parts():
            self._add(name, module)
        tokens = {weight: name for weight, name in self.embeddings.items() if not _is_of_positions(name)}
        has_computed = any(table.role == "input" for table in self.computed)
        self.token_embeddings = tokens if tokens or has_computed else self.embeddings
        # The path of the model, if it is an element of a list. A module with all embeddings is not a layer.
        above = (name.split(".")[:-1] for name in self.token_embeddings.values())
        shared = takewhile(lambda components: len(set(components)) == 1, zip(*above, strict=False))
        self.stem = [components[0] for components in shared]

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model itself, without parts of adapters, unused copies and adaptive softmaxes."""
        left_out: set[nn.Module] = set()
        for name, module in self.model.named_modules():
            children = module._modules
            if (base := children.get("base_layer")) is not None:  # peft
                left_out |= set(module.modules()) - set(base.modules()) - {module}
                own = set(base.parameters())
                self.adapters |= {p: base for p in module.parameters() if p not in own}
            elif ADAPTER_PART.fullmatch(name.rpartition(".")[2]):
                left_out |= set(module.modules())
                self.adapters = dict.fromkeys(module.parameters(), module) | self.adapters
            if (copied := children.get("original_module")) is not None and len(children) > 1:
                left_out |= set(copied.modules())  # peft trains the copy in modules_to_save
            if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
                left_out |= set(module.modules()) - {module}
            if module not in left_out:
                yield plain_name(name), module

    def _add(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            self.computed.append(adaptive_softmax(name, module))
        elif isinstance(module, (*LOOKUPS, nn.Linear)):
            weights = self.linears if isinstance(module, nn.Linear) else self.embeddings
            if (weight := self.weight(module)) is not None:
                weights.setdefault(weight, name)
                self.bags |= {weight} if isinstance(module, nn.EmbeddingBag) else set()
            elif not _is_of_positions(name):
                self.computed.append(computed_weight(name, module, self.names))
        elif not type(module).__module__.startswith("torch.nn.") or isinstance(
            module, nn.ParameterList | nn.ParameterDict
        ):
            for parameter in module.parameters(recurse=False):
                own_name = self.names[parameter][0]
                if parameter.ndim == 2 and parameter not in self.adapters and not _is_of_positions(own_name):
                    self.others.setdefault(parameter, own_name)

    def weight(self, module: object) -> nn.Parameter | None:
        """Return the (V, H) weight of `module` if it is a parameter of this model, else None."""
        if isinstance(module, nn.Module) and parametrize.is_parametrized(module, "weight"):
            return None  # reading the attribute would compute it
        registered = module._parameters.get("weight") if isinstance(module, nn.Module) else None
        weight = getattr(module, "weight", None) if registered is None else registered
        is_table = isinstance(weight, nn.Parameter) and weight.ndim == 2 and weight in self.names
        return weight if is_table else None

    def computed_by(self, module: object) -> ComputedTable | None:
        """Return the entry of a module whose weight is computed, or None."""
        name = next((plain_name(name) for name, part in self.model.named_modules() if part is module), None)
        return next((table for table in self.computed if table.name == name), None)

    def largest_embeddings(self) -> list[nn.Parameter]:
        """Return the largest nn.Embedding without the name of a position table, or several of equal size."""
        largest = max((weight.numel() for weight in self.token_embeddings), default=0)
        return [weight for weight in self.token_embeddings if weight.numel() == largest]

    def called_heads(self) -> dict[nn.Parameter, str]:
        """Return the Linears with the name of a head."""
        rows = [weight.shape[0] for weight in self.largest_embeddings()]
        return {
            weight: name for weight, name in self.linears.items() if self._is_called_head(name, weight.shape[0], rows)
        }

    def _is_called_head(self, name: str, outputs: int, rows: list[int]) -> bool:
        last = name.rpartition(".")[2]
        # At least half the rows: head or embedding may be padded. No upper limit: a head may predict several tokens.
        is_tall = any(2 * outputs >= count for count in rows)
        return bool(
            HEADS.fullmatch(last) or (PERHAPS_HEADS.fullmatch(last) and not self.is_in_a_layer(name) and is_tall)
        )

    def is_in_a_layer(self, name: str) -> bool:
        """Whether a module or parameter is inside a numbered layer: 'h.0.fc' is, 'heads.0' is not."""
        above = name.split(".")[:-1]
        start = len(self.stem) if above[: len(self.stem)] == self.stem else 0
        return any(component.isdecimal() for component in above[start:])

    def heads_about(self, rows: list[int]) -> dict[nn.Parameter, str]:
        """Return the Linears that, by name or size, may be heads of a vocabulary of about `rows` rows."""
        return {
            weight: name
            for weight, name in self.linears.items()
            if self._is_called_head(name, weight.shape[0], rows)
            or (not self.is_in_a_layer(name) and _may_be_head(tuple(weight.shape), rows))
        }

    def matrices_about(self, rows: list[int]) -> dict[nn.Parameter, str]:
        """Like `heads_about`, for matrices of modules outside torch."""
        return {
            weight: name
            for weight, name in self.others.items()
            if not self.is_in_a_layer(name) and _may_be_head(tuple(weight.shape), rows)
        }

    def computed_heads_about(self, rows: list[int]) -> list[ComputedTable]:
        """Like `heads_about`, for heads with a computed weight and heads without one row per token."""
        computed = [
            table
            for table in self.computed
            if table.role == "output" and not self.is_in_a_layer(table.name) and _may_be_head(table.shape, rows)
        ]
        return [*computed, *self._without_rows(rows)]

    def _without_rows(self, rows: list[int]) -> Iterator[ComputedTable]:
        """Yield heads that do not have one row per token."""
        for weight, name in self.others.items():
            if weight.shape[1] in rows and weight.shape[0] not in rows and not self.is_in_a_layer(name):
                yield transposed(name, weight)
        for name, module in self.model.named_modules():
            is_pointwise = isinstance(module, nn.Conv1d | nn.Conv2d) and set(module.kernel_size) == {1}
            if is_pointwise and module.out_channels in rows and not self.is_in_a_layer(plain_name(name)):
                yield pointwise(plain_name(name), module)

    def undecayed(self) -> set[nn.Parameter]:
        """Return the parameters without weight decay: embeddings, position tables, heads, norms and biases."""
        direct = {
            parameter
            for module in self.model.modules()
            if isinstance(module, LOOKUPS) or "Norm" in type(module).__name__
            # Direct parameters only: a PreNorm module contains the whole block that it normalizes for.
            for parameter in module.parameters(recurse=False)
        }
        positions = {
            parameter
            for parameter, names in self.names.items()
            # A network may compute the position table. Its matrices are decayed like any others.
            if parameter not in self.linears and any(map(_is_of_positions, names))
        }
        matrices = {module.weight for module in self.model.modules() if isinstance(module, nn.Linear)}
        adapters = {
            parameter
            for parameter, base in self.adapters.items()
            # A factor of an embedding is treated like the embedding, a vector (n, 1) like a bias.
            if isinstance(base, LOOKUPS) or (1 in parameter.shape and parameter not in matrices)
        }
        vectors = {parameter for parameter, names in self.names.items() if _is_vector(names[0], parameter)}
        return direct | positions | adapters | vectors | self.called_heads().keys()


def _may_be_head(shape: tuple[int, ...], rows: list[int]) -> bool:
    """Whether a matrix has about as many outputs as an embedding has rows. Either may be padded."""
    outputs, inputs = shape
    # A square matrix, such as BERT's pooler, maps hidden states to hidden states.
    return outputs in rows or (outputs != inputs and any(count <= 2 * outputs <= 4 * count for count in rows))


def _is_vector(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a bias or a vector, such as the (1, 1, H) class token of vision models."""
    last = name.rpartition(".")[2]
    # The weight of a layer with one output is still a matrix, with one row.
    is_row = last != "weight" and parameter.numel() == max(parameter.shape, default=1)
    return parameter.ndim < 2 or is_row or bool(BIASES.fullmatch(last))


def _is_of_positions(name: str) -> bool:
    return any(POSITION_TABLES.fullmatch(component) for component in name.split("."))


def plain_name(name: str) -> str:
    """Remove the components that wrappers add to a name."""
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)
