"""Fixtures for the tests of the runner and of the command."""

from pathlib import Path

import pytest
from study_runs import FAKE_WORKER

from coupled_adam.study import launchers, runner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that answer at once, and a machine without GPUs."""
    monkeypatch.setattr(launchers, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(runner, "visible_gpus", list)


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test runs in its own empty folder."""
    monkeypatch.chdir(tmp_path)
