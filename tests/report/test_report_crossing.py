"""Crossings of the validation loss curves."""

import json
from pathlib import Path

import pytest
from fabricated_study import OPTIMIZERS, STANDARD, fabricate, scaled

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.pair_tables import Crossing, crossing
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_model import ReportTable
from coupled_adam.study.results import merge_results, read_results

STEPS = (100, 200, 300, 400)


@pytest.mark.parametrize(
    ("second", "step"),
    [
        ((6.0, 5.0, 3.9, 3.0), 300),
        ((4.0, 4.5, 3.9, 3.0), 300),  # behind again in between
        ((4.0, 4.0, 3.0, 3.0), 100),  # ahead from the first validation
        ((6.0, 6.0, 6.0, 6.0), None),
        ((4.0, 4.0, 3.9, 4.0), None),  # ahead, but not at the end
        ((5.0, 4.5, 4.0, 3.5), None),  # equal is not ahead
    ],
)
def test_a_crossing_is_the_step_after_which_the_curve_stays_below(second: tuple[float, ...], step: int | None) -> None:
    first = dict(zip(STEPS, (5.0, 4.5, 4.0, 3.5), strict=True))
    found = crossing(first, dict(zip(STEPS, second, strict=True)))
    assert found is not None
    assert found.step == step
    assert found.last_step == 400
    assert found.difference == pytest.approx(second[-1] - 3.5)


def test_curves_that_do_not_end_together_have_no_crossing() -> None:
    assert crossing({1: 5.0}, {2: 4.0}) is None
    assert crossing({}, {}) is None
    assert crossing({1: 5.0}, {}) is None
    # Half of the first is the end of the second: a step is not the same share of both.
    assert crossing({1: 5.0, 2: 4.0}, {1: 4.0}) is None
    assert crossing({1: 5.0}, {1: 4.0, 2: 3.0}) is None


def test_steps_that_only_one_curve_has_are_ignored() -> None:
    assert crossing({1: 5.0, 2: 4.0, 4: 3.0}, {1: 5.0, 3: 3.0, 4: 2.0}) == Crossing(4, 4, -1.0)


def write_validation(run_folder: Path, losses: list[float]) -> None:
    rows = [{"kind": "val", "step": step, "loss": loss} for step, loss in zip(STEPS, losses, strict=False)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_of(study: Path) -> ReportTable | None:
    return next((table for table in build_tables(gather_grid(read_results(study))) if table.name == "crossing"), None)


def test_the_table_has_the_mean_over_the_seeds_that_cross(tmp_path: Path) -> None:
    study = fabricate(tmp_path / "study", sizes=(("S", 1000, 4000),))
    ends = {("coupled", 1): 3.0, ("coupled", 2): 3.0, ("coupled", 3): 4.0}
    for result in read_results(study):
        if result.optimizer == "standard":
            losses = [5.0, 4.5, 4.0, 3.5]
        else:
            losses = [6.0, 4.4 if result.seed == 1 else 5.0, 3.9, ends["coupled", result.seed]]
        write_validation(result.run_folder, losses)
    table = table_of(study)
    assert table is not None
    (row,) = table.rows
    assert [cell.text for cell in row] == [
        *("4k", "S", "standard", "coupled", "400", "2 of 3"),
        *("250(71)", "2.5k", "0.62(18)", "-0.167(577)"),
    ]
    assert row[7].numbers["mean"] == pytest.approx(2500)


def test_each_optimizer_is_compared_only_with_the_standard_one(tmp_path: Path) -> None:
    optimizers = {**OPTIMIZERS, "coupled n=2": scaled(2)}
    study = fabricate(tmp_path / "study", optimizers=optimizers, seeds=(1,))
    for result in read_results(study):
        write_validation(result.run_folder, [5.0, 4.5, 4.0, 3.5 if result.optimizer == "standard" else 3.0])
    table = table_of(study)
    assert table is not None
    assert [(row[2].text, row[3].text, row[6].text) for row in table.rows] == [
        ("standard", "coupled", "400"),
        ("standard", "coupled n=2", "400"),
    ]


def test_a_run_whose_curve_was_cut_is_left_out_and_named(tmp_path: Path) -> None:
    study = fabricate(tmp_path / "study", sizes=(("S", 1000, 4000),), seeds=(1, 2))
    for result in read_results(study):
        losses = [5.0, 4.5, 4.0, 3.5] if result.optimizer == "standard" else [6.0, 4.4, 3.9, 3.0]
        write_validation(result.run_folder, losses[:3] if result.run.endswith("coupled/seed-2") else losses)
    table = table_of(study)
    assert table is not None
    ((*_, steps, seeds, _, tokens, share, difference),) = table.rows
    assert [cell.text for cell in (steps, seeds, tokens, share, difference)] == [
        "400",
        "1 of 1",
        "2k",
        "0.50",
        "-0.500",
    ]
    assert table.notes[-1].endswith(": standard and coupled at 4k, S (seed 2).")


def test_a_standard_optimizer_of_another_kind_is_compared_with_the_plain_one(tmp_path: Path) -> None:
    optimizers = {**OPTIMIZERS, "standard, centred": {**STANDARD, "centre": True}}
    study = fabricate(tmp_path / "study", optimizers=optimizers, sizes=(("S", 1000, 4000),), seeds=(1,))
    untied = {"untied": {**STANDARD, "tied": False}}
    twin = fabricate(tmp_path / "twin", optimizers=untied, sizes=(("S", 1500, 4000),), seeds=(1,))
    results = merge_results([study, twin])
    for result in results:
        write_validation(result.run_folder, [5.0, 4.5, 4.0, 3.5 if result.optimizer == "standard" else 3.0])
    table = next(table for table in build_tables(gather_grid(results)) if table.name == "crossing")
    pairs = {(row[2].text, row[3].text) for row in table.rows}
    # The untied version of a tied model is another model, not another optimizer.
    assert pairs == {("standard", "standard, centred"), ("standard", "coupled"), ("untied", "coupled")}


def test_without_validation_losses_there_is_no_table(tmp_path: Path) -> None:
    assert table_of(fabricate(tmp_path / "study", with_runs=False)) is None
