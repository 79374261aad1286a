"""A run recentred halfway continues like the original run: its gradients are the same."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import rows, saved_tensors, small_config, train, write_corpus

from coupled_adam.inspection.recentring.recentre_model import recentre


@pytest.mark.parametrize("tied", [True, False])
def test_a_recentred_run_resumes_with_the_losses_of_the_original_run(tmp_path: Path, tied: bool) -> None:
    config = small_config(write_corpus(tmp_path / "corpus"), model={"tied": tied}, optimizer={"embeddings": "adamw"})
    train(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-000000012")
    done = recentre(tmp_path / "half", tmp_path / "recentred")
    assert done.out is not None
    assert done.mu_norm_ratio > 0.05
    train(config, tmp_path / "recentred", resume=True)
    losses, expected = (
        {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}
        for folder in (tmp_path / "recentred", tmp_path / "run")
    )
    assert losses == pytest.approx(expected, rel=1e-4)
    assert max(losses) == 12
    weights, others = saved_tensors(tmp_path / "recentred", 12), saved_tensors(tmp_path / "run", 12)
    name = "model.wte.weight" if tied else "model.lm_head.weight"
    assert not torch.allclose(weights[name], others[name], atol=1e-3)
