"""The results of a study as a grid: sizes and optimizers, their cells, and the runs of every cell.

A *size* is one dataset size D with one model size N; a *variant* is one optimizer of the study. A size and a variant
make a *cell*, whose runs differ only in the seed. Cells and seeds that are still missing belong to the grid too. A
*place* is one D and one model name: its cells are compared with each other. Tied and untied models, which differ in N,
share a place.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from coupled_adam.base.text import short
from coupled_adam.config.optimizer_names import is_coupled_adam, member_name, short_member_name
from coupled_adam.metrics import METRICS
from coupled_adam.report.significance import Comparison, compare
from coupled_adam.study.results import Result

Role = Literal["standard", "coupled", "scaled", "family", "sgd"]
"""Role of an optimizer. family: a member of the family of second moments that is not Coupled Adam."""
NAMES = {"standard": "standard Adam", "coupled": "Coupled Adam"}
PLACES: dict[Role, int] = {"standard": 0, "coupled": 1, "scaled": 1, "family": 2, "sgd": 3}
MOST_PAIRS = 5
COUPLED_TABLES = ("output", "input", "all")


@dataclass(frozen=True, order=True)
class Size:
    """Dataset size D and model size N."""

    tokens: int
    parameters: int
    model: str

    @property
    def label(self) -> str:
        """Short name, for headings."""
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
    def f(self) -> float:
        """SGD's factor of the learning rate; 0 if not set."""
        return float(self.settings.get("sgd_factor") or 0.0)

    @property
    def exponents(self) -> tuple[float, float]:
        """Column and row exponents x and y of the coupled second moment; Coupled Adam has 1 and 0."""
        return float(self.settings.get("column_exponent", 1.0)), float(self.settings.get("row_exponent", 0.0))

    @property
    def order(self) -> tuple[bool | int | float, ...]:
        """Sort key: standard, then coupled by n, then the rest of the family, then SGD by f. Within a role: plain, then
        centred, then untied, by coupled table, then with Muon. So the main pair of a report does not depend on the
        order of its folders.

        Example:
            >>> settings = {"untied": {"tied": False}, "centred": {"centre": True}, "standard": {}}
            >>> found = [variant_of(name, {"embeddings": "adamw", **own}) for name, own in settings.items()]
            >>> [variant.name for variant in sorted(found, key=lambda variant: variant.order)]
            ['standard', 'centred', 'untied']
        """
        couple = self.settings.get("couple") or COUPLED_TABLES[0]
        x, y = self.exponents
        return (
            PLACES[self.role],
            -x,
            y,
            bool(self.settings.get("mean_free")),
            self.n,
            self.f,
            not self.settings.get("tied", True),
            bool(self.settings.get("centre")),
            COUPLED_TABLES.index(couple) if couple in COUPLED_TABLES else len(COUPLED_TABLES),
            self.settings.get("matrices", "adamw") != "adamw",
            self.name != self.role,
        )

    @property
    def label(self) -> str:
        """Name in the report: the long form if the study uses the default short name, otherwise the study's name.

        Example:
            >>> settings = {"embeddings": "coupled", "row_exponent": 0.25, "mean_free": True}
            >>> variant_of("partial y=0.25 mean-free", settings).label, variant_of("ours", settings).label
            ('partially coupled (y = 0.25, mean-free)', 'ours')
        """
        if self.role == "family" and self.name == short_member_name(self.settings):
            return member_name(self.settings)
        return NAMES[self.name] if self.name in NAMES and self.name == self.role else self.name


def role_of(settings: Mapping[str, Any]) -> Role:
    """Role of an [optimizer] section.

    Example:
        >>> role_of({"embeddings": "coupled", "scale_exponent": 0.0}), role_of({"embeddings": "adamw"})
        ('coupled', 'standard')
        >>> role_of({"embeddings": "coupled", "row_exponent": 0.25})
        'family'
    """
    embeddings = settings.get("embeddings", "coupled")
    if embeddings == "adamw":
        return "standard"
    if embeddings == "sgd":
        return "sgd"
    if not is_coupled_adam(settings):
        return "family"
    return "scaled" if settings.get("scale_exponent") else "coupled"


def variant_of(name: str, settings: Mapping[str, Any]) -> Variant:
    """Make a variant from its name in the study and its settings."""
    return Variant(name, role_of(settings), settings)


def size_of(result: Result) -> Size:
    """The size of one run."""
    return Size(result.tokens, result.parameters, result.model)


