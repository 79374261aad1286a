"""Reports of three or more optimizers: each compared with the standard and with Coupled Adam, and their names."""

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated_study import COUPLED, STANDARD, fabricate
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from coupled_adam.base.captioned_figure import figure_style
from coupled_adam.report.figures.clouds import draw_clouds
from coupled_adam.report.figures.differences import draw_differences, draw_task_differences
from coupled_adam.report.figures.style import looks
from coupled_adam.report.figures.training_curves import draw_training_loss
from coupled_adam.report.grid import Grid, gather_grid, variant_of
from coupled_adam.report.page_tables import headline
from coupled_adam.report.published import find_published
from coupled_adam.report.report_writer import write_report
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.verdict import compared_pair, verdict
from coupled_adam.study.results import Result, read_results

PARTIAL = {**COUPLED, "row_exponent": 0.25, "column_exponent": 1.0, "mean_free": True}
NAME, LABEL = "partial y=0.25 mean-free", "partially coupled (y = 0.25, mean-free)"
THREE = {"standard": STANDARD, "coupled": COUPLED, NAME: PARTIAL}
SIZES = (("30M", 30_331_776, 82_000_000), ("30M", 30_331_776, 262_000_000))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = fabricate(tmp_path_factory.mktemp("three") / "study", optimizers=THREE, sizes=SIZES)
    return [_lower(result) if result.optimizer == NAME else result for result in read_results(folder)]


def _lower(result: Result) -> Result:
    """The third is by far the best, so that the tests can detect it."""
    result.metrics["loss"] = (result.metrics["loss"] or 0.0) - 0.3
    return result


@pytest.fixture(scope="module")
def grid(results: list[Result]) -> Grid:
    return gather_grid(results)


def losses(results: list[Result], optimizer: str, tokens: int) -> np.ndarray:
    found = [run for run in results if run.optimizer == optimizer and run.tokens == tokens]
    return np.array([run.metrics["loss"] for run in sorted(found, key=lambda run: run.seed)])


@pytest.mark.parametrize(
    ("settings", "role"),
    [
        ({}, "coupled"),
        ({"row_exponent": 0.0, "column_exponent": 1.0, "mean_free": False}, "coupled"),
        ({"scale_exponent": 2.0}, "scaled"),
        ({"row_exponent": 0.25}, "family"),
        ({"row_exponent": 1.0, "scale_exponent": 2.0}, "family"),
        ({"mean_free": True}, "family"),
        ({"row_exponent_start": 1.0, "row_exponent": 0.0, "anneal": 5}, "family"),
    ],
)
def test_role_follows_the_settings_and_old_results_have_none(settings: dict[str, Any], role: str) -> None:
    assert variant_of("any", {"embeddings": "coupled", **settings}).role == role


def test_names_are_short_in_tables_and_long_in_figures(grid: Grid) -> None:
    main = next(table for table in build_tables(grid) if table.name == "main")
    assert {row[2].text for row in main.rows} == {"standard", "coupled", NAME}
    assert [variant.label for variant in grid.variants] == ["standard Adam", "Coupled Adam", LABEL]
    figure = draw_training_loss(grid)
    assert figure is not None
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"standard Adam", "Coupled Adam", LABEL}


def test_lowest_is_bold_only_if_it_beats_both_others(grid: Grid) -> None:
    main = next(table for table in build_tables(grid) if table.name == "main")
    place = [column.key for column in main.columns].index("loss")
    assert {(row[2].text, row[place].bold) for row in main.rows} == {
        ("standard", False),
        ("coupled", False),
        (NAME, True),
    }


def test_each_is_compared_with_the_standard_and_with_coupled_adam_also_by_seed(
    grid: Grid, results: list[Result]
) -> None:
    table = next(table for table in build_tables(grid) if table.name == "comparisons")
    keys = [column.key for column in table.columns]
    found = {
        (row[0].text, row[2].text, row[3].text): row[keys.index("p_paired")].numbers["value"]
        for row in table.rows
        if row[4].text.startswith("loss")
    }
    pairs = {("standard", "coupled"), ("standard", NAME), ("coupled", NAME)}
    assert {key[1:] for key in found} == pairs
    assert len(found) == 2 * len(pairs)
    for tokens, short in ((82_000_000, "82M"), (262_000_000, "262M")):
        for first, second in pairs:
            expected = stats.ttest_rel(
                losses(results, second, tokens), losses(results, first, tokens), alternative="less"
            ).pvalue
            assert found[short, first, second] == pytest.approx(expected, rel=1e-9)


def test_crossings_compare_with_the_standard_and_the_family_with_coupled_adam(grid: Grid) -> None:
    table = next(table for table in build_tables(grid) if table.name == "crossing")
    assert {(row[2].text, row[3].text) for row in table.rows} == {
        ("standard", "coupled"),
        ("standard", NAME),
        ("coupled", NAME),
    }


