"""A report of thirteen optimizers can be read: colours, legends, labels, maps, curves and tables at 1280 pixels."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated_study import COUPLED, STANDARD, fabricate, sgd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from report_browser import CHROMIUM, Browser

from coupled_adam.base.captioned_figure import figure_style
from coupled_adam.config.study_config import load_study
from coupled_adam.report.contents import contents_of
from coupled_adam.report.figures.figure_list import draw_figures
from coupled_adam.report.figures.frequency_figures import FORMS, draw_by_frequency
from coupled_adam.report.figures.ranking_figures import draw_ranking
from coupled_adam.report.figures.style import looks
from coupled_adam.report.figures.training_curves import draw_validation_difference, draw_validation_loss
from coupled_adam.report.grid import Grid, gather_grid
from coupled_adam.report.report_page import render_report
from coupled_adam.report.run_files import curve_of
from coupled_adam.report.study_plans import read_plans
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.results import Result, read_results
from coupled_adam.study.trials import Trial

KEY = "optimizer.tables.lr_factor"
FAMILY = {
    "partial y=0.25 mean-free": {"row_exponent": 0.25, "mean_free": True},
    "factored": {"row_exponent": 1.0},
    "factored b1=0": {"row_exponent": 1.0},
    "per-row": {"row_exponent": 1.0, "column_exponent": 0.0},
    "per-table": {"column_exponent": 0.0},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("standard", "standard b2=0.99", "mu-loss", "z-loss", "soft cap 30"), STANDARD),
    "standard centred": {**STANDARD, "centre": True},
    "coupled": COUPLED,
    **{name: {**COUPLED, **settings} for name, settings in FAMILY.items()},
    "sgd": sgd(300),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Thirteen optimizers with two seeds. Six of them have nearly the same loss and r_cos."""
    folder = fabricate(tmp_path_factory.mktemp("thirteen") / "study", optimizers=OPTIMIZERS, seeds=(1, 2))
    generator = np.random.default_rng(1)
    found = []
    for run in read_results(folder):
        place = list(OPTIMIZERS).index(run.optimizer)
        bins = {
            f"frequency_{key}_{number}": float(generator.normal(2 * (key == "loss"), 0.5))
            for key in ("loss", "calibration")
            for number in range(1, 11)
        }
        loss = 4.2 + (0.001 * place if place < 6 else 0.05 * place) + 0.001 * run.seed
        found.append(replace(run, metrics={**run.metrics, "loss": loss, "r_cos": 20.0 + 3 * max(0, place - 6), **bins}))
    return found


@pytest.fixture(scope="module")
def grid(results: list[Result]) -> Grid:
    return gather_grid(results)


def laid_out(figure: Figure | None) -> Figure:
    assert figure is not None
    FigureCanvasAgg(figure).draw()
    return figure


def inside(figure: Figure, boxes: Sequence[Bbox]) -> bool:
    width, height = figure.get_size_inches() * figure.dpi
    return all(box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1 for box in boxes)


def test_the_study_of_rivals_has_as_many_optimizers_as_these_tests() -> None:
    assert len({cell.optimizer for cell in cells_of(load_study("rivals"))}) == len(OPTIMIZERS) == 13


def test_every_optimizer_has_a_colour_of_its_own(grid: Grid) -> None:
    found = looks(grid.variants)
    assert len({look.colour for look in found.values()}) == 13
    # The standard optimizer and Coupled Adam look as in a study of two.
    of_two = looks([variant for variant in grid.variants if variant.name in ("standard", "coupled")])
    assert {name: found[name] for name in of_two} == of_two


def test_the_legend_has_columns_and_stays_within_the_figure(grid: Grid) -> None:
    with figure_style():
        figure = laid_out(draw_validation_loss(grid))
    [legend] = figure.legends
    texts = legend.get_texts()
    assert len(texts) == 13
    boxes = [text.get_window_extent() for text in texts]
    assert len({round(box.x0) for box in boxes}) > 1
    assert inside(figure, [legend.get_window_extent()])
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


def test_numbers_of_close_points_share_a_label_and_none_overlap(grid: Grid) -> None:
    with figure_style():
        figure = laid_out(draw_ranking(grid))
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))
        assert inside(figure, boxes)
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "1\N{EN DASH}6",
        *map(str, range(7, 14)),
    ]


def test_a_loss_far_above_all_others_is_an_arrow_and_does_not_press_them_into_a_strip(results: list[Result]) -> None:
    far = [replace(run, metrics=run.metrics | {"loss": 90.0}) if run.optimizer == "sgd" else run for run in results]
    with figure_style():
        figure = laid_out(draw_ranking(gather_grid(far)))
        [caption] = [each.caption for each in draw_figures(gather_grid(far), only={"ranking"})]
    others = [np.mean([run.metrics["loss"] for run in far if run.optimizer == name]) for name in OPTIMIZERS]
    span = np.ptp(sorted(others)[:-1])
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert high - low < 2 * span
        assert "13: 90.00" in [text.get_text() for text in axes.texts]
        assert inside(figure, [text.get_window_extent() for text in axes.texts])
    assert [text.get_text().split()[0] for text in figure.legends[0].get_texts()] == [*map(str, range(1, 14))]
    assert "arrow" in caption


