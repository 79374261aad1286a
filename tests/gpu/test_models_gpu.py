"""Models and their loss on a real GPU: float32 as on the CPU, bf16 as close to it as torch's own autocast."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.models import fused, loss
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.loss import linear_cross_entropy
from coupled_adam.models.model_config import ModelConfig, build_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
V, T = 1000, 128


def model_of(architecture: str) -> LanguageModel:
    model = build_model(ModelConfig(architecture, layers=3, heads=4, width=256, context=T, vocabulary_size=V))
    initialise(model, seed=1)
    return model


def windows(device: str = "cpu") -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, V, (4, T + 1), generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm()).item()


def gradients(model: LanguageModel, device: str, autocast: bool, compiled: bool = False) -> tuple[Tensor, Any]:
    model = model.to(device)
    model.zero_grad()
    function = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        value = function(*windows(device), z_loss=0.01)
    value.backward()
    return value.detach().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_float32_agrees_with_the_cpu(architecture: str) -> None:
    model = model_of(architecture)
    expected, expected_gradients = gradients(model, "cpu", autocast=False)
    value, actual = gradients(model, "cuda", autocast=False)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in expected_gradients.items():
        assert relative_error(actual[name], gradient) < 1e-5, name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_bf16_is_as_close_as_torchs_own(architecture: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(architecture)
    exact, exact_gradients = gradients(model, "cpu", autocast=False)
    value, actual = gradients(model, "cuda", autocast=True, compiled=compiled)
    with monkeypatch.context() as patch:  # torch's operations instead of ours
        patch.setattr(fused, "HAS_TRITON", False)
        patch.setattr(fused.Linear, "forward", torch.nn.Linear.forward)
        plain, plain_gradients = gradients(model, "cuda", autocast=True)
    assert abs(value - exact) < 2 * abs(plain - exact) + 1e-3
    for name, gradient in exact_gradients.items():
        ours = relative_error(actual[name], gradient)
        assert ours < 1.3 * relative_error(plain_gradients[name], gradient) + 1e-4, name
        assert ours < 0.05, name


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("N", "rows", "H"), [(7, 33, 16), (300, 50304, 64), (1000, 5003, 128)])
def test_the_loss_in_float32(N: int, rows: int, H: int, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cuda", 2**22)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(N, H, device="cuda", generator=generator).requires_grad_()
    weight = torch.randn(rows, H, device="cuda", generator=generator).requires_grad_()
    targets = torch.randint(0, rows, (N,), device="cuda", generator=generator)
    targets[::5] = -100
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = F.linear(*exact)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + 0.01 * logits.logsumexp(-1).square() * (targets != -100)
    expected = losses.sum() / (targets != -100).sum() if reduction == "mean" else losses
    actual = linear_cross_entropy(hidden, weight, targets, z_loss=0.01, reduction=reduction)
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    for tensor, reference in zip((hidden, weight), exact, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert relative_error(tensor.grad, reference.grad) < 1e-5


def test_a_logit_far_above_the_targets_does_not_overflow() -> None:
    hidden = torch.eye(4, device="cuda").requires_grad_()
    weight = torch.zeros(3000, 4, device="cuda")
    weight[2999, :2] = torch.tensor([300.0, 2000.0])
    targets = torch.tensor([0, 1, 2, 2999], device="cuda")
    exact = hidden.detach().double().requires_grad_()
    expected = F.cross_entropy(exact @ weight.double().T, targets, reduction="none")
    actual = linear_cross_entropy(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_the_logits_are_never_all_in_memory() -> None:
    N, rows, H = 32768, 50304, 64
    hidden = torch.randn(N, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(rows, H, device="cuda", requires_grad=True)
    targets = torch.randint(0, rows, (N,), device="cuda")
    linear_cross_entropy(hidden[:64], weight, targets[:64]).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(hidden, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < loss.CHUNK_BYTES["cuda"] + 6 * 4 * rows * H + 8 * N * H + 2**24
    assert peak < 2 * N * rows / 3