def test_verdict_of_three_names_the_lowest_and_those_it_beats(grid: Grid) -> None:
    assert compared_pair(grid) is None
    found = verdict(grid)
    assert found.outcome == "better"
    assert LABEL in found.loss


def test_differences_are_drawn_for_every_pair(grid: Grid, results: list[Result]) -> None:
    figure = draw_differences(grid)
    assert figure is not None
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert len(panels) == 3
    drawn = {
        round(float(line.get_ydata()[0]), 6) for axes in panels for line in axes.lines if len(line.get_xdata()) == 1
    }
    expected = {
        round(float(losses(results, second, tokens).mean() - losses(results, first, tokens).mean()), 6)
        for first, second in (("standard", "coupled"), ("standard", NAME), ("coupled", NAME))
        for tokens in (82_000_000, 262_000_000)
    }
    assert expected <= drawn
    assert draw_task_differences(grid) is None  # no tasks


def test_titles_of_three_clouds_do_not_overlap_each_other_or_the_legend(grid: Grid) -> None:
    with figure_style():
        figure = draw_clouds(grid)
        assert figure is not None
        FigureCanvasAgg(figure).draw()
    assert [" ".join(axes.get_title().split()) for axes in figure.axes] == ["standard Adam", "Coupled Adam", LABEL]
    boxes = [axes.title.get_window_extent() for axes in figure.axes]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert max(box.y1 for box in boxes) < figure.legends[0].get_window_extent().y0


@pytest.mark.parametrize("draw", [draw_differences, draw_task_differences])
def test_titles_of_the_differences_do_not_overlap(draw: Callable[[Grid], Figure | None], tmp_path: Path) -> None:
    metrics = ("loss", "acc", "arc_easy", "race")
    folder = fabricate(tmp_path / "study", optimizers=THREE, sizes=SIZES, metrics=metrics, with_runs=False)
    with figure_style():
        figure = draw(gather_grid(read_results(folder)))
        assert figure is not None
        FigureCanvasAgg(figure).draw()
    titles = [text for axes in figure.axes for text in (axes.title, axes._left_title) if text.get_text()]
    boxes = [text.get_window_extent() for text in titles]
    assert len(boxes) == 3
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width for box in boxes)


def test_every_optimizer_has_its_own_colour_and_line_for_any_number() -> None:
    many = {f"partial y={y}": {**COUPLED, "row_exponent": y} for y in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)}
    variants = [variant_of(name, settings) for name, settings in {**THREE, **many}.items()]
    found = looks(variants)
    assert len({(look.colour, look.line) for look in found.values()}) == len(variants)


def test_one_size_of_three_optimizers_has_them_side_by_side_and_the_best_bold(results: list[Result]) -> None:
    side_by_side = headline(gather_grid([run for run in results if run.tokens == 82_000_000]))
    assert side_by_side is not None
    assert list(side_by_side.optimizers) == ["standard Adam", "Coupled Adam", LABEL]
    loss = side_by_side.rows[0]
    assert ["<b>" in cell for cell in loss.cells] == [False, False, True]


def test_members_of_the_family_have_no_published_numbers() -> None:
    size = (5_000_000_000, 124_373_760)
    assert find_published("loss", *size, COUPLED) is not None
    assert find_published("loss", *size, PARTIAL) is None
    assert find_published("loss", *size, {**COUPLED, "mean_free": True}) is None


def test_variants_are_sorted_standard_first_then_coupled_then_the_family(tmp_path: Path) -> None:
    names = {
        "sgd": {**STANDARD, "embeddings": "sgd", "sgd_factor": 300.0},
        "per-table": {**COUPLED, "column_exponent": 0.0},
        "factored": {**COUPLED, "row_exponent": 1.0},
        NAME: PARTIAL,
        "partial y=0.25": {**PARTIAL, "mean_free": False},
        "coupled n=2": {**COUPLED, "scale_exponent": 2.0},
        "coupled": COUPLED,
        "standard": STANDARD,
    }
    found = sorted((variant_of(*each) for each in names.items()), key=lambda variant: variant.order)
    assert [variant.name for variant in found] == [
        *("standard", "coupled", "coupled n=2", "partial y=0.25", NAME, "factored", "per-table", "sgd")
    ]


def test_a_complete_report_of_four_optimizers_is_written(tmp_path: Path) -> None:
    optimizers = {**THREE, "factored": {**COUPLED, "row_exponent": 1.0}}
    metrics = ("loss", "acc", "iso", "mu_norm_ratio", "kappa")
    folder = fabricate(tmp_path / "study", optimizers=optimizers, sizes=SIZES, metrics=metrics)
    page = write_report([folder], folder)
    assert LABEL in page.read_text()
    with (folder / "tables" / "comparisons.csv").open() as file:
        pairs = {(row["baseline"], row["optimizer"]) for row in csv.DictReader(file)}
    assert pairs == {
        *(("standard", other) for other in ("coupled", NAME, "factored")),
        *(("coupled", other) for other in (NAME, "factored")),
    }
    assert (folder / "figures" / "results.svg").is_file()
