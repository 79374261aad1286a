"""The forest plot of the primary comparisons, checked with scipy's paired t-test."""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import COUPLED, STANDARD, fabricate, scaled

from coupled_adam.base.captioned_figure import PAPER, figure_style
from coupled_adam.metrics import NATS
from coupled_adam.report.figures.figure_list import draw_figures
from coupled_adam.report.figures.forest import (
    MOST_ROWS,
    NOT_SIGNIFICANT,
    NOT_TESTED,
    SIGNIFICANT,
    ForestGroup,
    ForestRow,
    draw_forest,
    draw_primary_differences,
)
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import primary_comparisons
from coupled_adam.report.report_writer import write_report
from coupled_adam.study.results import Result, read_results

NAME = "primary_differences"
SIZES = (("30M", 30_000_000, 82_000_000), ("30M", 30_000_000, 262_000_000))
# Differences from the standard optimizer: clearly lower, within the noise.
SHIFTS = {"standard": 0.0, "coupled": -0.1, "scaled": 0.0}
NOISE = {"standard": (0.0, 0.02, -0.01), "coupled": (0.001, 0.02, -0.011), "scaled": (0.02, -0.01, 0.004)}


def three_optimizers(folder: Path) -> list[Result]:
    """Three optimizers at two sizes with known losses."""
    optimizers = {"standard": STANDARD, "coupled": COUPLED, "scaled": scaled(1)}
    folder = fabricate(folder, optimizers=optimizers, sizes=SIZES, with_runs=False)
    return [
        replace(run, metrics={**run.metrics, "loss": 4 + SHIFTS[run.optimizer] + NOISE[run.optimizer][run.seed - 1]})
        for run in read_results(folder)
    ]


def drawn_or_not(results: list[Result]) -> Figure | None:
    grid = gather_grid(results)
    with figure_style():
        return draw_primary_differences(grid, primary_comparisons(grid))


def drawn(results: list[Result]) -> Figure:
    figure = drawn_or_not(results)
    assert figure is not None
    return figure


def points(axes: Axes) -> list[tuple[float, tuple[float, float] | None, bool, str]]:
    """Difference, interval, whether it is filled, and colour of every row, from top to bottom."""
    found = []
    for marker, _, bars in axes.containers:
        if len(marker.get_xdata()) == 1:  # not an entry of the legend
            ends = tuple(bars[0].get_segments()[0][:, 0]) if bars else None
            is_filled = to_hex(marker.get_markerfacecolor()) != PAPER
            row = (marker.get_xdata()[0], ends, is_filled, to_hex(marker.get_color()))
            found.append((marker.get_ydata()[0], row))
    return [row for _, row in sorted(found)]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_points_and_intervals_are_those_of_paired_tests_and_filled_if_significant(tmp_path: Path) -> None:
    results = three_optimizers(tmp_path / "study")
    figure = drawn(results)
    [axes] = figure.axes
    first = np.array(NOISE["standard"])
    rows = points(axes)
    assert len(rows) == 4
    colours = looks(gather_grid(results).variants)
    for row, name in zip(rows, ("coupled", "scaled") * 2, strict=True):
        test = stats.ttest_rel(np.array(NOISE[name]) + SHIFTS[name], first)
        low, high = test.confidence_interval(0.95)
        difference, interval, is_filled, colour = row
        assert difference == pytest.approx((np.array(NOISE[name]) + SHIFTS[name] - first).mean())
        assert interval == pytest.approx((low, high))
        assert is_filled == (name == "coupled")
        assert colour == colours[name].colour
    assert legend(figure) == [SIGNIFICANT, NOT_SIGNIFICANT]


def test_rows_are_labelled_grouped_by_size_and_the_axis_tells_the_direction(tmp_path: Path) -> None:
    [axes] = drawn(three_optimizers(tmp_path / "study")).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Coupled Adam", "scaled"] * 2
    texts = {text.get_text(): text for text in axes.texts}
    heights = [texts[f"N = 30M, D = {size}"].xy[1] for size in ("82M", "262M")]
    places = list(axes.get_yticks())
    assert heights[0] < places[0] < places[1] < heights[1] < places[2] < places[3]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is at the top
    better, worse = (next(texts[text] for text in texts if word in text) for word in ("better", "worse"))
    assert better.get_horizontalalignment() == "right"
    assert worse.get_horizontalalignment() == "left"
    assert better.xy[0] == worse.xy[0] == 0
    assert "standard Adam" in axes.get_xlabel()
    assert NATS in axes.get_xlabel()


def test_one_common_seed_is_a_hollow_point_without_interval_at_the_difference_of_that_seed(tmp_path: Path) -> None:
    results = three_optimizers(tmp_path / "study")
    some = [run for run in results if run.tokens == SIZES[0][2] and (run.optimizer == "standard" or run.seed == 2)]
    figure = drawn(some)
    for row, name in zip(points(figure.axes[0]), ("coupled", "scaled"), strict=True):
        expected = SHIFTS[name] + NOISE[name][1] - NOISE["standard"][1]
        assert row[:3] == (pytest.approx(expected), None, False)
    assert legend(figure) == [NOT_TESTED]
    assert not any("D = " in text.get_text() for text in figure.axes[0].texts)  # a single size needs no heading


