"""The results of a study in the order in which the report shows them.

A *size* is one dataset size D with one model size N; a *variant* is one optimizer of the study. One size and one
variant make a cell, whose runs differ in the seed alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coupled_adam.base.text import short
from coupled_adam.report.significance import Comparison, compare
from coupled_adam.study.metrics import INPUT_PREFIX, METRICS, TASK_LIMIT
from coupled_adam.study.results import Result

Role = Literal["standard", "coupled", "scaled", "sgd"]
NAMES = {"standard": "standard Adam", "coupled": "Coupled Adam"}
FAMILIES: dict[Role, int] = {"standard": 0, "coupled": 1, "scaled": 1, "sgd": 2}
COUPLED_TABLES = ("output", "input", "all")


@dataclass(frozen=True, order=True)
class Size:
    """Dataset size D and model size N."""

    tokens: int
    parameters: int
    model: str

    @property
    def label(self) -> str:
        """In a few characters, for headings."""
        return f"N = {self.model}, D = {short(self.tokens)}"


@dataclass(frozen=True)
class Variant:
    """One optimizer of the study."""

    name: str
    role: Role
    settings: Mapping[str, Any] = field(compare=False)

    @property
    def n(self) -> float:
        """Scale exponent n of the coupled second moment; 0 is Coupled Adam itself."""
        return float(self.settings.get("scale_exponent") or 0.0)

    @property
    def f(self) -> float | None:
        """SGD's factor of the learning rate."""
        factor = self.settings.get("sgd_factor")
        return None if factor is None else float(factor)

    @property
    def label(self) -> str:
        """As the report calls it: the name in the study, with Adam where it is one of the two of the paper."""
        return NAMES[self.name] if self.name in NAMES and self.name == self.role else self.name


def role_of(settings: Mapping[str, Any]) -> Role:
    """What an [optimizer] section stands for.

    Example:
        >>> role_of({"embeddings": "coupled", "scale_exponent": 0.0}), role_of({"embeddings": "adamw"})
        ('coupled', 'standard')
    """
    embeddings = settings.get("embeddings", "coupled")
    if embeddings == "adamw":
        return "standard"
    if embeddings == "sgd":
        return "sgd"
    return "scaled" if settings.get("scale_exponent") else "coupled"


def optimizer_order(name: str, settings: Mapping[str, Any]) -> tuple[int, float, float, bool, bool, int, bool]:
    """To sort optimizers by: standard, then coupled by n, then SGD by f. Of one kind the plain one first, then what is
    centred, then what is untied, by the table that is coupled: the pair that a report is about is the same whatever the
    order of the folders it is made of.

    Example:
        >>> names = {"untied": {"tied": False}, "centred": {"centre": True}, "standard": {}}
        >>> sorted(names, key=lambda name: optimizer_order(name, {"embeddings": "adamw", **names[name]}))
        ['standard', 'centred', 'untied']
    """
    role = role_of(settings)
    couple = settings.get("couple") or COUPLED_TABLES[0]
    return (
        FAMILIES[role],
        float(settings.get("scale_exponent") or 0.0),
        float(settings.get("sgd_factor") or 0.0),
        not settings.get("tied", True),
        bool(settings.get("centre")),
        COUPLED_TABLES.index(couple) if couple in COUPLED_TABLES else len(COUPLED_TABLES),
        name != role,
    )


def loss_splits(results: Iterable[Result]) -> set[str]:
    """The splits that the losses are of: "test", or "val" where a corpus has no test split."""
    return {result.loss_split for result in results if result.metrics.get("loss") is not None}


def loss_name(results: Iterable[Result]) -> str:
    """What to call the loss in a sentence."""
    splits = loss_splits(results)
    if "val" not in splits:
        return "test loss"
    return "validation loss" if splits == {"val"} else "loss"


def loss_note(results: Iterable[Result]) -> str:
    """What to say of losses that are not all of test text; empty where they are."""
    splits = loss_splits(results)
    if "val" not in splits:
        return ""
    if splits == {"val"}:
        return "The loss is that of the validation text: the corpus has no test split."
    return (
        "The loss is that of the test text in some runs and of the validation text in others, "
        "whose corpus has no test split."
    )


def limit_note(results: Iterable[Result]) -> str:
    """What to say of tasks that were tried on their first documents alone; empty where there are none."""
    limits = sorted({limit for result in results if (limit := result.metrics.get(TASK_LIMIT)) is not None})
    if not limits:
        return ""
    documents = " or ".join(f"{limit:g}" for limit in limits)
    return f"Of each task only the first {documents} documents were evaluated, for a try."


