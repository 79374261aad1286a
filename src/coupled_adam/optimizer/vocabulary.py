"""Find the vocabulary tables of a model: input embeddings, output heads, or both in one.

The first rule that applies decides: Hugging Face's accessors; a Linear tied to an nn.Embedding; a Linear with as many
outputs as an nn.Embedding has rows; the only nn.Embedding of a model without anything like a head. If a rule allows two
answers, the error lists them. Names decide only what sizes cannot: which tables hold positions, and which Linear of
another size is a head.

Legend: V vocabulary rows, H hidden size.
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from coupled_adam.optimizer.computed_tables import ComputedTable
from coupled_adam.optimizer.inventory import HEADS, PERHAPS_HEADS, WRAPPERS, Inventory

# Names of tables whose rows are tokens; used only for advice in messages.
TOKEN_NAMES = re.compile(r"wte|.*(tok|word|vocab).*")


@dataclass(frozen=True, eq=False)
class VocabularyTable:
    """An embedding of the vocabulary, or the weight of a head that predicts it."""

    name: str
    weight: nn.Parameter  # (V, H)
    role: str  # "output", "input" or "tied"
    rule: str  # how it was found, for messages


@dataclass(frozen=True, eq=False)
class VocabularyCandidate:
    """One consistent set of vocabulary tables. A model with two candidates is ambiguous."""

    tables: list[VocabularyTable]
    computed: list[ComputedTable] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return [table.weight.shape[0] for table in self.tables] + [table.shape[0] for table in self.computed]


def find_candidates(inventory: Inventory) -> list[VocabularyCandidate]:
    """Return all candidates of the first rule that applies; none for a model without nn.Embedding."""
    if accessed := _from_accessors(inventory):
        # Besides its head, such a model may have other projections, for example of images, with other widths.
        heads = [table for candidate in accessed for table in candidate.tables if table.role != "input"]
        widths = {table.weight.shape[1] for table in heads} or None
        return [_with_all_tables(candidate, inventory, widths) for candidate in accessed]
    if tied := _from_tied_linears(inventory):
        return [_with_all_tables(candidate, inventory) for candidate in tied]
    return _from_equal_rows(inventory) or _from_embeddings_alone(inventory)


def possible_tables(candidates: list[VocabularyCandidate], inventory: Inventory) -> set[nn.Parameter]:
    """Return every possible table and head, over all candidates. Layers inside the model are neither."""
    tables = {table.weight for candidate in candidates for table in candidate.tables}
    sources = {source for candidate in candidates for table in candidate.computed for source in table.sources}
    return sources | {
        w for w in tables if w not in inventory.linears or not inventory.is_in_a_layer(inventory.linears[w])
    }


def _table(inventory: Inventory, weight: nn.Parameter, role: str, rule: str) -> VocabularyTable:
    return VocabularyTable(inventory.names[weight][0], weight, role, rule)


def _with_all_tables(
    candidate: VocabularyCandidate, inventory: Inventory, widths: Container[int] | None = None
) -> VocabularyCandidate:
    """Add everything with as many rows: encoder and value embeddings, multi-token heads, computed weights.

    Args:
        candidate: the tables known so far.
        inventory: the model.
        widths: allowed input widths of a head without "head" in its name; None means any.
    """
    rows = set(candidate.rows)
    known = {table.weight for table in candidate.tables}
    like = repr(candidate.tables[0].name) if candidate.tables else repr(candidate.computed[0].name)
    heads = [
        _table(inventory, weight, "output", f"Linear {module!r}, a head with as many outputs as {like} has rows")
        for weight, module in inventory.linears.items()
        if weight not in known
        and weight.shape[0] in rows
        and _is_further_head(module, weight, inventory)
        and (widths is None or "head" in module or weight.shape[1] in widths)
    ]
    embeddings = [
        _table(inventory, weight, "input", f"nn.Embedding with as many rows as {like}")
        for weight in inventory.token_embeddings
        if weight not in known and weight.shape[0] in rows
    ]
    computed = [
        table
        for table in inventory.computed
        if table not in candidate.computed and table.shape[0] in rows and not inventory.is_in_a_layer(table.name)
    ]
    return VocabularyCandidate(candidate.tables + heads + embeddings, candidate.computed + computed)


def _is_further_head(module: str, weight: nn.Parameter, inventory: Inventory) -> bool:
    if "head" in module:
        # With V = H, the Linear between last layer and decoder of RoBERTa and ModernBERT has the size of a head.
        return not (_is_square(weight) and module.endswith(".dense"))
    return not inventory.is_in_a_layer(module) and not _is_square(weight)


def _is_square(weight: nn.Parameter) -> bool:
    """Whether a Linear is square. With V = H, that is usually not a head, but for example BERT's pooler."""
    return weight.shape[0] == weight.shape[1]


