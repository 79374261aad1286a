"""Which tensors of a model are vocabulary tables: input embeddings, output heads, or both in one.

The first rule that applies decides: Hugging Face's accessors; a Linear tied to an nn.Embedding; a Linear with as many
outputs as an nn.Embedding has rows; the largest nn.Embedding. Where a rule allows two answers it is an error. Names
decide only what sizes cannot: which table is of positions, and which Linear is a head that is padded.

Legend: V vocabulary rows, H hidden size.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace

from torch import nn

# Components that DDP, torch.compile and activation checkpointing put into parameter names.
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
POSITION_TABLES = re.compile(r"wpe|pos(ition(al)?)?_emb(ed(ding)?)?s?(_table)?")
# A Linear with such a name predicts tokens, whatever its size; padded heads have more rows than the embedding.
HEADS = re.compile(r"lm_head|embed_out|unembed|unembedding|output_projection")
# Other layers have these names too: a head is one outside the numbered layers, about as tall as the embedding.
PERHAPS_HEADS = re.compile(r"output|output_layer|head|to_logits|decoder|proj_out")
# Of tables whose rows are tokens; only good enough for advice.
TOKEN_NAMES = re.compile(r"wte|.*(tok|word|vocab).*")


@dataclass(frozen=True, eq=False)
class VocabularyTable:
    """An embedding of the vocabulary, or the weight of a head that predicts it."""

    name: str
    weight: nn.Parameter  # (V, H)
    role: str  # "output", "input" or "tied"
    rule: str  # how it was found, for people


# One consistent answer to "which tables belong to the vocabulary?". A model that allows two is ambiguous.
Reading = list[VocabularyTable]


class Inventory:
    """The parameters of a model by name, and the weights of its nn.Embedding and nn.Linear modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        pairs = list(model.named_parameters(remove_duplicate=False))
        count = Counter(plain_name(name) for name, _ in pairs)
        self.names: dict[nn.Parameter, list[str]] = {}  # the name of named_parameters() first, then aliases
        for name, parameter in pairs:
            plain = plain_name(name)
            # State dicts are matched by name, so two tensors must not share one.
            self.names.setdefault(parameter, []).append(plain if count[plain] == 1 else name)
        self.embeddings = self._weights(nn.Embedding)
        self.linears = self._weights(nn.Linear)
        tokens = {weight: name for weight, name in self.embeddings.items() if not _is_of_positions(name)}
        self.token_embeddings = tokens or self.embeddings
        self.heads = {weight: name for weight, name in self.linears.items() if self._is_called_head(weight, name)}

    def _weights(self, kind: type[nn.Module]) -> dict[nn.Parameter, str]:
        weights: dict[nn.Parameter, str] = {}  # with the name of the first module that has it
        for name, module in self.model.named_modules():
            if isinstance(module, kind) and (weight := self.weight(module)) is not None:
                weights.setdefault(weight, plain_name(name))
        return weights

    def weight(self, module: object) -> nn.Parameter | None:
        """The (V, H) weight of `module`, if it is a parameter of this model."""
        weight = getattr(module, "weight", None)
        is_table = isinstance(weight, nn.Parameter) and weight.ndim == 2 and weight in self.names
        return weight if is_table else None

    def table(self, weight: nn.Parameter, role: str, rule: str) -> VocabularyTable:
        return VocabularyTable(self.names[weight][0], weight, role, rule)

    def largest_embeddings(self) -> list[nn.Parameter]:
        """The largest nn.Embedding that is not called a position table; several where they are equally large."""
        largest = max((weight.numel() for weight in self.token_embeddings), default=0)
        return [weight for weight in self.token_embeddings if weight.numel() == largest]

    def _is_called_head(self, weight: nn.Parameter, name: str) -> bool:
        *_, last = components = name.split(".")
        if HEADS.fullmatch(last):
            return True
        is_in_a_layer = any(component.isdecimal() for component in components)
        # Half as many rows: either of the two may be padded.
        is_tall = any(2 * weight.shape[0] >= embedding.shape[0] for embedding in self.largest_embeddings())
        return bool(PERHAPS_HEADS.fullmatch(last)) and not is_in_a_layer and is_tall

    def undecayed(self) -> set[nn.Parameter]:
        """Position and other tables, heads, norms, biases."""
        direct = {
            parameter
            for module in self.model.modules()
            if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
            # Not what is nested deeper: a PreNorm module holds the whole block it normalizes for.
            for parameter in module.parameters(recurse=False)
        }
        positions = {
            parameter
            for parameter, names in self.names.items()
            # Position tables may be computed by a network, whose matrices are as any others.
            if parameter not in self.linears and any(map(_is_of_positions, names))
        }
        return direct | positions | self.heads.keys() | {parameter for parameter in self.names if parameter.ndim < 2}


def _is_of_positions(name: str) -> bool:
    return any(POSITION_TABLES.fullmatch(component) for component in name.split("."))


def plain_name(name: str) -> str:
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)


def find_readings(inventory: Inventory) -> list[Reading]:
    """All readings that the first applicable rule allows; none for a model without nn.Embedding."""
    certain = _from_accessors(inventory) or _from_tied_linears(inventory)
    if certain:
        return [_with_further_heads(reading, inventory) for reading in certain]
    return _from_equal_rows(inventory) or _from_largest_embedding(inventory)