def test_without_a_common_seed_or_a_standard_optimizer_there_is_no_figure(tmp_path: Path) -> None:
    results = three_optimizers(tmp_path / "study")
    for kept in (
        [run for run in results if run.optimizer != "standard"],
        [run for run in results if run.optimizer == "standard"],
        [run for run in results if (run.optimizer == "standard") == (run.seed == 1)],
    ):
        assert drawn_or_not(kept) is None


def test_several_baselines_have_a_group_each(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "with bias": {**STANDARD, "output_bias": "unigram"}, "coupled": COUPLED}
    results = read_results(fabricate(tmp_path / "study", optimizers=optimizers, with_runs=False))
    [axes] = drawn(results).axes
    headings = [text.get_text() for text in axes.texts if text.get_text().startswith("against")]
    assert headings == ["against standard Adam", "against with bias"]
    assert len(points(axes)) == 2


def rows_of(count: int, label: str = "row") -> list[ForestRow]:
    return [
        ForestRow(f"{label} {i}", 0.01 * i - 0.1, (0.01 * i - 0.15, 0.01 * i), False, "#3d87c9") for i in range(count)
    ]


def test_the_figure_grows_with_its_rows_and_labels_do_not_overlap() -> None:
    with figure_style():
        few, many = (draw_forest([ForestGroup("", rows_of(count))], "difference") for count in (3, 20))
        long = draw_forest([ForestGroup("heading", rows_of(4, "a long name " * 6))], "difference")
        for figure in (few, many, long):
            figure.draw_without_rendering()
            boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
            assert all(lower.y1 <= upper.y0 + 1 for upper, lower in itertools.pairwise(boxes))
            assert min(box.x0 for box in boxes) >= 0
            assert max(box.x1 for box in boxes) <= figure.axes[0].get_window_extent().x0
    assert many.get_figheight() - few.get_figheight() == pytest.approx(17 * 0.2, abs=0.01)


def test_arrows_mark_what_lies_outside_the_limits() -> None:
    rows = [
        ForestRow("far right", 1.06, None, False, "#3d87c9"),
        ForestRow("far left", -0.5, (-0.6, -0.4), True, "#3d87c9"),
        ForestRow("wide", 0.1, (-0.9, 0.3), False, "#3d87c9"),
    ]
    with figure_style():
        [axes] = draw_forest([ForestGroup("", rows)], "difference", limits=(-0.2, 0.4)).axes
    lines = [line for line in axes.lines if line.get_marker() in ("<", ">")]
    places = axes.get_yticks()
    assert {(line.get_marker(), line.get_ydata()[0]): line.get_xdata()[0] for line in lines} == {
        (">", places[0]): 0.4,
        ("<", places[1]): -0.2,
        ("<", places[2]): -0.2,
    }
    texts = [text.get_text() for text in axes.texts]
    assert "1.06" in texts
    assert "\N{MINUS SIGN}0.50" in texts
    assert "0.10" not in texts
    assert axes.get_xlim() == (-0.2, 0.4)


def test_more_comparisons_than_a_figure_shows_are_left_to_the_table(tmp_path: Path) -> None:
    for count, is_drawn in ((MOST_ROWS, True), (MOST_ROWS + 1, False)):
        optimizers = {"standard": STANDARD, **{f"coupled n={n}": scaled(n) for n in range(1, count + 1)}}
        results = read_results(fabricate(tmp_path / str(count), optimizers=optimizers, seeds=[1], with_runs=False))
        assert (drawn_or_not(results) is not None) == is_drawn


def test_the_page_shows_the_figure_below_the_primary_table(demo: Path) -> None:
    html, figures = demo.read_text(), demo.parent / "figures"
    for kind in ("svg", "pdf"):
        assert (figures / f"{NAME}.{kind}").stat().st_size > 1000
    assert PAPER not in (figures / f"{NAME}.svg").read_text()
    table = html.split('id="table-primary"')[1].split('id="table-')[0]
    assert f'id="figure-{NAME}"' in table
    assert html.count(f'id="figure-{NAME}"') == 1
    assert "Coupled Adam" in table
    assert re.search(r"<figcaption>\S", table)


def test_a_single_seed_has_the_figure_and_no_table(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", seeds=[1], with_runs=False)
    html = write_report([folder], tmp_path / "out").read_text()
    assert 'id="table-primary"' not in html
    assert html.index("<h2>Figures</h2>") < html.index(f'id="figure-{NAME}"') < html.index("<h2>Tables</h2>")
    assert NAME in {figure.name for figure in draw_figures(gather_grid(read_results(folder)))}
