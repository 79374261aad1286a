"""The results of a study as a grid: sizes and optimizers, their cells, and the runs of every cell.

A *size* is one dataset size D with one model size N; a *variant* is one optimizer of the study. One size and one
variant make a *cell*, whose runs differ in the seed alone; also cells and seeds that are not there yet, or never came,
belong to the grid. A *place* is one D and one model by name: what is compared with each other. Tied and untied models,
which differ in N, are together there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from coupled_adam.base.text import short
from coupled_adam.config.optimizer_names import is_coupled_adam, member_name, short_member_name
from coupled_adam.metrics import METRICS
from coupled_adam.report.significance import Comparison, compare
from coupled_adam.study.results import Result

Role = Literal["standard", "coupled", "scaled", "family", "sgd"]
"""What an optimizer stands for. family: a member of the family of second moments that is not Coupled Adam."""
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
    def f(self) -> float:
        """SGD's factor of the learning rate; 0 where there is none."""
        return float(self.settings.get("sgd_factor") or 0.0)

    @property
    def exponents(self) -> tuple[float, float]:
        """x and y, the column and the row exponent of the coupled second moment; 1 and 0 are Coupled Adam's."""
        return float(self.settings.get("column_exponent", 1.0)), float(self.settings.get("row_exponent", 0.0))

    @property
    def order(self) -> tuple[bool | int | float, ...]:
        """To sort by: standard, then coupled by n, then the rest of the family, then SGD by f. Of one kind the plain
        one first, then what is centred, then what is untied, by the table that is coupled, then with Muon: the pair
        that a report is about is the same whatever the order of the folders it is made of.

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
        """As the report calls it: in words where its name in the study is the short one of what it is, else that name.

        Example:
            >>> settings = {"embeddings": "coupled", "row_exponent": 0.25, "mean_free": True}
            >>> variant_of("partial y=0.25 mean-free", settings).label, variant_of("ours", settings).label
            ('partially coupled (y = 0.25, mean-free)', 'ours')
        """
        if self.role == "family" and self.name == short_member_name(self.settings):
            return member_name(self.settings)
        return NAMES[self.name] if self.name in NAMES and self.name == self.role else self.name


def role_of(settings: Mapping[str, Any]) -> Role:
    """What an [optimizer] section stands for.

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
    """One optimizer of a study, from its name there and its settings."""
    return Variant(name, role_of(settings), settings)


def size_of(result: Result) -> Size:
    """The size of one run."""
    return Size(result.tokens, result.parameters, result.model)


@dataclass(frozen=True)
class Planned:
    """A cell as its study wants it."""

    cell: str
    """Its id in the study."""
    size: Size
    variant: Variant
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class CellRuns:
    """One cell with the runs it has."""

    name: str
    """Its id in the study; empty where only the rest of the grid makes it expected."""
    size: Size
    variant: Variant
    runs: Mapping[int, Result]
    """The finished runs by seed."""
    seeds: tuple[int, ...]
    """Every seed it should have, those of `runs` included."""

    def values(self, metric: str) -> dict[int, float | None]:
        """One metric by seed; None where a finished run does not have it."""
        return values_of(list(self.runs.values()), metric)


