"""The command `coupled-adam train`: help, lists, mistakes, a run, and resuming."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small_config
from typer.testing import CliRunner, Result

from coupled_adam.cli import app
from coupled_adam.config.run_config import load_config, to_toml


@pytest.fixture
def config_file(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(to_toml(small_config(corpus)))
    return path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_a_run_ends_with_its_measures_and_its_folder_and_is_not_trained_again(
    config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = command(config_file, "--out", run)
    assert result.exit_code == 0, result.output
    assert "mean-embedding ratio" in result.output
    assert "validation loss" in result.output
    assert str(run) in result.output.replace("\n", "")
    assert "Trained in" in result.output
    again = command(run, "--resume")
    assert again.exit_code == 0, again.output
    assert "Nothing left" in again.output
    assert "Trained in" not in again.output
    assert f"coupled-adam inspect {run}" in again.output.replace("\n", "")


def test_without_out_the_folder_is_named_after_config_optimizer_and_seed(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(config_file, "--set", "optimizer.embeddings=adamw", "--set", "seed=7")
    assert result.exit_code == 0, result.output
    assert load_config("runs/small-adamw-seed7").seed == 7


def test_show_prints_a_config_that_gives_the_same_run(tmp_path: Path) -> None:
    result = command("gpt2-125m", "--set", "optimizer.lr=1e-3", "--show")
    (tmp_path / "mine.toml").write_text(result.stdout)
    assert load_config(str(tmp_path / "mine.toml")) == load_config("gpt2-125m", ["optimizer.lr=1e-3"])


def test_list_shows_every_preset() -> None:
    result = command("--list")
    assert result.exit_code == 0
    for name in ("tiny", "single-gpu", "gpt2-125m", "gpt2-355m", "gpt2-760m", "llama-1.3b", "llama-2.6b"):
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "CONFIG is missing"),
        (["gpt2-126m"], "gpt2-125m"),
        (["nowhere.toml"], "nowhere.toml"),
        (["tiny", "--set", "optimizer.weight_deca=1"], "optimizer.weight_decay"),
        (["tiny", "--set", "model.layers=two"], "model.layers"),
        (["tiny", "--set", "optimizer.embeddings=adam"], "adamw"),
        (["tiny", "--set", "training.tokens"], "training.tokens"),
        (["tiny", "--set", "data.folder=no/such/folder", "--set", "data.source=none"], "no/such/folder"),
        (["tiny", "--set", "training.device=cuda", "--set", "training.tokens=100k"], "cuda"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_mistake_is_one_clear_message(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "training.device=cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
    result = command(*arguments, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []  # no run and no prepared tokens


@pytest.mark.filterwarnings("error::UserWarning:coupled_adam")
def test_a_folder_of_nanogpt_replaces_the_text_of_any_preset(tmp_path: Path) -> None:
    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    for name in ("train", "val"):
        np.arange(600, dtype=np.uint16).tofile(nanogpt / f"{name}.bin")
    sizes = ["model.layers=1", "model.heads=2", "model.width=8", "model.context=16", "model.vocabulary_size=50304"]
    amounts = ["training.tokens=256", "training.batch_size=8", "schedule.warmup=1", f"data.folder={nanogpt}"]
    result = command("tiny", *(f"--set={setting}" for setting in sizes + amounts), "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert re.search(rf"^Note: {nanogpt} .*manifest\.json.*\buint16\b", result.stdout), result.stdout
    assert result.output.count("manifest.json") == 1
    assert "Warning" not in result.output
    assert sorted(path.name for path in nanogpt.iterdir()) == ["train.bin", "val.bin"]


def test_a_missing_tracker_is_reported_before_the_tokens_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = command("tiny", "--set", "log.tensorboard=true")
    assert result.exit_code == 2
    assert re.search(r"^Error: tensorboard .*\blog\.tensorboard\b.*\[track\]", " ".join(result.output.split()))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_created_is_reported(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command(config_file, "--out", tmp_path / "file" / "run")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert str(tmp_path / "file") in result.stderr


def start_long_run(config_file: Path, run: Path, **options: Any) -> subprocess.Popen[str]:
    """A long training in a separate process that has taken some steps."""
    many_steps = ["--set", f"training.tokens={4000 * 8 * 16}", "--set", "checkpoints.every=none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "coupled_adam", "train", str(config_file), *many_steps, "--out", str(run)],
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )
    deadline = time.monotonic() + 60
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 2000):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture
def hangup_arrives() -> Iterator[None]:
    """Child processes receive SIGHUP, even if the tests run under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def assert_saved(run: Path) -> None:
    state = json.loads((run / "run.json").read_text())
    assert state["status"] == "stopped"
    assert 0 < state["step"] < 4000
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{state['step']:09d}"]


@pytest.mark.usefixtures("hangup_arrives")
def test_a_hangup_saves_and_ends_with_exit_code_129(config_file: Path, tmp_path: Path) -> None:
    process = start_long_run(config_file, tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGHUP)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 129, errors
    assert_saved(tmp_path / "run")
    step = json.loads((tmp_path / "run" / "run.json").read_text())["step"]
    assert re.search(rf"^SIGHUP: .*\b{step:,} of 4,000\b", shown, re.MULTILINE), shown


@pytest.mark.usefixtures("hangup_arrives")
def test_a_run_whose_terminal_is_closed_saves(config_file: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and the terminal can no longer be written to."""
    master, terminal = os.openpty()
    process = start_long_run(
        config_file,
        tmp_path / "run",
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    os.close(master)
    assert process.wait(timeout=60) == 129
    assert_saved(tmp_path / "run")


def test_with_nohup_a_hangup_changes_nothing(config_file: Path, tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start_long_run(
        config_file, tmp_path / "run", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=ignore
    )
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    process.communicate()
    assert_saved(tmp_path / "run")


def test_an_interrupted_run_prints_the_command_that_resumes_it(config_file: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_long_run(config_file, run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"coupled-adam train {run} --resume" in shown.replace("\n", "")
    assert "Traceback" not in errors
    stopped_at = json.loads((run / "run.json").read_text())["step"]
    assert re.search(rf"^SIGINT: .*\b{stopped_at:,} of 4,000\b", shown, re.MULTILINE), shown
    assert 0 < stopped_at < 4000
    # The printed command; the rest of the run is ended by a second signal.
    resumed = command(run, "--set", f"training.tokens={(stopped_at + 2) * 8 * 16}", "--resume")
    assert resumed.exit_code == 2  # another number of tokens is another run
    assert "training.tokens" in resumed.stderr
