"""While a selection may still add candidates, the display says that the number of runs is a lower bound."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from study_runs import LauncherHere, plan, run_here, write_study
from study_selecting_worker import selecting_result

from coupled_adam.study import runner
from coupled_adam.study.cell import Task
from coupled_adam.study.launchers import Ended
from coupled_adam.study.results import write_evaluation
from coupled_adam.study.study_display import StudyDisplay

Counts = list[tuple[int, str, int]]


class SelectingHere(LauncherHere):
    """Answers at once, with the validation loss that follows from the learning rate."""

    def start(self, task: Task) -> None:
        task.folder.mkdir(parents=True, exist_ok=True)
        write_evaluation(selecting_result(task))
        self.ended.append(Ended(task, "finished"))


def selecting(folder: Path, best: float, extend: int) -> Path:
    """A study with two seeds that selects among three learning rates, and knows which is best."""
    select = f'[select]\nvalues = {{ "optimizer.lr" = [1e-3, 2e-3, 4e-3] }}\nextend = {extend}\n'
    return write_study(folder, f'[[optimizers]]\nname = "best {best}"\nembeddings = "adamw"\n', more=select)


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, int], Counts]:
    """Run a study; of each finished run, read the number of finished runs, the words after it, and the total."""
    monkeypatch.setattr(runner, "LocalLauncher", SelectingHere)
    monkeypatch.setattr(runner, "visible_gpus", list)

    def counts(best: float, extend: int) -> Counts:
        _, text = run_here(selecting(tmp_path, best, extend), tmp_path / "out")
        found = re.findall(r"\[(\d+)(/| of at least )(\d+)\]$", text, re.MULTILINE)
        return [(int(finished), words.strip(), int(total)) for finished, words, total in found]

    return counts


def test_the_total_is_a_lower_bound_until_the_winner_is_known(counts: Callable[[float, int], Counts]) -> None:
    assert counts(0.002, 2) == [(n, "of at least" if n <= 3 else "/", 5) for n in range(1, 6)]


def test_the_total_is_a_lower_bound_until_no_value_may_be_added(counts: Callable[[float, int], Counts]) -> None:
    three_values = [(n, "of at least", 5) for n in (1, 2, 3)]
    assert counts(0.1, 2) == [*three_values, (4, "of at least", 6), *((n, "/", 7) for n in (5, 6, 7))]


def test_the_total_is_exact_if_no_value_may_be_added(counts: Callable[[float, int], Counts]) -> None:
    assert counts(0.1, 0) == [(n, "/", 5) for n in range(1, 6)]


def test_the_progress_line_has_a_lower_bound_for_runs_and_time(tmp_path: Path) -> None:
    _, cells = plan(selecting(tmp_path, 0.002, 0))
    now = 0.0
    out = io.StringIO()
    display = StudyDisplay(Console(file=out, width=200), clock=lambda: now)
    display.begin(cells, cells, may_grow=True)
    display.started(cells[0], tmp_path / "run")
    display.refresh()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 6, "loss": 5.0}\n')
    now = 100.0  # half of one of five equal runs, so nine times as much is left
    display.refresh()
    display.add([], may_grow=False)
    now = 200.0
    display.refresh()
    first, last = [line for line in out.getvalue().splitlines() if line.startswith("running")]
    assert "0 of at least 5 finished" in first
    assert "at least 15 min 0 s left" in first
    assert "0 of 5 finished" in last
    assert "at least" not in last
