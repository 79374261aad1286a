"""Runs with a residual stream in bfloat16: what is refused, what is told of memory, and a run on the CPU."""

from pathlib import Path

import pytest
import torch
from small_runs import rows, small_config, train
from typer.testing import CliRunner

from coupled_adam.base.errors import UserError
from coupled_adam.cli import app
from coupled_adam.config.run_config import load_config, require_resumable
from coupled_adam.study.config_hash import config_hash
from coupled_adam.training import estimates

NARROW = "model.residual_dtype=bfloat16"


@pytest.mark.parametrize("settings", [["precision=float32"], ["device=cpu"], ["device=cpu", "precision=auto"]], ids=str)
def test_a_config_without_bf16_is_refused(settings: list[str]) -> None:
    with pytest.raises(UserError, match=r"model\.residual_dtype.*training\.precision"):
        load_config("tiny", [NARROW, *(f"training.{setting}" for setting in settings)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is bf16 on a GPU")
def test_precision_auto_is_refused_where_there_is_no_gpu(corpus: Path, tmp_path: Path) -> None:
    config = small_config(
        corpus, model={"residual_dtype": "bfloat16"}, training={"device": "auto", "precision": "auto"}
    )
    with pytest.raises(UserError, match=r"model\.residual_dtype.*training\.precision"):
        train(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto is bf16 on a GPU")
def test_the_command_refuses_before_it_prepares_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["train", "tiny", "--set", NARROW]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_run_learns_as_in_float32(corpus: Path, tmp_path: Path) -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        config = small_config(corpus, model={"residual_dtype": dtype}, training={"precision": "bf16"})
        train(config, tmp_path / dtype)
        assert load_config(str(tmp_path / dtype)).model.residual_dtype == dtype
        losses[dtype] = [row["loss"] for row in rows(tmp_path / dtype) if row["kind"] == "train"]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=5e-3)


def test_a_run_is_not_resumed_with_another_stream() -> None:
    stored, wanted = load_config("tiny"), load_config("tiny", [NARROW])
    with pytest.raises(UserError, match=r"model\.residual_dtype"):
        require_resumable(stored, wanted)
    assert config_hash(stored) != config_hash(wanted)
    assert config_hash(stored) == config_hash(load_config("tiny", ["model.residual_dtype=float32"]))


def test_memory_counts_two_bytes_a_number() -> None:
    wide, narrow = (estimates.memory(load_config("gpt2-125m", settings)).activations for settings in ([], [NARROW]))
    config = load_config("gpt2-125m")
    tokens = config.micro_batch_size(1) * config.model.context
    sums = 2 * config.model.layers  # the one after the last block is float32
    assert wide - narrow == 2 * tokens * sums * config.model.width
