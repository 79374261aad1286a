"""What `coupled-adam inspect` advises when an input is missing: the thing that was typed, and what to pass instead."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.embeddings.download import fetch_word_pairs
from coupled_adam.inspection import hub


@pytest.fixture
def table(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    return tmp_path / "a.npy"


def refused(*arguments: object) -> str:
    """The error of a command that the user can mend."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_missing_counts_are_called_a_missing_file(table: Path) -> None:
    said = refused(table, "--unigram", "missing.npy")
    assert "missing.npy: no such file" in said
    assert not re.search(r"Errno|FileNotFoundError|numpy\.save", said)


def test_benchmarks_that_cannot_be_downloaded_can_be_passed_as_a_folder(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooch = pytest.importorskip("pooch")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setenv("COUPLED_ADAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pooch.Pooch, "fetch", offline)
    monkeypatch.chdir(tmp_path)
    said = refused(table, "--wordsim", "download")
    assert "--wordsim DIR" in said
    assert "load_word_pairs" not in said
    with pytest.raises(ConnectionError, match=r"load_word_pairs\(folder\)"):  # in Python
        fetch_word_pairs()


def test_without_a_network_a_name_is_not_called_a_model_unless_some_of_it_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "_hub_answers", lambda *_: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = refused("nosuch")
    assert re.search("nosuch: neither a file, a folder nor a downloaded model", said)
    assert "safetensors" not in said
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert "model.safetensors.index.json" in refused("org/name")
