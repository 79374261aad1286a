"""Downstream tasks in a study: requested, checked, measured once, added later, in tables and report."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated_study import fabricate
from study_evaluations import by_label, do, write_text_study
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.config.study_config import load_study, parse_study, with_settings
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.data.manifest import MANIFEST_FILE
from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.downstream.task_results import read_downstream
from coupled_adam.metrics import TASK_LIMIT
from coupled_adam.paper_tasks import PAPER_NAMES, PAPER_TASKS
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.study import cell, launchers, measurement, runner
from coupled_adam.study.folder import is_measured
from coupled_adam.study.results import add_metrics, read_results, write_evaluation

FIRST, SECOND = "small-1.536k-standard/seed-1", "small-1.536k-coupled/seed-1"
NO_WORKER = (sys.executable, "-S", "-c", "")


@pytest.fixture(autouse=True)
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the folders of the paper's tasks from lm-eval; reading all of them takes seconds."""
    whole = harness.task_manager
    monkeypatch.setattr(harness, "task_manager", lambda _: whole(True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was run without tasks: one seed of each optimizer."""
    folder = tmp_path_factory.mktemp("trained")
    ended = do(write_text_study(folder), folder / "out", only=("*/seed-1",))
    assert [status for status, _ in ended.values()] == ["finished", "finished"]
    return folder


def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of the study that tests may change."""
    shutil.copytree(trained / "out", tmp_path / "out")
    return tmp_path / "out"


def asking(trained: Path, *tasks: str) -> tuple[str, str]:
    """The settings that request tasks."""
    return f"evaluation.tasks={','.join(tasks) or 'paper'}", f"evaluation.task_data={trained / 'tasks'}"


def counted(monkeypatch: pytest.MonkeyPatch, *, stop_at: int | None = None) -> list[str]:
    """Record the evaluated tasks; raise Ctrl-C after `stop_at` of them."""
    evaluate, found = harness.evaluate_task, []

    def noted(model: Any, name: str, *rest: Any) -> Any:
        if len(found) == stop_at:
            raise KeyboardInterrupt
        found.append(name)
        return evaluate(model, name, *rest)

    monkeypatch.setattr(harness, "evaluate_task", noted)
    return found


def forbidden(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("this was done before")


def test_tasks_requested_later_are_measured_without_repeating_anything_else(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copied(trained, tmp_path)
    before = by_label(read_results(out))
    for name in ("_train_here", "_train_with_torchrun"):
        monkeypatch.setattr(cell, name, forbidden)
    for name in ("loss_over", "measure"):
        monkeypatch.setattr(measurement, name, forbidden)
    ended = do(trained / "study.toml", out, *asking(trained), only=("*/seed-1",))
    assert {label: status for label, (status, _) in ended.items()} == {FIRST: "finished", SECOND: "finished"}
    after = by_label(read_results(out))
    for label, result in after.items():
        stored = read_downstream(result.run_folder)
        assert stored is not None
        single = {task.key: stored.tasks[task.name].metrics["acc"] for task in PAPER_TASKS}
        expected = {**single, "acc": sum(single.values()) / 7, TASK_LIMIT: None}
        assert result.metrics == {**before[label].metrics, **expected}
        assert stored.loss is None


def test_tasks_are_measured_once_even_if_the_study_is_stopped_between_them(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, settings = copied(trained, tmp_path), asking(trained, "arc_easy", "winogrande", "hellaswag")
    with monkeypatch.context() as patch:
        first = counted(patch, stop_at=2)
        with pytest.raises(KeyboardInterrupt):
            do(trained / "study.toml", out, *settings, only=(FIRST,))
    assert "hellaswag" not in by_label(read_results(out))[FIRST].metrics
    second = counted(monkeypatch)
    assert do(trained / "study.toml", out, *settings, only=(FIRST,))[FIRST] == ("finished", "")
    assert (first, second) == (["arc_easy", "winogrande"], ["hellaswag"])
    shutil.rmtree(out / "runs" / FIRST / "checkpoints")  # a result that has everything needs no weights
    assert do(trained / "study.toml", out, *settings, only=(FIRST,)) == {}


def test_eval_of_a_run_agrees_with_its_study_and_adds_to_its_tables(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, data = copied(trained, tmp_path), str(trained / "tasks")
    do(trained / "study.toml", out, *asking(trained, "arc_easy"), only=(FIRST,))
    of_study = by_label(read_results(out))[FIRST].metrics
    found = counted(monkeypatch)
    command = ["eval", str(out / "runs" / FIRST), "--task-data", data, "--tasks", "arc_easy,race", "--no-loss"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert found == ["race"]
    of_eval = by_label(read_results(out))[FIRST].metrics
    assert of_eval == {**of_study, "race": of_eval["race"]}
    assert do(trained / "study.toml", out, *asking(trained, "arc_easy", "race"), only=(FIRST,)) == {}
    (table,) = (table for table in build_tables(gather_grid(read_results(out))) if table.name == "downstream")
    cells = zip(table.columns, table.rows[0], strict=True)
    means = {column.key: cell.numbers.get("mean") for column, cell in cells}
    assert (means["arc_easy"], means["race"]) == (of_study["arc_easy"], of_eval["race"])


def test_limited_tasks_have_a_note_until_they_are_measured_on_all_documents(trained: Path, tmp_path: Path) -> None:
    out, settings = copied(trained, tmp_path), asking(trained, "arc_easy")
    do(trained / "study.toml", out, *settings, "evaluation.task_limit=2", only=(FIRST,))
    limited = by_label(read_results(out))[FIRST]
    assert limited.metrics[TASK_LIMIT] == 2
    (table,) = (table for table in build_tables(gather_grid([limited])) if table.name == "downstream")
    assert any("first 2 documents" in note for note in table.notes)
    assert do(trained / "study.toml", out, *settings, only=(FIRST,))[FIRST][0] == "finished"
    whole = by_label(read_results(out))[FIRST]
    assert whole.metrics[TASK_LIMIT] is None
    # A result on all documents satisfies a study that requests two of them.
    assert do(trained / "study.toml", out, *settings, "evaluation.task_limit=2", only=(FIRST,)) == {}


def test_a_result_lacks_metrics_that_were_not_requested() -> None:
    metrics = {"train_loss": 1.0, "loss": 1.0, "iso": 0.5}
    seven = EvaluationSection.model_validate({"tasks": "paper"})
    assert is_measured(metrics, EvaluationSection())
    assert not is_measured(metrics, seven)
    assert not is_measured({**metrics, **{task.key: 0.1 for task in PAPER_TASKS[1:]}}, seven)
    assert is_measured({**metrics, **{task.key: None for task in PAPER_TASKS}}, seven)
    assert not is_measured({**metrics, **{task.key: 0.1 for task in PAPER_TASKS}, TASK_LIMIT: 5}, seven)


def test_a_limit_is_kept_until_all_its_tasks_were_evaluated_on_all_documents(tmp_path: Path) -> None:
    first = read_results(fabricate(tmp_path / "study", seeds=(1,)))[0]
    write_evaluation(replace(first, metrics={**first.metrics, "race": 0.2, "lambada": 0.1, TASK_LIMIT: 5}))
    for added, limit in ({"theory_batches": 20.0}, 5), ({"race": 0.3}, 5), ({"race": 0.3, "lambada": 0.2}, None):
        assert add_metrics(first.run_folder, added) == first.folder
        found = read_results(first.folder)[0].metrics
        assert found == {**found, **added}
        assert found[TASK_LIMIT] == limit


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("paper", list(PAPER_NAMES)),
        ("race, piqa", ["race", "piqa"]),
        ('["piqa", "piqa", "race"]', ["piqa", "race"]),
        ("none", None),
    ],
)
def test_tasks_are_named_in_the_study_file_and_by_set(text: str, tasks: list[str] | None) -> None:
    study, left = with_settings(load_study("single-gpu"), [f"evaluation.tasks={text}"])
    assert (study.evaluation.tasks, left) == (tasks, [])
    assert parse_study(to_toml(study), "copy", Path()) == study
    assert load_study("single-gpu").evaluation.tasks is None


@pytest.mark.parametrize("text", ["3", "[]", "[1]", '""'])
def test_an_invalid_list_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'evaluation\.tasks\b.*"paper".*lm-eval'):
        with_settings(load_study("demo"), [f"evaluation.tasks={text}"])


def unknown_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--set", "evaluation.tasks=arc_eazy"]


def missing_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--set", "evaluation.task_data=nowhere"]


def missing_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (folder / "tasks" / "race_high_test.jsonl").unlink()
    return []


def unknown_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    manifest = folder / "corpus" / MANIFEST_FILE
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tokenizer": None}))
    return []


def small_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # The corpus uses a few tokens of a larger tokenizer: a smaller table would suffice for training.
    manifest = folder / "corpus" / MANIFEST_FILE
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "vocabulary_size": 61}))
    return ["--set", "model.vocabulary_size=64"]


def no_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    return []


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (unknown_task, r"'arc_eazy'.* arc_easy\?"),
        (missing_folder, r"evaluation\.task_data: nowhere "),
        (missing_file, r"evaluation\.task_data: .*race_high_test\.jsonl;.* race with evaluation\.tasks"),
        (unknown_tokenizer, r"evaluation\.tasks .*corpus.*`coupled-adam data prepare"),
        (small_table, r"evaluation\.tasks: .*\b64 rows"),
        (no_lm_eval, r"\[eval\]"),
    ],
)
def test_missing_requirements_of_tasks_are_reported_before_any_run(
    spoil: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "WORKER", NO_WORKER)
    monkeypatch.setattr(runner, "visible_gpus", list)
    file = write_text_study(tmp_path, evaluation=f'tasks = "paper", task_data = {json.dumps(str(tmp_path / "tasks"))}')
    settings = spoil(tmp_path, monkeypatch)
    result = CliRunner().invoke(app, ["study", "run", str(file), "--out", str(tmp_path / "out"), *settings])
    assert result.exit_code == 2, result.output
    assert re.search(named, " ".join(result.output.split())), result.output
    assert "Traceback" not in result.output
    assert not any(tmp_path.glob("out/runs/*"))


def test_other_tasks_have_their_own_column_after_the_papers(tmp_path: Path) -> None:
    results = [
        replace(result, metrics={**result.metrics, "race": 0.3 + 0.1 * place, "piqa_50%": 0.5 + 0.01 * place})
        for place, result in enumerate(read_results(fabricate(tmp_path / "study", with_runs=False)))
    ]
    tables = {table.name: table for table in build_tables(gather_grid(results))}
    assert [column.key for column in tables["downstream"].columns[4:]] == ["race", "piqa_50%"]
    assert tables["downstream"].rows[0][-1].text == "0.51(1)"
    assert tables["downstream"].rows[1][-1].bold
    assert not {"theory", "scale_downstream"} & tables.keys()
