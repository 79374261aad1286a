"""Fixtures for the tests of `coupled-adam eval`."""

from pathlib import Path

import pytest
from tiny_tasks import write_evaluated_run, write_tasks

from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.run_export import export_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its corpus, an export of it, and a few documents of every task."""
    folder = tmp_path_factory.mktemp("command")
    write_evaluated_run(folder)
    write_tasks(folder / "tasks")
    export_run(folder / "run", folder / "model", on_skip=print)
    return folder


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the folders of the paper's tasks from lm-eval; reading all of them takes seconds."""
    whole = harness.task_manager
    monkeypatch.setattr(harness, "task_manager", lambda _: whole(True))