def _from_accessors(inventory: Inventory) -> list[VocabularyCandidate]:
    model = _hugging_face_model(inventory)
    source_module, head_module = (
        _without_adapter(_accessed(model, f"get_{kind}_embeddings")) for kind in ("input", "output")
    )
    source, computed_source = inventory.weight(source_module), inventory.computed_by(source_module)
    if source is None and computed_source is None:
        return []
    head, computed_head = inventory.weight(head_module), inventory.computed_by(head_module)
    computed = [table for table in (computed_head, computed_source) if table is not None]
    inputs = []  # empty if the embedding is computed
    if source is not None:
        inputs.append(_table(inventory, source, "input", "Hugging Face get_input_embeddings()"))
    if head is not None:
        # Encoder and decoder may have different vocabularies. The decoder's embedding can then be tied to the head.
        role = "tied" if head is source or head in inventory.embeddings else "output"
        output = _table(inventory, head, role, "Hugging Face get_output_embeddings()")
        return [VocabularyCandidate([output] if head is source else [output, *inputs], computed)]
    if computed_head is not None:
        return [VocabularyCandidate(inputs, computed)]
    if head_module is not None:
        return []  # the accessor returns something else, such as a list of heads
    return _from_input_accessor(VocabularyCandidate(inputs, computed), inventory)


def _from_input_accessor(inputs: VocabularyCandidate, inventory: Inventory) -> list[VocabularyCandidate]:
    """Look for a head of the right size: transformers only knows heads called `lm_head`."""
    rows = inputs.rows
    if any(weight in inventory.linears for weight in (table.weight for table in inputs.tables)):
        return []  # tied: the next rule finds it
    exact = {
        weight: module
        for weight, module in inventory.linears.items()
        if weight.shape[0] in rows and _is_further_head(module, weight, inventory)
    }
    if exact:
        rule = "Linear with as many outputs as get_input_embeddings() has rows"
        heads = [_table(inventory, weight, "output", rule) for weight in exact]
        return [replace(inputs, tables=heads + inputs.tables)]
    if computed := inventory.computed_heads_about(rows):
        return [replace(inputs, computed=inputs.computed + computed)]
    padded = [
        VocabularyCandidate([_table(inventory, weight, "output", f"Linear {module!r}")])
        for weight, module in inventory.heads_about(rows).items()
    ]
    return [inputs, *padded]


def _hugging_face_model(inventory: Inventory) -> nn.Module:
    """Return the module with the accessors: the model, or the only submodule that has them and all embeddings."""
    model = inventory.model
    while len(children := dict(model.named_children())) == 1 and WRAPPERS.issuperset(children):
        (model,) = children.values()
    if _has_accessors(model):
        return model
    outermost: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and _has_accessors(module):
            outermost.append(module)
            inside |= set(module.modules())
    if len(outermost) == 1 and set(outermost[0].parameters()).issuperset(inventory.embeddings):
        return outermost[0]
    return model


def _has_accessors(module: nn.Module) -> bool:
    return callable(getattr(module, "get_input_embeddings", None))