@dataclass(frozen=True)
class Planned:
    """A cell planned by a study."""

    cell: str
    """Id in the study."""
    size: Size
    variant: Variant
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class CellRuns:
    """One cell with its finished runs."""

    name: str
    """Id in the study; empty if the cell is only expected because of the rest of the grid."""
    size: Size
    variant: Variant
    runs: Mapping[int, Result]
    """The finished runs by seed."""
    seeds: tuple[int, ...]
    """Every expected seed, including those of `runs`."""

    def values(self, metric: str) -> dict[int, float | None]:
        """One metric by seed; None if a finished run does not have it."""
        return values_of(list(self.runs.values()), metric)


@dataclass(frozen=True)
class Grid:
    """All cells of a report and its finished runs, made by `gather_grid`."""

    results: tuple[Result, ...]
    """The finished runs, in their original order."""
    cells: tuple[CellRuns, ...]
    """All cells, including those without runs; smallest dataset first, then in the order of the variants."""

    @cached_property
    def finished(self) -> "Grid":
        """The grid without cells that have no run."""
        return Grid(self.results, tuple(cell for cell in self.cells if cell.runs))

    @cached_property
    def sizes(self) -> list[Size]:
        """Every size with a finished run, the smallest dataset first."""
        return sorted({size_of(result) for result in self.results})

    @cached_property
    def variants(self) -> list[Variant]:
        """Every optimizer with a finished run, sorted by `Variant.order`."""
        found = {result.optimizer: variant_of(result.optimizer, result.settings) for result in self.results}
        return sorted(found.values(), key=lambda variant: variant.order)

    @cached_property
    def places(self) -> "list[Grid]":
        """The cells of each D and model name, with their runs, in the order of sizes."""
        cells: dict[tuple[int, str], list[CellRuns]] = {}
        for cell in self.cells:
            cells.setdefault((cell.size.tokens, cell.size.model), []).append(cell)
        return [
            Grid(tuple(run for run in self.results if (run.tokens, run.model) == place), tuple(own))
            for place, own in cells.items()
        ]

    @property
    def main_pair(self) -> tuple[Variant, Variant] | None:
        """The two optimizers to compare: the only two, otherwise standard and coupled, otherwise None."""
        found = self.variants
        if len(found) == 2:
            return found[0], found[1]
        first, second = (
            next((variant for variant in found if variant.role == role), None) for role in ("standard", "coupled")
        )
        return None if first is None or second is None else (first, second)

    @property
    def difference_pairs(self) -> list[tuple[Variant, Variant]]:
        """The pairs whose differences are drawn: the main pair, then each further member of the family against the
        standard, and if the pairs are few, against Coupled Adam."""
        pair = self.main_pair
        if pair is None:
            return []
        members = [variant for variant in self.variants if variant.role == "family" and variant not in pair]
        against_first, against_second = ([(each, member) for member in members] for each in pair)
        few = 1 + 2 * len(members) <= MOST_PAIRS and pair[1].role == "coupled"
        return [pair, *against_first, *(against_second if few else [])]

    @property
    def has_scale_exponents(self) -> bool:
        """Whether the study varies n."""
        return len({variant.n for variant in self.variants if variant.role in ("coupled", "scaled")}) > 1

    @property
    def largest_size(self) -> Size:
        """The size shown by figures of a single size: the one with the most optimizers, the largest of several."""
        return max(self.sizes, key=lambda size: (len({r.optimizer for r in self.results if size_of(r) == size}), size))

    def sizes_of(self, variant: Variant) -> list[Size]:
        """The sizes where an optimizer has finished runs."""
        return sorted({size_of(run) for run in self.results if run.optimizer == variant.name})

    def runs_of(self, size: Size, variant: Variant) -> list[Result]:
        """The finished runs of one size and optimizer, by seed."""
        return sorted(
            (run for run in self.results if size_of(run) == size and run.optimizer == variant.name),
            key=lambda run: run.seed,
        )

    def values_of(self, size: Size, variant: Variant, metric: str) -> dict[int, float | None]:
        """One metric of one size and optimizer, by seed."""
        return values_of(self.runs_of(size, variant), metric)

    def compare(
        self, size: Size, first: Variant, second: Variant, metric: str, second_size: Size | None = None
    ) -> Comparison | None:
        """Compare `second` with `first`; None if one of them was not measured.

        Args:
            size: of both, or only of `first`.
            first: the baseline.
            second: the optimizer to compare with it.
            metric: key of the metric.
            second_size: of `second` if it differs, as for a tied and an untied model.
        """
        old, new = self.values_of(size, first, metric), self.values_of(second_size or size, second, metric)
        comparison = compare(old, new, METRICS[metric].better)
        return None if comparison.difference is None else comparison


