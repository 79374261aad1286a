"""Runs with Muon and coupled tables clip inside the steps, by the norm of all gradients, and write no gradient."""

import math
from typing import Any

import pytest
import torch
from test_training_optimizers import grad_norm, loss_of, section, small_model
from torch import nn

from coupled_adam.optimizer import BatchedMuon, muon_step
from coupled_adam.training.optimizers import build_optimizers

MUON: dict[str, Any] = {"matrices": "muon"}


@pytest.mark.parametrize("embeddings", ["coupled", "adamw"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1e6])
def test_momentum_uses_clipped_gradients_and_the_norm_is_from_before_clipping(
    embeddings: str, max_grad_norm: float
) -> None:
    model = small_model()
    optimizers = build_optimizers(model, section(embeddings=embeddings, max_grad_norm=max_grad_norm, **MUON))
    muon = optimizers.optimizers[-1]
    assert isinstance(muon, BatchedMuon)
    expected: dict[str, torch.Tensor] = {}
    for step in range(2):
        optimizers.zero_grad()
        loss_of(model, step).backward()
        norm = grad_norm(model)
        factor = min(1.0, (max_grad_norm or math.inf) / norm)
        assert (factor < 1) == (max_grad_norm == 0.1)
        for name, p in model.named_parameters():
            if "c_" in name and name.endswith("weight"):
                before = expected.get(name, torch.zeros_like(p))
                expected[name] = 0.95 * before + 0.05 * factor * p.grad
        assert float(optimizers.step()) == pytest.approx(norm, rel=1e-5)
    for name, momentum in expected.items():
        found = muon.state[model.get_parameter(name)]["momentum_buffer"]
        torch.testing.assert_close(found, momentum, rtol=1e-4, atol=1e-9)


def test_gradients_of_coupled_tables_and_matrices_are_not_written() -> None:
    model = small_model()
    optimizers = build_optimizers(model, section(max_grad_norm=0.1, **MUON))
    loss_of(model).backward()
    names = ["wte.weight", *(name for name, p in model.named_parameters() if "c_" in name and p.ndim == 2)]
    before = {name: model.get_parameter(name).grad.clone() for name in names}
    optimizers.step()
    assert len(names) == 5
    for name, gradient in before.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name


def test_a_nan_spoils_the_step_as_with_clip_grad_norm() -> None:
    model = small_model()
    optimizers = build_optimizers(model, section(max_grad_norm=0.1, **MUON))
    loss_of(model).backward()
    model.get_parameter("ln_f.weight").grad[0] = math.nan
    assert math.isnan(float(optimizers.step()))
    assert all(p.isnan().all() for p in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")
def test_gpu_kernels_train_like_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    models: list[nn.Module] = []
    for on_gpu in (True, False):
        monkeypatch.setattr(muon_step, "is_for_triton", lambda tensor, on_gpu=on_gpu: on_gpu)
        model = small_model()
        optimizers = build_optimizers(model, section(max_grad_norm=0.1, **MUON), capturable=True)
        optimizers.optimizers[-1].param_groups[0]["ns_dtype"] = "float32"
        for step in range(2):
            optimizers.zero_grad()
            loss_of(model, step).backward()
            optimizers.set_lr(1e-2 / (step + 1))
            optimizers.step()
        models.append(model)
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)
