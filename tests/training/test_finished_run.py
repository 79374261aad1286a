"""A finished run that is resumed keeps the record of its training."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import small_config, train, write_corpus

from coupled_adam.config.run_config import Config, load_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    config = small_config(write_corpus(folder / "corpus"), training={"tokens": 2 * 8 * 16}, schedule={"warmup": 1})
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def config_of(run: Path) -> Config:
    return load_config(str(run / "config.toml"))


def test_resuming_a_finished_run_changes_neither_its_record_nor_its_seconds(run: Path) -> None:
    record = (run / "run.json").read_bytes()
    again, _ = train(config_of(run), run, resume=True)
    assert (run / "run.json").read_bytes() == record
    assert again.is_finished
    assert again.seconds == json.loads(record)["seconds"]


def test_a_run_killed_after_its_last_checkpoint_is_recorded_as_finished(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    train(config_of(run), run, resume=True)
    found = json.loads((run / "run.json").read_text())
    assert (found["status"], found["step"]) == ("finished", record["step"])
