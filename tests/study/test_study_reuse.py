"""`study run --reuse`: finished runs of other study folders count, and are copied into the new folder."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from study_cli import study as command
from study_runs import SELECT, optimizers, plan, run_here, write_study

from coupled_adam.config.study_config import load_study
from coupled_adam.study import runner
from coupled_adam.study.results import EMBEDDINGS_FILE, read_results, to_json
from coupled_adam.training.logbook import METRICS_FILE

pytestmark = pytest.mark.usefixtures("quick_selection", "empty_folder")


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_processes", lambda: 1)


def run(*arguments: str) -> str:
    result = command("run", *arguments)
    assert result.exit_code == 0, result.output
    return result.output


def trained(out: str) -> set[str]:
    """The runs given to workers."""
    return {"/".join(path.parts[-3:-1]) for path in Path(out).glob("runs/*/*/task.json")}


def rows(out: str) -> set[tuple[str, int]]:
    return {(result.cell, result.seed) for result in read_results(Path(out))}


def test_runs_of_another_folder_count_as_finished_and_only_the_others_are_trained(tmp_path: Path) -> None:
    first = write_study(tmp_path, optimizers("best 0.002"), more=SELECT)
    run(str(first), "--out", "first")
    other = optimizers("best 0.001", more='set = { "optimizer.beta2" = 0.9 }\n')
    second = write_study(tmp_path, optimizers("best 0.002") + other, more=SELECT)
    run(str(second), "--out", "second", "--reuse", "first")
    assert trained("second")
    assert all("best-0.001" in label for label in trained("second"))
    everything = {(cell.id, cell.seed) for cell in plan(second)[1]}
    assert rows("first") < rows("second") <= everything
    assert {seed for cell, seed in rows("second") if "lr" not in cell} == {1, 2}


def test_reused_runs_are_copied_so_that_the_other_folder_may_go(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    run(study, "--out", "first")
    for path in (tmp_path / "first").glob("runs/*/*"):
        (path / METRICS_FILE).write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
        np.savez(path / EMBEDDINGS_FILE, rows=np.arange(3.0))
    run(study, "--out", "second", "--reuse", "first")
    (tmp_path / "first").rename(tmp_path / "gone")
    copies = sorted((tmp_path / "second").glob("runs/*/*"))
    assert len(copies) == 2
    for copy in copies:
        original = tmp_path / "gone" / copy.relative_to(tmp_path / "second")
        for name in (METRICS_FILE, EMBEDDINGS_FILE):
            assert (copy / name).read_bytes() == (original / name).read_bytes()
    run(study, "--out", "second")
    assert trained("second") == set()
    assert rows("second") == {(cell.id, cell.seed) for cell in plan(Path(study))[1]}


def test_runs_with_other_settings_are_not_reused(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    run(study, "--out", "first")
    run(study, "--out", "second", "--reuse", "first", "--set", "optimizer.lr=0.001")
    assert len(trained("second")) == 2


def with_losses(study_folder: Path, **losses: float) -> None:
    """Change the test losses of a study folder; keys are the first words of the optimizers' names."""
    lines = []
    for result in read_results(study_folder):
        metrics = {**result.metrics, "loss": losses[result.optimizer.split()[0]]}
        lines.append(to_json(replace(result, metrics=metrics)) + "\n")
    (study_folder / "results.jsonl").write_text("".join(lines))


def losses_of(out: str) -> set[tuple[str, float | None]]:
    return {(result.optimizer, result.metrics["loss"]) for result in read_results(Path(out))}


def test_a_run_with_another_name_and_the_same_settings_is_reused_under_the_new_name(tmp_path: Path) -> None:
    run(str(write_study(tmp_path, optimizers("old 0.002"))), "--out", "first")
    with_losses(tmp_path / "first", old=3.5)
    study = write_study(tmp_path, optimizers("new 0.001"))
    study.write_text(study.read_text().replace('name = "', 'name = "another-', 1))
    run(str(study), "--out", "second", "--reuse", "first")
    assert trained("second") == set()
    assert {result.study for result in read_results(Path("second"))} == {load_study(str(study)).name}
    assert rows("second") == {(cell.id, cell.seed) for cell in plan(study)[1]}
    assert losses_of("second") == {("new 0.001", 3.5)}


def test_of_two_runs_with_the_same_settings_the_one_of_the_same_name_is_reused(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("one 0.002", "two 0.001")))
    run(study, "--out", "first")
    with_losses(tmp_path / "first", one=1.5, two=2.5)
    run(study, "--out", "second", "--reuse", "first")
    assert trained("second") == set()
    assert losses_of("second") == {("one 0.002", 1.5), ("two 0.001", 2.5)}


def test_measurements_of_one_run_in_two_folders_are_put_together(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    run(study, "--out", "first")
    results = read_results(tmp_path / "first")
    for out, missing in (("one", "iso"), ("other", "loss")):
        halves = [{key: value for key, value in each.metrics.items() if key != missing} for each in results]
        rows = [to_json(replace(each, metrics=half)) for each, half in zip(results, halves, strict=True)]
        (tmp_path / out).mkdir()
        (tmp_path / out / "results.jsonl").write_text("".join(f"{row}\n" for row in rows))

    def done(*arguments: str) -> int:
        found = re.search(r"│ all runs +│ +\d+ │ +(\d+) │", command("run", study, "--dry-run", *arguments).output)
        assert found is not None
        return int(found.group(1))

    assert done("--out", "new", "--reuse", "one") == 0
    assert done("--out", "new", "--reuse", "one", "--reuse", "other") == len(results)


def test_a_run_that_was_started_in_the_folder_is_not_replaced(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    for out in ("first", "second"):
        run(study, "--out", out)
    own = tmp_path / "second" / "runs" / sorted(trained("second"))[0]
    (own / "evaluation.json").unlink()
    (own / "task.json").unlink()
    run(study, "--out", "second", "--reuse", "first")
    assert (own / "task.json").is_file()


def test_a_selection_decided_during_the_study_may_lead_to_reused_runs(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002"), more=SELECT))
    run(study, "--out", "whole")
    everything, of_candidates = rows("whole"), {cell.label for cell in plan(Path(study))[1] if cell.is_candidate}
    # The candidates are trained again, and select the value of the runs that are left.
    left = [to_json(result) + "\n" for result in read_results(tmp_path / "whole") if not result.is_candidate]
    assert len(left) == 2
    (tmp_path / "whole" / "results.jsonl").write_text("".join(left))
    outcome, _ = run_here(Path(study), tmp_path / "again", reused=read_results(tmp_path / "whole"))
    assert trained("again")
    assert trained("again") < of_candidates
    assert rows("again") == everything
    assert (outcome.finished, outcome.left) == (len(everything), 0)


def test_a_dry_run_counts_reused_runs_as_done_and_writes_nothing(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    run(study, "--out", "first")
    plan_of_second = ("run", study, "--out", "second", "--dry-run")
    plain, reusing = command(*plan_of_second), command(*plan_of_second, "--reuse", "first")
    assert plain.exit_code == reusing.exit_code == 0
    assert plain.output != reusing.output
    assert not (tmp_path / "second").exists()


def test_a_folder_without_results_is_refused_before_any_run(tmp_path: Path) -> None:
    study = str(write_study(tmp_path, optimizers("best 0.002")))
    refused = command("run", study, "--out", "second", "--reuse", "nothing")
    assert refused.exit_code == 2
    assert "nothing" in refused.output
    assert not (tmp_path / "second").exists()