def _accessed(model: nn.Module, accessor_name: str) -> object:
    accessor = getattr(model, accessor_name, None)
    try:
        return accessor() if callable(accessor) else None
    except (NotImplementedError, AttributeError, TypeError):
        return None  # TypeError: not Hugging Face's accessor, but a lookup that takes token ids


def _without_adapter(module: object) -> object:
    """Unwrap peft's adapters. If peft trains a copy of the layer, its wrapper already has the weight of the copy."""
    while isinstance(module, nn.Module):
        inner = module._modules.get("token_adapter") or module._modules.get("base_layer")
        if inner is None:
            break
        module = inner
    return module


def _from_tied_linears(inventory: Inventory) -> list[VocabularyCandidate]:
    candidates: dict[int, VocabularyCandidate] = {}  # by V
    for weight, module in inventory.embeddings.items():
        if weight in inventory.linears:
            tied = _table(inventory, weight, "tied", f"Linear tied to nn.Embedding {module!r}")
            candidates.setdefault(weight.shape[0], VocabularyCandidate([])).tables.append(tied)
    return list(candidates.values())


def _from_equal_rows(inventory: Inventory) -> list[VocabularyCandidate]:
    candidates = []
    for weight, module in inventory.linears.items():
        inputs = _inputs_with(weight.shape[0], module, inventory)
        if inputs.rows:
            first = (inputs.tables or inputs.computed)[0].name.removesuffix(".weight")
            rule = f"Linear with as many outputs as nn.Embedding {first!r} has rows"
            candidates.append(replace(inputs, tables=[_table(inventory, weight, "output", rule), *inputs.tables]))
    for head in inventory.computed:
        inputs = _inputs_with(head.shape[0], head.name, inventory)
        if head.role == "output" and inputs.rows and not inventory.is_in_a_layer(head.name):
            candidates.append(replace(inputs, computed=[head, *inputs.computed]))
    # A classifier of two classes and a table of two token types are no vocabulary: it must include the largest table.
    # And a layer may by chance have as many outputs as there are tokens: one head must be outside the layers.
    largest = inventory.largest_embeddings()
    found = {table.weight for candidate in candidates for table in candidate.tables}
    has_largest = not largest or bool(found.intersection(largest))
    if candidates and not (has_largest and any(_has_outer_head(candidate, inventory) for candidate in candidates)):
        rule = "largest nn.Embedding"
        candidates = [VocabularyCandidate([_table(inventory, weight, "tied", rule)]) for weight in largest] + candidates
    return candidates


def _inputs_with(rows: int, head: str, inventory: Inventory) -> VocabularyCandidate:
    """Return the embeddings with as many rows as a head."""
    alike = [weight for weight in inventory.embeddings if weight.shape[0] == rows]
    computed = [table for table in inventory.computed if table.role == "input" and table.shape[0] == rows]
    # With as many positions as tokens, the position table has that size too.
    tokens = [weight for weight in alike if weight in inventory.token_embeddings]
    rule = f"nn.Embedding with as many rows as Linear {head!r} has outputs"
    inputs = tokens or ([] if computed else alike)
    return VocabularyCandidate([_table(inventory, weight, "input", rule) for weight in inputs], computed)


def _has_outer_head(candidate: VocabularyCandidate, inventory: Inventory) -> bool:
    heads = [inventory.linears[table.weight] for table in candidate.tables if table.weight in inventory.linears]
    heads += [table.name for table in candidate.computed if table.role == "output"]
    return any(not inventory.is_in_a_layer(head) for head in heads)