def _with_further_heads(reading: Reading, inventory: Inventory) -> Reading:
    """Add the heads beside the main one, as in multi-token prediction: called so, and with V outputs."""
    V = reading[0].weight.shape[0]
    known = {table.weight for table in reading}
    return reading + [
        inventory.table(
            weight, "output", f"Linear {module!r}, a head with as many outputs as {reading[0].name!r} has rows"
        )
        for weight, module in inventory.linears.items()
        if weight not in known and weight.shape[0] == V and "head" in module
    ]


def _from_accessors(inventory: Inventory) -> list[Reading]:
    model = inventory.model
    while len(children := dict(model.named_children())) == 1 and WRAPPERS.issuperset(children):
        (model,) = children.values()
    weight = inventory.weight(_accessed(model, "get_input_embeddings"))
    if weight is None:
        return []
    source = inventory.table(weight, "input", "Hugging Face get_input_embeddings()")
    head_module = _accessed(model, "get_output_embeddings")
    head = inventory.weight(head_module)
    if head is not None:
        output = inventory.table(head, "output", "Hugging Face get_output_embeddings()")
        return [[replace(output, role="tied")] if head is weight else [output, source]]
    # Transformers knows heads called `lm_head` only: None means headless unless a Linear looks like a head.
    looks_like_head = any(linear.shape[0] == weight.shape[0] for linear in inventory.linears) or inventory.heads
    if head_module is None and not looks_like_head:
        return [[replace(source, role="tied")]]
    return []


def _accessed(model: nn.Module, accessor_name: str) -> object:
    accessor = getattr(model, accessor_name, None)
    try:
        return accessor() if callable(accessor) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # TypeError: no Hugging Face accessor but a look-up that wants token ids


def _from_tied_linears(inventory: Inventory) -> list[Reading]:
    readings: dict[int, Reading] = {}  # by V
    for weight, module in inventory.embeddings.items():
        if weight in inventory.linears:
            tied = inventory.table(weight, "tied", f"Linear tied to nn.Embedding {module!r}")
            readings.setdefault(weight.shape[0], []).append(tied)
    for weight in inventory.token_embeddings:
        if weight not in inventory.linears and (reading := readings.get(weight.shape[0])):
            rule = f"nn.Embedding with as many rows as {reading[0].name!r}"
            reading.append(inventory.table(weight, "input", rule))
    return list(readings.values())


def _from_equal_rows(inventory: Inventory) -> list[Reading]:
    readings = []
    for head, head_module in inventory.linears.items():
        alike = {w: module for w, module in inventory.embeddings.items() if w.shape[0] == head.shape[0]}
        # With as many positions as tokens the position table has that size as well.
        inputs = {w: module for w, module in alike.items() if w in inventory.token_embeddings} or alike
        if inputs:
            first = next(iter(inputs.values()))
            output_rule = f"Linear with as many outputs as nn.Embedding {first!r} has rows"
            input_rule = f"nn.Embedding with as many rows as Linear {head_module!r} has outputs"
            reading = [inventory.table(weight, "input", input_rule) for weight in inputs]
            readings.append([inventory.table(head, "output", output_rule), *reading])
    # A classifier of two classes beside a table of two token types is no vocabulary: the largest table must be in it.
    found = {table.weight for reading in readings for table in reading}
    largest = _largest_embeddings(inventory)
    if readings and not any(table.weight in found for (table,) in largest):
        readings = largest + readings
    return readings


def _from_largest_embedding(inventory: Inventory) -> list[Reading]:
    readings = _largest_embeddings(inventory)
    # Coupling the embedding alone would silently leave a padded head to AdamW.
    heads = [[inventory.table(w, "output", f"Linear {module!r}")] for w, module in inventory.heads.items()]
    return readings + heads if readings else []


def _largest_embeddings(inventory: Inventory) -> list[Reading]:
    rule = "only nn.Embedding" if len(inventory.embeddings) == 1 else "largest nn.Embedding"
    return [[inventory.table(weight, "tied", rule)] for weight in inventory.largest_embeddings()]


def only_reading(readings: list[Reading]) -> Reading:
    if not readings:
        raise ValueError(
            "no vocabulary table found: the model has no nn.Embedding; name the tables with "
            "couple=[patterns], or give the optimizer a group marked coupled=True"
        )
    if len(readings) > 1:
        candidates = "; ".join(dict.fromkeys(_description(reading) for reading in readings))
        raise ValueError(
            f"the vocabulary table is ambiguous, candidates are {candidates}; name the tables to couple with "
            f"couple=[patterns], for example couple=[{_likeliest(readings)[0].name!r}]"
        )
    return readings[0]


def _likeliest(readings: list[Reading]) -> Reading:
    """The last of the readings in which a table has the name of a head or of an embedding of tokens, if any has."""

    def sounds_right(reading: Reading) -> bool:
        modules = [table.name.removesuffix(".weight").split(".") for table in reading]
        has_head = any(HEADS.fullmatch(last) or PERHAPS_HEADS.fullmatch(last) for *_, last in modules)
        return has_head or any(TOKEN_NAMES.fullmatch(component) for module in modules for component in module)

    return max(reversed(readings), key=sounds_right)


def _description(reading: Reading) -> str:
    # Layers repeat: 'h.*.fc.weight' stands for all of them, and is a pattern that can be pasted.
    patterns = [re.sub(r"(?<=\.)\d+(?=\.)", "*", table.name) for table in reading]
    parts = [f"{name!r} {tuple(table.weight.shape)}" for name, table in zip(patterns, reading, strict=True)]
    return " with ".join(dict.fromkeys(parts))
