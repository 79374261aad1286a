"""What tests of the runner, of the command and of the report ask for by name."""

import json
from pathlib import Path

import pytest
from fabricated_study import COUPLED, STANDARD, fabricate, fabricated_demo
from study_runs import FAKE_WORKER

from coupled_adam.config.builtin_files import study_text
from coupled_adam.study import launchers, runner
from coupled_adam.study.report import write_report

ATTACK = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">{{ 7 * 7 }}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that answer at once, and a machine without GPUs."""
    monkeypatch.setattr(launchers, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(runner, "visible_gpus", list)


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test runs in its own empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the demo, with made-up numbers."""
    folder = fabricated_demo(tmp_path_factory.mktemp("report") / "demo")
    page = write_report([folder], folder)
    assert page == folder / "report.html"
    return page


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with hostile names wherever a file can carry one."""
    folder = tmp_path_factory.mktemp("hostile") / "a&b<i>"
    optimizers = {"standard": STANDARD, ATTACK: COUPLED}
    fabricate(folder, name=ATTACK, optimizers=optimizers, sizes=((ATTACK, 1000, 2000),), seeds=(1, 2))
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"device": "cpu"', f'"device": {json.dumps(ATTACK)}'))
    lines = study_text("demo").splitlines()
    lines[1] = f"title = {json.dumps(ATTACK)} # {ATTACK}"
    note = next(number for number, line in enumerate(lines) if line.startswith("loss_note"))
    lines[note] = f"loss_note = {json.dumps(ATTACK)}"
    (folder / "study.toml").write_text("\n".join(lines))
    return write_report([folder], folder)