@dataclass(frozen=True)
class Grid:
    """All cells of a report, and the runs that are finished. `gather_grid` makes one."""

    results: tuple[Result, ...]
    """The finished runs, in the order in which they came."""
    cells: tuple[CellRuns, ...]
    """The smallest dataset first, and of one size in the order of the variants; also those without runs."""

    @cached_property
    def finished(self) -> "Grid":
        """The grid without the cells that have no run."""
        return Grid(self.results, tuple(cell for cell in self.cells if cell.runs))

    @cached_property
    def sizes(self) -> list[Size]:
        """Every size with a finished run, the smallest dataset first."""
        return sorted({size_of(result) for result in self.results})

    @cached_property
    def variants(self) -> list[Variant]:
        """Every optimizer with a finished run, in their order; what that leaves open, as it comes."""
        found = {result.optimizer: variant_of(result.optimizer, result.settings) for result in self.results}
        return sorted(found.values(), key=lambda variant: variant.order)

    @cached_property
    def places(self) -> "list[Grid]":
        """The cells of each D and model by name, with their runs, in the order of sizes."""
        cells: dict[tuple[int, str], list[CellRuns]] = {}
        for cell in self.cells:
            cells.setdefault((cell.size.tokens, cell.size.model), []).append(cell)
        return [
            Grid(tuple(run for run in self.results if (run.tokens, run.model) == place), tuple(own))
            for place, own in cells.items()
        ]

    @property
    def main_pair(self) -> tuple[Variant, Variant] | None:
        """The two optimizers that are set against each other: the only two, else standard and coupled, else None."""
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
        standard, and against Coupled Adam while all of them are few."""
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
        """The size that pictures of a single size show: the one with the most optimizers, of those the largest."""
        return max(self.sizes, key=lambda size: (len({r.optimizer for r in self.results if size_of(r) == size}), size))

    def sizes_of(self, variant: Variant) -> list[Size]:
        """The sizes at which an optimizer has finished runs."""
        return sorted({size_of(run) for run in self.results if run.optimizer == variant.name})

    def runs_of(self, size: Size, variant: Variant) -> list[Result]:
        """The finished runs of one size with one optimizer, by seed."""
        return sorted(
            (run for run in self.results if size_of(run) == size and run.optimizer == variant.name),
            key=lambda run: run.seed,
        )

    def values_of(self, size: Size, variant: Variant, metric: str) -> dict[int, float | None]:
        """One metric of one size with one optimizer, by seed."""
        return values_of(self.runs_of(size, variant), metric)

    def compare(
        self, size: Size, first: Variant, second: Variant, metric: str, second_size: Size | None = None
    ) -> Comparison | None:
        """How `second` does against `first`; None when one of them was not measured.

        Args:
            size: of both, or of `first` alone.
            first: the one compared with.
            second: the one in question.
            metric: key of the metric.
            second_size: of `second` where it is another one: a tied model against an untied one.
        """
        old, new = self.values_of(size, first, metric), self.values_of(second_size or size, second, metric)
        comparison = compare(old, new, METRICS[metric].better)
        return None if comparison.difference is None else comparison


def values_of(runs: Sequence[Result], metric: str) -> dict[int, float | None]:
    """One metric by seed, as `significance.compare` takes it."""
    return {run.seed: run.metrics.get(metric) for run in runs}


def gather_grid(results: Sequence[Result], planned: Sequence[Planned] = ()) -> Grid:
    """The grid of finished runs and of those that should be there.

    Args:
        results: the finished runs of one study or of several.
        planned: what there should be. Without it every model and dataset size of a study is expected with every
            optimizer of it, and every cell with every seed.

    Returns:
        All cells: those with runs, and those without that are expected.
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
    """The full grid of every study, as far as its runs tell: cells with runs, and those the grid lacks."""
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
    """Parameters of a model of a study, tied as the settings say, if a run of that kind is there."""
    of_model = [result for result in results if result.model == model]
    alike = [result for result in of_model if result.settings.get("tied", True) == settings.get("tied", True)]
    return (alike or of_model)[0].parameters


def sizes_of(cells: Sequence[CellRuns]) -> list[Size]:
    """The sizes of the cells, in their order."""
    return list(dict.fromkeys(cell.size for cell in cells))


def optimizer_labels(cells: Sequence[CellRuns]) -> list[str]:
    """The optimizer of every cell, with the cell's id where two cells of one size would be called the same."""
    names = Counter((cell.size, cell.variant.name) for cell in cells)
    return [
        cell.variant.name if names[cell.size, cell.variant.name] == 1 else f"{cell.variant.name} ({cell.name})"
        for cell in cells
    ]


def model_labels(cells: Sequence[CellRuns]) -> dict[Size, str]:
    """The model of every size, with its parameters where two sizes would be called the same, as tied and untied."""
    sizes = sizes_of(cells)
    names = Counter((size.tokens, size.model) for size in sizes)
    return {
        size: size.model if names[size.tokens, size.model] == 1 else f"{size.model} ({short(size.parameters)})"
        for size in sizes
    }


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
