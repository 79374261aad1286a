"""The ranking of all optimizers, the loss over the learning rate, and the selected settings."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import COUPLED, STANDARD, fabricate

from coupled_adam.report.contents import contents_of
from coupled_adam.report.figures.figure_list import draw_figures
from coupled_adam.report.figures.ranking_figures import draw_learning_rates, draw_ranking
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.learning_rates import rate_curves, sensitivity
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.study_plans import read_plans
from coupled_adam.study.results import Result, read_results
from coupled_adam.study.trials import Trial

RATES = (5e-4, 1e-3, 2e-3)


def with_metrics(results: list[Result], **values: object) -> list[Result]:
    """The results with metrics computed from each result."""
    return [
        replace(each, metrics={**each.metrics, **{key: value(each) for key, value in values.items()}})  # type: ignore[operator]
        for each in results
    ]


def three(folder: Path) -> list[Result]:
    """Three optimizers; the last one has the best loss and embeddings."""
    optimizers = {"standard": STANDARD, "coupled": COUPLED, "partial": {**COUPLED, "row_exponent": 0.25}}
    results = read_results(fabricate(folder, optimizers=optimizers))
    place = {"standard": 0, "coupled": 1, "partial": 2}
    return with_metrics(
        results,
        loss=lambda run: 4.0 - 0.1 * place[run.optimizer] + 0.001 * run.seed,
        r_cos=lambda run: 20.0 + 10 * place[run.optimizer] + run.seed,
    )


def over_rates(folder: Path) -> list[Result]:
    """Two optimizers at three learning rates; the loss is a parabola around 1e-3, steeper for the standard one."""
    optimizers = {
        f"{name} lr={lr:g}": {**settings, "lr": lr}
        for name, settings in (("standard", STANDARD), ("coupled", COUPLED))
        for lr in RATES
    }
    results = read_results(fabricate(folder, optimizers=optimizers))
    steep = {"standard": 0.4, "coupled": 0.1}
    return with_metrics(
        results,
        loss=lambda run: 3.0 + steep[run.optimizer.split()[0]] * math.log2(run.settings["lr"] / 1e-3) ** 2 + run.seed,
    )


def test_optimizers_are_ranked_by_their_mean_loss(tmp_path: Path) -> None:
    tables = {table.name: table for table in build_tables(gather_grid(three(tmp_path / "study")))}
    rows = tables["ranking"].rows
    assert [row[3].text for row in rows] == ["partial", "coupled", "standard"]
    assert [row[2].numbers["value"] for row in rows] == [1, 2, 3]
    keys = [column.key for column in tables["ranking"].columns]
    loss, r_cos = (rows[0][keys.index(key)].numbers for key in ("loss", "r_cos"))
    assert loss["mean"] == pytest.approx(4.0 - 0.2 + 0.002)
    assert loss["std"] == pytest.approx(np.std([0.001, 0.002, 0.003], ddof=1))
    assert r_cos["mean"] == pytest.approx(42.0)


def test_two_optimizers_are_compared_and_not_ranked(tmp_path: Path) -> None:
    grid = gather_grid(read_results(fabricate(tmp_path / "study")))
    assert "ranking" not in {table.name for table in build_tables(grid)}
    assert draw_ranking(grid) is None


def test_a_point_of_the_ranking_is_an_optimizer_with_the_spread_of_its_seeds(tmp_path: Path) -> None:
    grid = gather_grid(three(tmp_path / "study"))
    figure = draw_ranking(grid)
    assert figure is not None
    against_r_cos, against_iso = figure.axes
    assert len(against_r_cos.containers) == len(against_iso.containers) == 3
    best = against_r_cos.containers[0]
    assert best.lines[0].get_xydata()[0] == pytest.approx([42.0, 3.802])
    across = best.lines[2][0].get_segments()[0]
    assert across[:, 0] == pytest.approx([41.0, 43.0])
    (drawn,) = (each for each in draw_figures(grid) if each.name == "ranking")
    assert "r_cos" in drawn.caption


def test_sensitivity_is_the_mean_excess_over_the_best_learning_rate() -> None:
    losses = [3.4, 3.0, 3.2]
    assert sensitivity(losses) == pytest.approx(np.mean(np.array(losses) - min(losses)))


def test_learning_rates_of_one_optimizer_make_a_curve(tmp_path: Path) -> None:
    grid = gather_grid(over_rates(tmp_path / "study"))
    curves = {curve.name: curve for curve in rate_curves(grid)}
    assert set(curves) == {"standard", "coupled"}
    assert [lr for lr, _ in curves["coupled"].cells] == list(RATES)
    table = next(table for table in build_tables(grid) if table.name == "learning_rates")
    rows = {row[2].text: dict(zip([column.key for column in table.columns], row, strict=True)) for row in table.rows}
    assert rows["standard"]["best_lr"].numbers["value"] == 1e-3
    assert rows["standard"]["sensitivity"].numbers["mean"] == pytest.approx(0.8 / 3)
    assert rows["coupled"]["sensitivity"].numbers["mean"] == pytest.approx(0.2 / 3)
    assert rows["coupled"]["sensitivity"].numbers["seeds"] == 3
    figure = draw_learning_rates(grid)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert len(axes.containers) == 2


def test_if_a_learning_rate_has_no_run_the_sensitivity_is_unknown(tmp_path: Path) -> None:
    results = over_rates(tmp_path / "study")
    kept = [replace(each, metrics={}) if each.optimizer == "standard lr=0.002" else each for each in results]
    table = next(table for table in build_tables(gather_grid(kept)) if table.name == "learning_rates")
    standard = next(row for row in table.rows if row[2].text == "standard")
    assert standard[-1].missing
    assert any("standard" in note and "0.002" in note for note in table.notes)


def test_one_learning_rate_does_not_make_a_curve(tmp_path: Path) -> None:
    grid = gather_grid(three(tmp_path / "study"))
    assert rate_curves(grid) == []
    assert draw_learning_rates(grid) is None


def test_the_report_shows_every_candidate_and_flags_a_winner_at_the_edge(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    results = read_results(fabricate(folder, seeds=(1, 2)))
    reported = [replace(each, trial=Trial("optimizer.lr", 4e-3, False, each.cell, "upper", 2)) for each in results]
    candidates = [
        replace(
            each,
            seed=0,
            cell=f"{each.cell}-lr{lr:g}",
            metrics={"val_loss": loss},
            trial=Trial("optimizer.lr", lr, True, each.cell),
        )
        for each in results
        if each.seed == 1
        for lr, loss in ((2e-3, 3.5), (4e-3, 3.25 if each.optimizer == "coupled" else None))
    ]
    contents = contents_of([*candidates, *reported], read_plans([folder], results))
    assert len(contents.grid.results) == 4
    table = next(table for table in contents.tables if table.name == "selection")
    rows = [[cell.text for cell in row[2:]] for row in table.rows]
    assert ["coupled", "optimizer.lr", "0.004", "3.250", "winner, at the upper edge"] in rows
    assert ["standard", "optimizer.lr", "0.004", "diverged", "winner, at the upper edge"] in rows
    assert ["coupled", "optimizer.lr", "0.002", "3.500", ""] in rows
    assert sum("coupled" in note for note in table.notes) == 1
