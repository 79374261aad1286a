"""torch.amp.GradScaler: a skipped step changes nothing, other steps use the unscaled gradients."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import relative_error
from test_against_adamw import LanguageModel
from torch import Tensor, nn

from coupled_adam import CoupledAdamW

SCALE = 1024.0


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, unscale: bool, overflow_at: int | None) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        tokens = torch.randint(0, 23, (4, 9), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == overflow_at:
            model.embedding.weight.grad[2, 1] = float("inf")
        before = copy.deepcopy([*(p.detach() for p in model.parameters()), *state_tensors(optimizer)])
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == overflow_at:
            after = [*(p.detach() for p in model.parameters()), *state_tensors(optimizer)]
            assert all(torch.equal(x, y) for x, y in zip(before, after, strict=False))


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, skipped: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        tokens = torch.randint(0, 23, (4, 9), generator=generator)
        if step == skipped:
            continue
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("overflow_at", [None, 0, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_scaled_training_equals_unscaled_training(
    path: ModuleType, flags: dict[str, Any], unscale: bool, max_grad_norm: float | None, overflow_at: int | None
) -> None:
    torch.manual_seed(0)
    scaled = LanguageModel()
    plain = copy.deepcopy(scaled)
    options = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": max_grad_norm}
    scaled_optimizer = CoupledAdamW(scaled, **options, **flags)
    plain_optimizer = CoupledAdamW(plain, **options)
    train_scaled(scaled, scaled_optimizer, unscale, overflow_at)
    train_plainly(plain, plain_optimizer, skipped=overflow_at)
    for mine, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert relative_error(mine, theirs) < 2e-6
    steps = {state["step"].item() for state in scaled_optimizer.state.values()}
    assert steps == {4 if overflow_at is None else 3}
    if max_grad_norm is not None:
        assert scaled_optimizer.grad_norm is not None
        assert plain_optimizer.grad_norm is not None
        assert relative_error(scaled_optimizer.grad_norm, plain_optimizer.grad_norm) < 1e-5


def test_scaler_leaves_no_scale_behind() -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model, fused=True, max_grad_norm=1.0)
    train_scaled(model, optimizer, unscale=False, overflow_at=None)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_the_check_for_nonfinite_gradients_does_not_raise_when_the_scaler_skips() -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model, fused=True, error_if_nonfinite=True)
    train_scaled(model, optimizer, unscale=False, overflow_at=1)


def test_a_scale_set_by_the_user_is_honoured_and_kept() -> None:
    """torch documents `optimizer.grad_scale` as an attribute that users may set for fused optimizers."""
    torch.manual_seed(0)
    model = LanguageModel()
    plain = copy.deepcopy(model)
    optimizer = CoupledAdamW(model, fused=True)
    optimizer.grad_scale = torch.tensor(SCALE)
    for chosen, factor in ((model, SCALE), (plain, 1.0)):
        (factor * chosen(torch.tensor([[1, 2, 3]])).logsumexp(-1).mean()).backward()
    optimizer.step()
    CoupledAdamW(plain).step()
    assert optimizer.grad_scale.item() == SCALE
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-6


def test_copied_and_loaded_optimizers_tell_the_scaler_whether_they_are_fused() -> None:
    fused = CoupledAdamW(LanguageModel(), fused=True)
    unfused = CoupledAdamW(LanguageModel())
    assert copy.deepcopy(fused)._step_supports_amp_scaling
    fused.load_state_dict(unfused.state_dict())
    assert not fused._step_supports_amp_scaling
