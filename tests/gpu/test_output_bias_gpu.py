"""The bias of the logits on a real GPU: its kernels compared with float64, and runs with a bias."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import assert_same_tensors, rows, saved_tensors, small_config, train, write_corpus
from test_training_run import stop_at

from coupled_adam.models import loss
from coupled_adam.models.loss import linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
SHAPES = [(7, 33, 16), (300, 50304, 64), (1000, 5003, 128)]
BIAS = "model.lm_head.bias"


def inputs(N: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states (N, H), weight (V, H), bias (V,) like log probabilities, and targets, some of them ignored."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(N, H, device="cuda", generator=generator).requires_grad_()
    weight = (0.3 * torch.randn(V, H, device="cuda", generator=generator)).requires_grad_()
    bias = (-11 + 3 * torch.randn(V, device="cuda", generator=generator)).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda", generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def exact_loss(tensors: list[Tensor], targets: Tensor, reduction: str) -> Tensor:
    logits = F.linear(*tensors)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + 0.01 * logits.logsumexp(-1).square() * (targets != -100)
    return losses.sum() / (targets != -100).sum() if reduction == "mean" else losses


def relative_error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None
    assert expected is not None
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("N", "V", "H"), SHAPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_float32_equals_float64_to_rounding(
    compiled: bool, N: int, V: int, H: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cuda", 2**22)
    *tensors, targets = inputs(N, V, H)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = exact_loss(exact, targets, reduction)

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, z_loss=0.01, reduction=reduction)

    actual = (torch.compile(ours, fullgraph=True, dynamic=False) if compiled else ours)(*tensors)
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    for tensor, reference in zip(tensors, exact, strict=True):
        assert relative_error(tensor.grad, reference.grad) < 1e-5


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("N", "V", "H"), SHAPES)
def test_bf16_rounds_the_products_and_not_the_bias(
    N: int, V: int, H: int, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss.CHUNK_BYTES, "cuda", 2**22)
    *tensors, targets = inputs(N, V, H)
    hidden, weight, bias = tensors
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight)]
    exact = [*rounded, bias.detach().double().requires_grad_()]
    expected = exact_loss(exact, targets, reduction)
    with torch.autocast("cuda", torch.bfloat16):
        actual = linear_cross_entropy(hidden, weight, targets, bias=bias, z_loss=0.01, reduction=reduction)
    assert actual.dtype == torch.float32
    # The logits without the bias are at most 10 here, and rounded to 8 bits.
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=0, atol=0.05)
    actual.sum().backward()
    expected.sum().backward()
    for tensor, reference in zip(tensors, exact, strict=True):
        assert relative_error(tensor.grad, reference.grad) < 2e-2
    # With zero hidden states nothing is rounded.
    alone = linear_cross_entropy(torch.zeros_like(hidden).bfloat16(), weight.bfloat16(), targets, bias=bias)
    assert alone.item() == pytest.approx(F.cross_entropy(bias.double().expand(N, V), targets).item(), abs=1e-5)


def test_a_fixed_bias_costs_no_memory_of_the_size_of_a_chunk() -> None:
    N, V, H = 32768, 50304, 64
    hidden = torch.randn(N, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device="cuda", requires_grad=True)
    bias = torch.randn(V, device="cuda")
    targets = torch.randint(0, V, (N,), device="cuda")
    peaks = []
    for given in (None, bias, bias.clone().requires_grad_()):
        for _ in range(2):  # the first pass compiles kernels
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                linear_cross_entropy(hidden, weight, targets, bias=given).backward()
            peak = torch.cuda.max_memory_allocated() - before
            hidden.grad = weight.grad = None
        peaks.append(peak)
    assert max(peaks) - peaks[0] < 2**24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def gpu_config(corpus: Path, kind: str, **training: Any) -> Any:
    model = {"width": 64, "context": 64, "output_bias": kind}
    return small_config(corpus, model=model, training={"device": "cuda", "tokens": 12 * 8 * 64, **training})


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_a_compiled_run_with_graphs_follows_the_cpu(kind: str, corpus: Path, tmp_path: Path) -> None:
    train(gpu_config(corpus, kind), tmp_path / "gpu")
    train(gpu_config(corpus, kind, device="cpu"), tmp_path / "cpu")
    for ours, expected in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        if ours["kind"] in ("train", "val"):
            assert ours["loss"] == pytest.approx(expected["loss"], abs=0.03)  # bf16 against float32
    ours, expected = saved_tensors(tmp_path / "gpu")[BIAS], saved_tensors(tmp_path / "cpu")[BIAS]
    if kind == "unigram":
        assert torch.equal(ours, expected)
    else:
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_a_resumed_deterministic_run_is_bitwise_equal(
    kind: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpu_config(corpus, kind, deterministic=True, compile=False)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert_same_tensors(saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole"))
