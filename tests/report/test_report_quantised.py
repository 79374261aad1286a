"""The figure of what rounding the table costs: its points are differences of the stored losses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fabricated_study import fabricate

from coupled_adam.report.grid import gather_grid
from coupled_adam.study.results import Result, read_results

quantised_figures = pytest.importorskip("coupled_adam.report.figures.quantised_figures")
COSTS = {"standard": 0.25, "coupled": 0.125}


@pytest.fixture
def results(tmp_path: Path) -> list[Result]:
    """Two optimizers with three seeds each, without quantised losses."""
    return read_results(fabricate(tmp_path / "study", with_runs=False))


def rounded(result: Result, key: str = "loss_int4_row") -> Result:
    """The result with a loss that rounding has raised by 1, 2 and 3 times the optimizer's cost."""
    loss = result.metrics["loss"]
    assert loss is not None
    return replace(result, metrics={**result.metrics, key: loss + COSTS[result.optimizer] * result.seed})


def points(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """The drawn means, by kind of rounding and optimizer."""
    figure = quantised_figures.draw_costs_of_rounding(gather_grid(results))
    [axes] = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    found = {}
    for drawn in axes.containers:
        x, y = drawn.lines[0].get_data()
        found[drawn.get_label()] = {names[int(place)]: float(cost) for cost, place in zip(x, y, strict=True)}
    return found


def test_a_point_is_the_mean_increase_over_the_seeds(results: list[Result]) -> None:
    drawn = points([rounded(each) for each in results])
    assert list(drawn) == ["int4, by row"]
    assert drawn["int4, by row"] == pytest.approx({name: 2 * cost for name, cost in COSTS.items()})


def test_a_bar_is_the_standard_deviation_over_the_seeds(results: list[Result]) -> None:
    figure = quantised_figures.draw_costs_of_rounding(gather_grid([rounded(each) for each in results]))
    [bars] = figure.axes[0].containers[0].lines[2]
    lengths = [float(np.ptp(segment[:, 0])) / 2 for segment in bars.get_segments()]
    assert lengths == pytest.approx([np.std([cost, 2 * cost, 3 * cost], ddof=1) for cost in COSTS.values()])


def test_seeds_and_optimizers_without_the_measurement_are_left_out(results: list[Result]) -> None:
    measured = [
        rounded(each) if (each.optimizer, each.seed) in {("coupled", 1), ("coupled", 2)} else each for each in results
    ]
    assert points(measured) == {"int4, by row": {"coupled": pytest.approx(1.5 * COSTS["coupled"])}}


def test_without_the_measurement_there_is_no_figure(results: list[Result]) -> None:
    assert quantised_figures.draw_costs_of_rounding(gather_grid(results)) is None
