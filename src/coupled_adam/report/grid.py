"""The cells of a study with their runs: also the cells and the seeds that are not there yet, or never came.

A cell is one model trained on one dataset size with one optimizer, over several seeds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coupled_adam.base.text import short
from coupled_adam.report.report_data import Size, optimizer_order, role_of, size_of
from coupled_adam.study.results import Result


@dataclass(frozen=True)
class Planned:
    """A cell as its study wants it."""

    cell: str
    """Its id in the study."""
    size: Size
    optimizer: str
    settings: Mapping[str, Any]
    """The optimizer section of its config, and "tied"."""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class CellRuns:
    """One cell with the runs it has."""

    name: str
    """Its id in the study; empty where only the rest of the grid makes it expected."""
    size: Size
    optimizer: str
    settings: Mapping[str, Any]
    runs: Mapping[int, Result]
    """The finished runs by seed."""
    seeds: tuple[int, ...]
    """Every seed it should have, those of `runs` included."""

    @property
    def role(self) -> str:
        """standard, coupled, scaled or sgd."""
        return role_of(self.settings)

    @property
    def n(self) -> float:
        """Scale exponent of the coupled second moment."""
        return float(self.settings.get("scale_exponent") or 0)

    @property
    def f(self) -> float:
        """SGD's factor of the learning rate; 0 where there is none."""
        return float(self.settings.get("sgd_factor") or 0)

    def values(self, metric: str) -> dict[int, float | None]:
        """One metric by seed; None where a finished run does not have it."""
        return {seed: run.metrics.get(metric) for seed, run in self.runs.items()}


def gather_cells(results: Sequence[Result], planned: Sequence[Planned] = ()) -> list[CellRuns]:
    """The cells of a study, the smallest dataset first, and of one size in the order of `optimizer_order`.

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
        CellRuns(each.cell, each.size, each.optimizer, each.settings, {}, each.seeds)
        for each in expected
        if each.cell not in by_cell
    ]
    return sorted(cells, key=lambda cell: (cell.size, optimizer_order(cell.optimizer, cell.settings)))


def _with_runs(name: str, runs: Sequence[Result], expected_seeds: Sequence[int]) -> CellRuns:
    by_seed = {run.seed: run for run in sorted(runs, key=lambda run: run.seed)}
    seeds = tuple(sorted({*by_seed, *expected_seeds}))
    return CellRuns(name, size_of(runs[0]), runs[0].optimizer, runs[0].settings, by_seed, seeds)


def expected_of(results: Sequence[Result]) -> list[Planned]:
    """The full grid of every study, as far as its runs tell: cells with runs, and those the grid lacks."""
    expected = []
    for study in dict.fromkeys(result.study for result in results):
        own = [result for result in results if result.study == study]
        seeds = tuple(sorted({result.seed for result in own}))
        for result in {result.cell: result for result in own}.values():
            expected.append(Planned(result.cell, size_of(result), result.optimizer, result.settings, seeds))
        there = {(result.tokens, result.model, result.optimizer) for result in own}
        for tokens, model in dict.fromkeys((result.tokens, result.model) for result in own):
            for example in {result.optimizer: result for result in own}.values():
                if (tokens, model, example.optimizer) not in there:
                    size = Size(tokens, _parameters(own, model, example.settings), model)
                    expected.append(Planned("", size, example.optimizer, example.settings, seeds))
    return expected


def _parameters(results: Sequence[Result], model: str, settings: Mapping[str, Any]) -> int:
    """Parameters of a model of a study, tied as the settings say, if a run of that kind is there."""
    of_model = [result for result in results if result.model == model]
    alike = [result for result in of_model if result.settings.get("tied", True) == settings.get("tied", True)]
    return (alike or of_model)[0].parameters


def sizes_of(cells: Sequence[CellRuns]) -> list[Size]:
    """The sizes of the cells, in their order."""
    return list(dict.fromkeys(cell.size for cell in cells))


def by_model_name(cells: Sequence[CellRuns]) -> dict[tuple[int, str], list[CellRuns]]:
    """The cells of each D and name of a model: tied and untied, which differ in their parameters, are together."""
    groups: dict[tuple[int, str], list[CellRuns]] = {}
    for cell in cells:
        groups.setdefault((cell.size.tokens, cell.size.model), []).append(cell)
    return groups


def optimizer_labels(cells: Sequence[CellRuns]) -> list[str]:
    """The optimizer of every cell, with the cell's id where two cells of one size would be called the same."""
    names = Counter((cell.size, cell.optimizer) for cell in cells)
    return [
        cell.optimizer if names[cell.size, cell.optimizer] == 1 else f"{cell.optimizer} ({cell.name})" for cell in cells
    ]


def model_labels(cells: Sequence[CellRuns]) -> dict[Size, str]:
    """The model of every size, with its parameters where two sizes would be called the same, as tied and untied."""
    sizes = sizes_of(cells)
    names = Counter((size.tokens, size.model) for size in sizes)
    return {
        size: size.model if names[size.tokens, size.model] == 1 else f"{size.model} ({short(size.parameters)})"
        for size in sizes
    }