def _from_embeddings_alone(inventory: Inventory) -> list[VocabularyCandidate]:
    """Find the tables without a head of the right size. Only a single embedding and nothing like a head is clear."""
    computed = [table for table in inventory.computed if table.role == "input"]
    rows = [weight.shape[0] for weight in inventory.token_embeddings] + [table.shape[0] for table in computed]
    if not rows:
        return []
    is_hugging_face = callable(getattr(_hugging_face_model(inventory), "get_output_embeddings", None))
    # Coupling the embedding alone would silently leave a head of another size to AdamW.
    heads = {weight: f"Linear {module!r}" for weight, module in inventory.heads_about(rows).items()}
    if not is_hugging_face:  # Hugging Face models have many kinds of parameters, but their heads are Linears
        heads |= {weight: f"parameter {name!r}" for weight, name in inventory.matrices_about(rows).items()}
    computed = inventory.computed_heads_about(rows) + computed

    others = " besides position tables" if len(inventory.embeddings) > len(inventory.token_embeddings) else ""
    rule = f"only nn.Embedding{others}"
    if computed or is_hugging_face or inventory.bags:  # an nn.EmbeddingBag sums up a text for classification
        inputs = [_table(inventory, weight, "input", rule) for weight in inventory.token_embeddings]
    else:
        rule += "; no head module, so the model's code may use it as the head"
        inputs = [_table(inventory, weight, "tied", rule) for weight in inventory.token_embeddings]
    if len(rows) == 1 and not heads:
        return [VocabularyCandidate(inputs, computed)]
    alone = [VocabularyCandidate([table]) for table in inputs] + [
        VocabularyCandidate([], [table]) for table in computed
    ]
    return alone + [VocabularyCandidate([_table(inventory, weight, "output", rule)]) for weight, rule in heads.items()]


def only_candidate(candidates: list[VocabularyCandidate]) -> VocabularyCandidate:
    """Return the only candidate, or raise an error if there are none or several."""
    if not candidates:
        raise ValueError(
            "no vocabulary table found: the model has no nn.Embedding; name the tables with "
            "couple=[patterns], or pass a group marked coupled=True to the optimizer"
        )
    if len(candidates) > 1:
        listed = "; ".join(dict.fromkeys(_description(candidate) for candidate in candidates))
        advice = _likeliest(candidates)
        example = f", for example couple=[{advice!r}]" if advice else ""
        raise ValueError(
            f"the vocabulary table is ambiguous, candidates are {listed}; name the tables to couple with "
            f"couple=[patterns]{example}. An AdamW baseline with the same groups is "
            "torch.optim.AdamW(param_groups(model, couple=[patterns]))"
        )
    return candidates[0]


def _likeliest(candidates: Iterable[VocabularyCandidate]) -> str:
    """Choose the table to suggest: the last one named like a head or a token embedding. Never suggests a pooler."""

    def sounds_right(tables: list[VocabularyTable]) -> bool:
        if [table.role for table in tables] == ["output"]:
            return True  # a head whose size differs from the embedding
        modules = [table.name.removesuffix(".weight").split(".") for table in tables]
        return any(_names_a_head(table) for table in tables) or any(
            TOKEN_NAMES.fullmatch(component) for module in modules for component in module
        )

    tables = [
        candidate.tables for candidate in candidates if candidate.tables and not _may_be_pooler(candidate.tables[0])
    ]
    return with_stars(max(reversed(tables), key=sounds_right)[0].name) if tables else ""


def _may_be_pooler(table: VocabularyTable) -> bool:
    return table.role == "output" and _is_square(table.weight) and not _names_a_head(table)


def _names_a_head(table: VocabularyTable) -> bool:
    last = table.name.removesuffix(".weight").rpartition(".")[2]
    return "head" in last or bool(HEADS.fullmatch(last) or PERHAPS_HEADS.fullmatch(last))


def with_stars(name: str) -> str:
    """Replace layer numbers by '*': the pattern 'h.*.fc.weight' matches all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _description(candidate: VocabularyCandidate) -> str:
    parts = [f"{with_stars(table.name)!r} {tuple(table.weight.shape)}" for table in candidate.tables]
    parts += [f"{table.name!r} {table.shape}, which cannot be coupled: {table.how}" for table in candidate.computed]
    return " with ".join(dict.fromkeys(parts))
