"""A count of one is followed by a singular noun, wherever a study or its report shows it."""

import re
from pathlib import Path

import pytest
from fabricated_study import fabricate
from study_cli import study
from study_runs import ADAMW, write_study

from coupled_adam.metrics import TASK_LIMIT
from coupled_adam.report.result_notes import limit_note
from coupled_adam.report.significance import compare
from coupled_adam.study import runner
from coupled_adam.study.results import read_results

pytestmark = pytest.mark.usefixtures("quick", "empty_folder")


def of_one(text: str) -> list[str]:
    """The words after a count of one."""
    return re.findall(r"(?<![\w.,/=-])1 ([a-z]+)", text)


def test_the_plan_of_one_run_names_one_run(tmp_path: Path) -> None:
    shown = study("run", str(write_study(tmp_path, ADAMW)), "--only", "*/seed-1", "--dry-run").output
    assert of_one(shown) == ["run"]


def test_a_study_of_one_run_names_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = runner.StudyOutcome(left=1, failed={"small/seed-1": "no"}, signal="SIGINT")
    monkeypatch.setattr(runner, "run_study", lambda *_, **__: outcome)
    file = write_study(tmp_path, ADAMW)
    shown = study("run", str(file), "--only", "*/seed-1", "--out", "out").output
    assert of_one(shown) == ["run", "run"]
    outcome.signal = None
    assert of_one(study("run", str(file), "--only", "*/seed-1", "--out", "out").output) == ["run", "run"]


def test_a_selection_that_may_try_one_more_value_says_so(tmp_path: Path) -> None:
    select = '[select]\nvalues = { "optimizer.lr" = [1e-3, 2e-3] }\nextend = 1\n'
    shown = study("run", str(write_study(tmp_path, ADAMW, more=select)), "--dry-run").output
    assert "1 more value is" in shown
    assert of_one(shown) == ["more"]


def test_a_comparison_of_single_seeds_names_one_seed() -> None:
    assert [of_one(note) for note in compare([1.0], [2.0], "lower").notes] == [["seed"]]


def test_a_limit_of_one_document_names_one_document(tmp_path: Path) -> None:
    first, second, *_ = read_results(fabricate(tmp_path / "made-up", with_runs=False))
    first.metrics[TASK_LIMIT] = 1.0
    assert of_one(limit_note([first])) == ["document"]
    second.metrics[TASK_LIMIT] = 1500.0
    assert "1 or 1,500 documents" in limit_note([first, second])
