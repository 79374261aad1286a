"""The theory in a study: milestones, metrics, measured once, added later, in tables, figures and report."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from study_evaluations import by_label, do
from study_runs import ADAMW, COUPLED, plan, write_study
from typer.testing import CliRunner

from coupled_adam.base.extras import install_command
from coupled_adam.cli import app
from coupled_adam.config.loading import parse_settings
from coupled_adam.config.run_config import Config
from coupled_adam.config.study_config import load_study, with_settings
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.metrics import METRICS, TASKS
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_writer import write_report
from coupled_adam.report.result_tables import build_tables
from coupled_adam.study import measurement, theory_evaluation
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import is_measured
from coupled_adam.study.results import RESULTS_FILE, Result, read_results, to_json
from coupled_adam.theory import measure
from coupled_adam.theory.record import PUBLISHED
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.training import run

STANDARD, OTHER = "small-1.536k-standard/seed-1", "small-1.536k-coupled/seed-1"
ASKING = ("evaluation.theory=true", "evaluation.theory_batches=2")
FIGURES = ("theory_second_moment", "theory_constant", "theory_update_sums")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with two milestones per run and its theory measured in two batches; one seed of each optimizer."""
    folder = tmp_path_factory.mktemp("measured")
    file = write_study(folder, ADAMW + COUPLED, checkpoints={"milestones": 2})
    ended = do(file, folder / "out", *ASKING, only=("*/seed-1",))
    assert ended == {STANDARD: ("finished", ""), OTHER: ("finished", "")}
    return folder


def copied(measured: Path, tmp_path: Path) -> Path:
    """A copy of the study that tests may change."""
    shutil.copytree(measured / "out", tmp_path / "out")
    return tmp_path / "out"


def counted(monkeypatch: pytest.MonkeyPatch, *, stop_at: int | None = None) -> list[int]:
    """Record the measured checkpoints; raise Ctrl-C after `stop_at` of them."""
    measure_checkpoint, found = measure.measure_checkpoint, []

    def noted(*arguments: Any, step: int, **options: Any) -> Any:
        if len(found) == stop_at:
            raise KeyboardInterrupt
        found.append(step)
        return measure_checkpoint(*arguments, step=step, **options)

    monkeypatch.setattr(measure, "measure_checkpoint", noted)
    return found


