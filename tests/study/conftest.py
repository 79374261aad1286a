"""Fixtures for the tests of the runner and of the command."""

from pathlib import Path

import pytest
from study_runs import FAKE_WORKER, SELECTING_WORKER, LauncherHere

from coupled_adam.study import launchers, runner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers at once, and a machine without GPUs, of one core: each worker takes time to start."""
    monkeypatch.setattr(launchers, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(runner, "visible_gpus", list)
    monkeypatch.setattr(runner, "available_processes", lambda: 1)


@pytest.fixture
def quick_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers at once, with a validation loss that follows from the learning rate; no GPUs."""
    monkeypatch.setattr(launchers, "WORKER", SELECTING_WORKER)
    monkeypatch.setattr(runner, "visible_gpus", list)


@pytest.fixture
def trained_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs without the seconds that a worker process takes to start."""
    monkeypatch.setattr(runner, "LocalLauncher", LauncherHere)


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test runs in its own empty folder."""
    monkeypatch.chdir(tmp_path)