def table_note(results: Iterable[Result]) -> str:
    """What to say of measures of embeddings where a model has two tables; empty where none has."""
    untied = [result for result in results if not result.settings.get("tied", True)]
    if not untied:
        return ""
    note = "The embeddings of untied models are measured in the output table"
    keys = {key for result in untied for key, value in result.metrics.items() if value is not None}
    has_input = any(key.startswith(INPUT_PREFIX) for key in keys)
    return f"{note}; Further measures has the input table." if has_input else f"{note}."


def sizes(results: Sequence[Result]) -> list[Size]:
    """Every size with a finished run, the smallest dataset first."""
    return sorted({size_of(result) for result in results})


def size_labels(shown: Sequence[Size]) -> dict[Size, str]:
    """A different label for every size: tied and untied models of one name differ in their parameters alone.

    Example:
        >>> list(size_labels([Size(10**9, 30 * 10**6, "S"), Size(10**9, 49 * 10**6, "S")]).values())
        ['N = S (30M), D = 1B', 'N = S (49M), D = 1B']
    """
    labels = [size.label for size in shown]
    return {
        size: size.label
        if labels.count(size.label) == 1
        else f"N = {size.model} ({short(size.parameters)}), D = {short(size.tokens)}"
        for size in shown
    }


def model_names(shown: Sequence[Size]) -> dict[tuple[int, str], str]:
    """A different name for every model, by (parameters, name), the smallest first: with its parameters where two models
    have one name.

    Example:
        >>> list(model_names([Size(10**9, 30 * 10**6, "S"), Size(10**9, 49 * 10**6, "S")]).values())
        ['S (30M)', 'S (49M)']
    """
    models = sorted({(size.parameters, size.model) for size in shown})
    names = [name for _, name in models]
    return {(count, name): name if names.count(name) == 1 else f"{name} ({short(count)})" for count, name in models}


def places(results: Sequence[Result]) -> list[list[Result]]:
    """The runs that are set against each other: of one D and one model by name, so tied and untied, which differ in N,
    are together. In the order of sizes."""
    named = sorted(results, key=size_of)
    keys = dict.fromkeys((result.tokens, result.model) for result in named)
    return [[result for result in results if (result.tokens, result.model) == key] for key in keys]


def size_of(result: Result) -> Size:
    """The size of one run."""
    return Size(result.tokens, result.parameters, result.model)


def variants(results: Sequence[Result]) -> list[Variant]:
    """Every optimizer with a finished run, in the order of `optimizer_order`; what that leaves open, as it comes."""
    found = {
        result.optimizer: Variant(result.optimizer, role_of(result.settings), result.settings) for result in results
    }
    return sorted(found.values(), key=lambda variant: optimizer_order(variant.name, variant.settings))


def runs_of(results: Sequence[Result], size: Size, variant: Variant) -> list[Result]:
    """The runs of one cell by seed."""
    return sorted(
        (result for result in results if size_of(result) == size and result.optimizer == variant.name),
        key=lambda result: result.seed,
    )


def values_of(runs: Sequence[Result], metric: str) -> dict[int, float | None]:
    """One metric by seed, as `statistics.compare` takes it."""
    return {run.seed: run.metrics.get(metric) for run in runs}


def compare_variants(
    results: Sequence[Result],
    size: Size,
    first: Variant,
    second: Variant,
    metric: str,
    second_size: Size | None = None,
) -> Comparison | None:
    """How `second` does against `first`; None when one of them was not measured.

    Args:
        results: finished runs.
        size: of both, or of `first` alone.
        first: the one compared with.
        second: the one in question.
        metric: key of the metric.
        second_size: of `second` where it is another one: a tied model against an untied one.
    """
    old = values_of(runs_of(results, size, first), metric)
    new = values_of(runs_of(results, second_size or size, second), metric)
    comparison = compare(old, new, METRICS[metric].better)
    return None if comparison.difference is None else comparison


def main_pair(results: Sequence[Result]) -> tuple[Variant, Variant] | None:
    """The two optimizers that are set against each other: the only two, else standard and coupled, else None."""
    found = variants(results)
    if len(found) == 2:
        return found[0], found[1]
    firsts = [next((variant for variant in found if variant.role == role), None) for role in ("standard", "coupled")]
    return None if firsts[0] is None or firsts[1] is None else (firsts[0], firsts[1])


def has_scale_exponents(results: Sequence[Result]) -> bool:
    """Whether the study varies n."""
    return len({variant.n for variant in variants(results) if variant.role in ("coupled", "scaled")}) > 1


def largest_size(results: Sequence[Result]) -> Size:
    """The size that pictures of a single size show: the one with the most optimizers, of those the largest."""
    return max(sizes(results), key=lambda size: (len({r.optimizer for r in results if size_of(r) == size}), size))