def forbidden(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("this was done before")


def test_metrics_of_the_theory_are_means_and_largest_values_over_the_checkpoints(measured: Path) -> None:
    for result in read_results(measured / "out"):
        theory = TheoryFolder(result.run_folder).read_run()
        assert [each.step for each in theory.checkpoints] == [6, 12]
        first, last = theory.checkpoints
        metrics = result.metrics
        assert (metrics["theory_checkpoints"], metrics["theory_batches"]) == (2, 2)
        assert metrics["theory_gradient_sum"] == max(*first.gradient_sums["output"], *last.gradient_sums["output"])
        assert metrics["theory_gradient_sum"] < 1e-6
        assert metrics["theory_identity_error"] == max(first.identity_error, last.identity_error)
        expected = {
            "theory_second_moment_r2": [each.fits["second_moment"].r2 for each in (first, last)],
            "theory_second_moment_A": [each.fits["second_moment"].A for each in (first, last)],
            "theory_x_true_mutual_information": [each.fits["x_true"].mutual_information for each in (first, last)],
            "theory_updates_sgd": [each.updates[0].total for each in (first, last)],
            "theory_updates_adam": [each.updates[1].total for each in (first, last)],
            "theory_updates_coupled": [each.updates[2].total for each in (first, last)],
            "theory_updates_coupled_input": [each.updates[2].input for each in (first, last)],
            "theory_updates_coupled_output": [each.updates[2].output for each in (first, last)],
        }
        for key, (one, two) in expected.items():
            assert math.isclose(metrics[key], (one + two) / 2), key
        # Loss and embeddings are measured as usual.
        assert {"loss", "iso", "train_loss"} <= metrics.keys()


def test_a_study_stopped_between_checkpoints_measures_none_of_them_twice(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, file = copied(measured, tmp_path), measured / "study.toml"
    three = ("evaluation.theory=true", "evaluation.theory_batches=3")
    with monkeypatch.context() as patch:
        first = counted(patch, stop_at=1)
        with pytest.raises(KeyboardInterrupt):
            do(file, out, *three, only=(STANDARD,))
    monkeypatch.setattr(run, "run_training", forbidden)
    for name in ("loss_over", "measure"):
        monkeypatch.setattr(measurement, name, forbidden)
    before = by_label(read_results(out))[STANDARD].metrics
    second = counted(monkeypatch)
    assert do(file, out, *three, only=(STANDARD,)) == {STANDARD: ("finished", "")}
    assert (first, second) == ([6], [12])
    after = by_label(read_results(out))[STANDARD].metrics
    assert after["theory_batches"] == 3
    assert after["theory_second_moment_A"] != before["theory_second_moment_A"]
    assert after["loss"] == before["loss"]
    shutil.rmtree(out / "runs" / STANDARD / "checkpoints")  # a result that has everything needs no weights
    assert do(file, out, *three, only=(STANDARD,)) == {}


def test_a_run_trained_without_milestones_has_the_theory_of_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write_study(tmp_path, ADAMW), tmp_path / "out"
    do(file, out, only=(STANDARD,))
    assert "theory_batches" not in by_label(read_results(out))[STANDARD].metrics
    monkeypatch.setattr(run, "run_training", forbidden)
    status, note = do(file, out, *ASKING, only=(STANDARD,))[STANDARD]
    assert status == "finished"
    assert re.search(r"\bmilestones\b.*\bstep 12\b", note), note
    result = by_label(read_results(out))[STANDARD]
    assert result.metrics["theory_checkpoints"] == 1
    assert do(file, out, *ASKING, only=(STANDARD,)) == {}
    # A single checkpoint measured by `theory RUN` is not the theory of the run.
    command = ["theory", str(result.run_folder), "--checkpoint", "12", "--no-page"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert by_label(read_results(out))[STANDARD] == result


def test_theory_of_a_run_adds_to_the_results_of_its_study(measured: Path, tmp_path: Path) -> None:
    out = copied(measured, tmp_path)
    result = CliRunner().invoke(app, ["theory", str(out / "runs" / STANDARD), "--batches", "1", "--no-page"])
    assert result.exit_code == 0, result.output
    assert f": {out}" in "".join(result.output.splitlines())
    rows = by_label(read_results(out))
    assert (rows[STANDARD].metrics["theory_batches"], rows[OTHER].metrics["theory_batches"]) == (1, 2)
    theory = TheoryFolder(out / "runs" / STANDARD).read_run()
    assert rows[STANDARD].metrics["theory_second_moment_r2"] == theory.summary["second_moment_r2"].mean


def test_a_study_of_the_theory_keeps_ten_milestones_by_default(tmp_path: Path) -> None:
    plain = plan(write_study(tmp_path, ADAMW))[1]
    study, _ = with_settings(load_study(str(tmp_path / "study.toml")), ASKING)
    cells = cells_of(study)
    assert {each.config.checkpoints.milestones for each in plain} == {0}
    assert {each.config.checkpoints.milestones for each in cells} == {10}
    assert [each.config_hash for each in plain] == [each.config_hash for each in cells]
    three = cells_of(study, parse_settings(["checkpoints.milestones=3"], Config))
    assert {each.config.checkpoints.milestones for each in three} == {3}
    with pytest.raises(
        ValueError, match=r"evaluation\.theory .*\b9 steps.*training\.tokens.*checkpoints\.milestones = 9\b"
    ):
        cells_of(study, parse_settings(["training.tokens=1152"], Config))


def test_a_result_with_other_batches_is_measured_again() -> None:
    metrics = {"train_loss": 1.0, "loss": 1.0, "iso": 0.5}
    asking = EvaluationSection(theory=True)
    assert not is_measured(metrics, asking)
    assert is_measured({**metrics, "theory_batches": 20.0}, asking)
    assert not is_measured({**metrics, "theory_batches": 5.0}, asking)


def test_missing_scikit_learn_is_reported_before_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory_evaluation, "has_scikit_learn", lambda: False)
    (note,) = theory_evaluation.notes_on_theory(EvaluationSection(theory=True))
    assert re.search("^scikit-learn .*mutual information", note), note
    assert list(theory_evaluation.notes_on_theory(EvaluationSection())) == []


def fabricated(measured: Path) -> list[Result]:
    """Three seeds of each optimizer, with numbers that are easy to follow."""
    return [
        replace(
            result,
            seed=seed,
            metrics={
                **result.metrics,
                "theory_second_moment_A": 4e-5 + 1e-6 * seed,
                "theory_updates_adam": 0.5 + 0.01 * seed,
                "theory_x_true_mutual_information": None,
            },
        )
        for result in read_results(measured / "out")
        for seed in (1, 2, 3)
    ]


def test_table_of_the_theory_has_means_over_seeds_and_the_papers_values(measured: Path) -> None:
    results = fabricated(measured)
    table = next(table for table in build_tables(gather_grid(results)) if table.name == "theory")
    keys = [column.key for column in table.columns]
    assert "theory_x_true_mutual_information" not in keys
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    assert [row["optimizer"].text for row in rows] == ["standard", "coupled", "the paper"]
    assert [row["checkpoints"].text for row in rows[:2]] == ["2", "2"]
    for row in rows[:2]:
        assert row["seeds"].text == "3"
        assert row["theory_second_moment_A"].text == "4.2(1)e-5"
        assert row["theory_updates_adam"].text == "0.52(1)"
        assert math.isclose(row["theory_updates_adam"].numbers["mean"], 0.52)
    assert rows[-1]["theory_second_moment_r2"].text == "0.85(7)"
    assert rows[-1]["theory_second_moment_mutual_information"].numbers["mean"] == 1.18
    assert {key.removeprefix("theory_") for key in keys} >= PUBLISHED.keys() - {"x_true_mutual_information"}
    without = [replace(result, metrics={"loss": 1.0}) for result in results]
    assert "theory" not in {table.name for table in build_tables(gather_grid(without))}


def test_report_shows_theory_and_tasks(measured: Path, tmp_path: Path) -> None:
    out = copied(measured, tmp_path)
    scores = {task.key: 0.3 for task in TASKS} | {"acc": 0.3}
    rows = [replace(each, metrics={**each.metrics, **scores}) for each in read_results(out)]
    (out / RESULTS_FILE).write_text("".join(to_json(row) + "\n" for row in rows))
    page = write_report([out], out).read_text()
    for words in (
        str(escape(install_command("eval,study"))),
        'id="table-theory"',
        *(f'id="figure-{name}"' for name in FIGURES),
        METRICS["hellaswag"].heading,
        METRICS["acc"].label,
    ):
        assert words in page, words
    for name in (*FIGURES, "downstream"):
        assert (out / "figures" / f"{name}.svg").is_file(), name
    assert "theory_updates_coupled_input_mean" in (out / "tables" / "theory.csv").read_text()


def test_a_damaged_theory_removes_only_its_figure(measured: Path, tmp_path: Path) -> None:
    from coupled_adam.report.figures import theory_figures as figures

    out = copied(measured, tmp_path)
    results = read_results(out)
    draws = (figures.draw_second_moments, figures.draw_constants, figures.draw_sums)
    assert all(draw(gather_grid(results)) is not None for draw in draws)
    (out / "runs" / STANDARD / "theory" / "step-000000012.npz").write_bytes(b"")
    assert figures.draw_second_moments(gather_grid(results)) is not None  # of the other run
    for result in results:
        (result.run_folder / "theory" / "theory.json").write_text("{}")
    assert all(draw(gather_grid(results)) is None for draw in draws)
    assert all(draw(gather_grid([])) is None for draw in draws)


def test_a_single_checkpoint_does_not_make_a_curve(measured: Path, tmp_path: Path) -> None:
    from coupled_adam.report.figures import theory_figures as figures

    results = read_results(copied(measured, tmp_path))
    for result in results:
        folder = TheoryFolder(result.run_folder)
        whole = folder.read_run()
        folder.write_run(replace(whole, checkpoints=whole.checkpoints[-1:]))
    assert figures.draw_constants(gather_grid(results)) is None
    assert figures.draw_sums(gather_grid(results)) is None
    assert figures.draw_second_moments(gather_grid(results)) is not None


def test_the_theory_of_several_models_has_a_line_for_each(measured: Path) -> None:
    from coupled_adam.report.figures.theory_figures import draw_constants

    results = read_results(measured / "out")
    larger = [replace(result, model="large", parameters=10**6) for result in results]
    figure = draw_constants(gather_grid([*results, *larger]))
    assert figure is not None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label.split(" (")[0] for label in labels] == ["small", "large"]
