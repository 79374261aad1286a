"""Paths as users write them."""

from pathlib import Path

import pytest

from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import load_config


def test_a_tilde_is_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/runs") == tmp_path / "runs"


def test_a_tilde_with_an_unknown_user_is_an_ordinary_name() -> None:
    assert user_path("~0/runs") == Path("~0/runs")
    assert load_config("tiny", ["data.folder=~0"]).rows > 0