def values_of(runs: Sequence[Result], metric: str) -> dict[int, float | None]:
    """One metric by seed, for `significance.compare`."""
    return {run.seed: run.metrics.get(metric) for run in runs}


def gather_grid(results: Sequence[Result], planned: Sequence[Planned] = ()) -> Grid:
    """Make the grid of finished and expected runs.

    Args:
        results: the finished runs of one or several studies.
        planned: the expected cells. By default, a study is expected to have every combination of its model and dataset
            sizes, optimizers and seeds.

    Returns:
        All cells: those with runs, and expected ones without.
    """
    expected = planned or expected_of(results)
    by_cell: dict[str, list[Result]] = {}
    for result in results:
        by_cell.setdefault(result.cell, []).append(result)
    seeds = {each.cell: each.seeds for each in expected}
    cells = [_with_runs(name, runs, seeds.get(name, ())) for name, runs in by_cell.items()]
    cells += [
        CellRuns(each.cell, each.size, each.variant, {}, each.seeds) for each in expected if each.cell not in by_cell
    ]
    return Grid(tuple(results), tuple(sorted(cells, key=lambda cell: (cell.size, cell.variant.order))))


def _with_runs(name: str, runs: Sequence[Result], expected_seeds: Sequence[int]) -> CellRuns:
    by_seed = {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}
    seeds = tuple(sorted({*by_seed, *expected_seeds}))
    return CellRuns(name, size_of(runs[0]), variant_of(runs[0].optimizer, runs[0].settings), by_seed, seeds)


def expected_of(results: Sequence[Result]) -> list[Planned]:
    """The full grid of every study, inferred from its runs: cells with runs, and missing combinations."""
    expected = []
    for study in dict.fromkeys(result.study for result in results):
        own = [result for result in results if result.study == study]
        seeds = tuple(sorted({result.seed for result in own}))
        for result in {result.cell: result for result in own}.values():
            variant = variant_of(result.optimizer, result.settings)
            expected.append(Planned(result.cell, size_of(result), variant, seeds))
        there = {(result.tokens, result.model, result.optimizer) for result in own}
        for tokens, model in dict.fromkeys((result.tokens, result.model) for result in own):
            for example in {result.optimizer: result for result in own}.values():
                if (tokens, model, example.optimizer) not in there:
                    size = Size(tokens, _parameters(own, model, example.settings), model)
                    expected.append(Planned("", size, variant_of(example.optimizer, example.settings), seeds))
    return expected


def _parameters(results: Sequence[Result], model: str, settings: Mapping[str, Any]) -> int:
    """Parameters of a model of a study, preferably from a run that is tied or untied as in the settings."""
    of_model = [result for result in results if result.model == model]
    alike = [result for result in of_model if result.settings.get("tied", True) == settings.get("tied", True)]
    return (alike or of_model)[0].parameters


def sizes_of(cells: Sequence[CellRuns]) -> list[Size]:
    """The sizes of the cells, in their order."""
    return list(dict.fromkeys(cell.size for cell in cells))


def fullest(places: Iterable[list[CellRuns]]) -> list[CellRuns]:
    """The place with the most cells, the largest of several; empty without any."""
    found = [cells for cells in places if cells]
    return max(found, key=lambda cells: (len(cells), cells[0].size), default=[])


def optimizer_labels(cells: Sequence[CellRuns]) -> list[str]:
    """The optimizer of every cell, with the cell's id if two cells of one size would have the same name."""
    names = Counter((cell.size, cell.variant.name) for cell in cells)
    return [
        cell.variant.name if names[cell.size, cell.variant.name] == 1 else f"{cell.variant.name} ({cell.name})"
        for cell in cells
    ]


def model_labels(cells: Sequence[CellRuns]) -> dict[Size, str]:
    """The model of every size, with its parameters if two sizes would have the same name, such as tied and untied."""
    sizes = sizes_of(cells)
    names = Counter((size.tokens, size.model) for size in sizes)
    return {
        size: size.model if names[size.tokens, size.model] == 1 else f"{size.model} ({short(size.parameters)})"
        for size in sizes
    }


def size_labels(shown: Sequence[Size]) -> dict[Size, str]:
    """A unique label for every size: tied and untied models of one name differ only in their parameters.

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
    """A unique name for every model, by (parameters, name), smallest first; with its parameters if two models have the
    same name.

    Example:
        >>> list(model_names([Size(10**9, 30 * 10**6, "S"), Size(10**9, 49 * 10**6, "S")]).values())
        ['S (30M)', 'S (49M)']
    """
    models = sorted({(size.parameters, size.model) for size in shown})
    names = [name for _, name in models]
    return {(count, name): name if names.count(name) == 1 else f"{name} ({short(count)})" for count, name in models}