def test_loss_by_frequency_is_a_map_with_the_numbers_of_every_optimizer_and_bin(
    grid: Grid, results: list[Result]
) -> None:
    with figure_style():
        figure = laid_out(draw_by_frequency(grid))
    upper, lower = figure.axes
    for axes, key, names in ((upper, "loss", list(OPTIMIZERS)[1:]), (lower, "calibration", list(OPTIMIZERS))):
        rows = [label.get_text() for label in axes.get_yticklabels()]
        assert sorted(rows) == sorted(names)
        shown = {text.get_position(): float(text.get_text().replace("\N{MINUS SIGN}", "-")) for text in axes.texts}
        assert len(shown) == 10 * len(names)
        for (number, row), value in shown.items():
            means = {
                name: np.mean([run.metrics[f"frequency_{key}_{number}"] for run in results if run.optimizer == name])
                for name in (rows[int(row)], "standard")
            }
            expected = means[rows[int(row)]] - (means["standard"] if key == "loss" else 0)
            assert value == pytest.approx(expected, abs=0.0051)
        boxes = [text.get_window_extent() for text in axes.texts]
        beside = [(a, b) for a, b in itertools.pairwise(boxes) if abs(a.y0 - b.y0) < 2]
        assert not any(a.overlaps(b) for a, b in beside)
    assert set(FORMS) == {"markers", "maps"}


def test_a_map_gets_wider_with_long_names_so_that_no_number_touches_another(results: list[Result]) -> None:
    long = "factored mean-free b1=0 b2=0.99"
    renamed = [replace(run, optimizer=long) if run.optimizer == "factored" else run for run in results]
    with figure_style():
        figure = laid_out(draw_by_frequency(gather_grid(renamed)))
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        beside = [(a, b) for a, b in itertools.pairwise(boxes) if abs(a.y0 - b.y0) < 2]
        assert not any(a.overlaps(b) for a, b in beside)
        assert inside(figure, [axes.title.get_window_extent(), axes._left_title.get_window_extent()])


def test_differences_in_validation_loss_are_those_between_runs_with_the_same_seed(
    grid: Grid, results: list[Result]
) -> None:
    figure = draw_validation_difference(grid)
    assert figure is not None
    lines = {line.get_label(): line for line in figure.axes[0].lines if line.get_ydata()[0] != 0}  # not that at zero
    assert len(lines) == 12
    by_run = {(run.optimizer, run.seed): curve_of(run.run_folder, "val", "loss") for run in results}
    steps = [step for step in by_run["coupled", 1] if step >= 60]  # without the first fifth of 300 steps
    expected = [
        np.mean([by_run["sgd", seed][step] - by_run["standard", seed][step] for seed in (1, 2)]) for step in steps
    ]
    assert lines["sgd"].get_xdata().tolist() == steps
    assert lines["sgd"].get_ydata() == pytest.approx(expected)
    alone = gather_grid([run for run in results if run.optimizer == "standard"])
    assert draw_validation_difference(alone) is None


@pytest.fixture(scope="module")
def page(results: list[Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page without its figures, which take long to draw."""
    candidates = [
        replace(
            each,
            seed=0,
            cell=f"{each.cell}-{value}",
            metrics={"val_loss": 4.0 + abs(value - 3)},
            trial=Trial(KEY, value, True, each.cell),
        )
        for each in results
        if each.seed == 1
        for value in (1.0, 3.0, 9.0)
    ]
    reported = [replace(each, trial=Trial(KEY, 3.0, False, each.cell, None, 3)) for each in results]
    folder = tmp_path_factory.mktemp("page")
    contents = contents_of([*candidates, *reported], read_plans([results[0].folder], results))
    path = folder / "report.html"
    path.write_text(render_report(contents, [], folder))
    return path


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_no_table_scrolls_sideways_and_the_legend_has_the_values(page: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(page, 1280, 900)
        browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert browser.problems == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
        wide = browser.evaluate(
            "Array.from(document.querySelectorAll('.wide')).filter((each) => each.scrollWidth > each.clientWidth)"
            ".map((each) => each.getAttribute('aria-label'))"
        )
        assert wide == []
        rows = browser.evaluate(
            "JSON.stringify(Array.from(document.querySelectorAll('#legend tr'),"
            " (row) => Array.from(row.children, (cell) => cell.textContent)))"
        )
        head, *body = json.loads(rows)
        assert len(body) == 13
        assert "at step 300" in head[0]
        place = head.index("mean-embedding ratio")
        assert {float(row[place]) for row in body} == {0.85, 0.02}  # as fabricated
        faded = "document.querySelectorAll('#curves polyline.aside').length"
        browser.evaluate("document.querySelectorAll('#legend tbody tr')[2].dispatchEvent(new Event('pointerenter'))")
        lines = browser.evaluate("document.querySelectorAll('#curves polyline').length")
        assert browser.evaluate(faded) == lines - browser.evaluate("document.querySelectorAll('#curves svg').length")
        browser.open(page, 400, 800)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400


def test_selected_settings_have_a_row_per_optimizer_and_a_column_per_value(page: Path) -> None:
    table = page.read_text().partition('id="table-selection"')[2].partition("</table>")[0]
    rows = table.split('<th scope="row"')[1:]
    assert len(rows) == 13
    assert all("<b>4.000</b>" in row and "6.000" in row and "10.000" in row for row in rows)


def test_the_page_names_each_of_many_baselines_once(page: Path) -> None:
    text = page.read_text()
    for name in ("primary", "crossing"):
        table = text.partition(f'id="table-{name}"')[2].partition("</table>")[0]
        headings = [part.partition("</span>")[0] for part in table.split("<span>")[1:]]
        standards = [name for name in OPTIMIZERS if OPTIMIZERS[name] == STANDARD]
        assert {heading.partition("against ")[2] for heading in headings} >= set(standards)
        assert len(headings) == len(set(headings))
