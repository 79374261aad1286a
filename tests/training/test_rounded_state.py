"""Runs with first moments in bfloat16: checkpoints, resuming, refusals, and the estimated memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows, small_config, train
from test_estimates import SMALL, bytes_of_state, trained
from test_family_training import TABLE, assert_resumes_bitwise

from coupled_adam.base.errors import UserError
from coupled_adam.config.run_config import load_config, require_resumable
from coupled_adam.models.model_config import build_model
from coupled_adam.study.config_hash import config_hash
from coupled_adam.training import estimates
from coupled_adam.training.optimizers import build_optimizers

BFLOAT16 = {"state_dtype": "bfloat16"}


@pytest.mark.parametrize("optimizer", [BFLOAT16, {**BFLOAT16, "row_exponent": 0.25, "mean_free": True}], ids=str)
def test_resumed_run_is_bitwise_equal(
    optimizer: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = assert_resumes_bitwise(optimizer, corpus, tmp_path, monkeypatch)
    narrow = {name for name, tensor in saved.items() if tensor.dtype == torch.bfloat16}
    assert narrow == {f"optimizer.{TABLE}.exp_avg"}


def test_rounding_follows_the_seed_of_the_run() -> None:
    config = load_config("tiny", [*SMALL, "optimizer.state_dtype=bfloat16"])
    optimizers = build_optimizers(build_model(config.to_model_config()), config.optimizer, seed=7).optimizers
    coupled = [group for optimizer in optimizers for group in optimizer.param_groups if group["coupled"]]
    assert [(group["state_dtype"], group["state_seed"]) for group in coupled] == [(torch.bfloat16, 7)]


def test_the_loss_equals_that_of_float32_up_to_rounding(corpus: Path, tmp_path: Path) -> None:
    losses = {}
    for name, optimizer in (("float32", {}), ("bfloat16", BFLOAT16)):
        train(small_config(corpus, optimizer=optimizer), tmp_path / name)
        losses[name] = [row["loss"] for row in rows(tmp_path / name) if row["kind"] == "train"]
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-3)


def test_a_run_is_not_resumed_with_another_dtype() -> None:
    stored, wanted = load_config("tiny"), load_config("tiny", ["optimizer.state_dtype=bfloat16"])
    with pytest.raises(UserError, match=r"optimizer\.state_dtype"):
        require_resumable(stored, wanted)
    assert config_hash(stored) != config_hash(wanted)
    assert config_hash(stored) == config_hash(load_config("tiny", ["optimizer.state_dtype=float32"]))


@pytest.mark.parametrize("embeddings", [["adamw"], ["sgd", "optimizer.sgd_factor=300"]], ids=str)
def test_it_is_refused_for_other_optimizers_of_the_tables(embeddings: list[str]) -> None:
    with pytest.raises(UserError, match=r"optimizer\.state_dtype"):
        load_config(
            "tiny", ["optimizer.state_dtype=bfloat16", f"optimizer.embeddings={embeddings[0]}", *embeddings[1:]]
        )


@pytest.mark.parametrize("value", ["float16", "int8"])
def test_other_dtypes_are_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"optimizer\.state_dtype"):
        load_config("tiny", [f"optimizer.state_dtype={value}"])


@pytest.mark.parametrize("settings", [[], ["model.tied=false", "optimizer.couple=all"]], ids=str)
def test_optimizer_state_is_counted_to_the_byte(settings: list[str]) -> None:
    config = load_config("tiny", [*SMALL, *settings, "optimizer.state_dtype=bfloat16", "training.precision=float32"])
    _, optimizers = trained(config)
    assert estimates.memory(config).optimizer == bytes_of_state(optimizers)
