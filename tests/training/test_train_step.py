"""One training step, compared with a hand-written loop, and its side effects."""

import contextlib
import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.optimizer import CoupledAdamW, param_groups
from coupled_adam.training.checkpoint.training_state import make_optimizer_state
from coupled_adam.training.optimizers import EmbeddingOptimizers, build_optimizers
from coupled_adam.training.train_step import TrainStep, unchanged

V, T = 61, 12


def small_model() -> LanguageModel:
    model = build_model(ModelConfig("gpt2", layers=2, heads=2, width=16, context=T, vocabulary_size=V))
    initialise(model, seed=1)
    return model


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    windows = torch.randint(0, V, (size, T + 1), generator=torch.Generator().manual_seed(step))
    return windows[:, :-1], windows[:, 1:]


def split(tokens_and_targets: tuple[Tensor, Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.chunk(parts) for part in tokens_and_targets), strict=True))


def step_of(model: nn.Module, optimizers: EmbeddingOptimizers, **options: Any) -> TrainStep:
    return TrainStep(model, optimizers, precision=contextlib.nullcontext, **options)


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter, expected.get_parameter(name), msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("parts", [1, 4])
def test_steps_match_a_hand_written_loop(parts: int) -> None:
    model, expected = small_model(), small_model()
    section = OptimizerSection(embeddings="adamw", lr=1e-2, max_grad_norm=0.5)
    train_step = step_of(model, build_optimizers(model, section), z_loss=0.01)
    groups = param_groups(expected, 0.1, "none")
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        lr = 1e-2 / (step + 1)
        loss, norm = train_step(split(batch(step), parts), lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        whole = expected(*batch(step), z_loss=0.01)
        whole.backward()
        expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(loss, whole.detach())
        torch.testing.assert_close(norm, expected_norm)
        assert loss.shape == norm.shape == ()
        assert not loss.requires_grad
        assert_close(model, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_coupled_optimizer_clips_inside() -> None:
    model, expected = small_model(), small_model()
    train_step = step_of(model, build_optimizers(model, OptimizerSection(lr=1e-2, max_grad_norm=0.5)))
    optimizer = CoupledAdamW(expected, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5)
    for step in range(3):
        _, norm = train_step([batch(step)], 1e-2)
        optimizer.zero_grad()
        expected(*batch(step)).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(norm, optimizer.grad_norm)
        assert norm > 0.5
    assert_close(model, expected)


@pytest.mark.parametrize("embeddings", ["adamw", "coupled", "sgd"])
def test_unchanged_restores_everything(embeddings: str) -> None:
    """The warm-up for a CUDA graph relies on it."""
    model = small_model()
    factor = 10.0 if embeddings == "sgd" else None
    section = OptimizerSection(embeddings=embeddings, lr=1e-2, sgd_factor=factor, centre=True)
    optimizers = build_optimizers(model, section)
    train_step = step_of(model, optimizers)
    train_step([batch(0)], 1e-2)
    make_optimizer_state(optimizers.optimizers)
    weights = copy.deepcopy(model.state_dict())
    states = copy.deepcopy([optimizer.state_dict()["state"] for optimizer in optimizers.optimizers])
    with unchanged(optimizers):
        train_step([batch(1)], 1e-2)
        assert not torch.equal(model.state_dict()["wte.weight"], weights["wte.weight"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for optimizer, state in zip(optimizers.optimizers, states, strict=True):
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(value, state[index][key]), key


def test_the_benchmark_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    options = "--layers 1 --heads 1 --width 8 --context 8 --vocabulary-size 4096 --batch 2 --micro-batch 1 --steps 1"
    report = tmp_path / "report.json"
    monkeypatch.setattr(
        sys, "argv", ["train.py", *options.split(), "--device", "cpu", "--rounds", "1", "--json", str(report)]
    )
    import train

    train.main()
    shown = capsys.readouterr().out
    plain, ours = json.loads(report.read_text())["measurements"]
    assert (plain["peer"], ours["peer"]) == ("plain", "ours")
    assert ours["first_losses"][0] == pytest.approx(plain["first_losses"][0], abs=1e-4)  # the same model and tokens
    assert all(re.search(rf"│ {re.escape(kind)} +│", shown) for kind in ours["shares"]), shown
    assert sum(ours["shares"].values()) == pytest.approx(1, abs=0.05)
