"""BatchedMuon multiplies gradients by a clipping factor while reading them; the result equals clip_grad_norm_."""

import copy
import math
from typing import Any

import pytest
import torch
from muon_reference import gradients_like, matrices, muon_reference, relative_error
from test_joint_clipping import LanguageModel, backward
from test_torch_features import peak_bytes
from torch import nn

from coupled_adam import BatchedMuon, CoupledAdamW, clip_together, hidden_matrices
from coupled_adam.optimizer import muon_step

on_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")


@pytest.fixture(params=["torch operations", pytest.param("kernels", marks=on_gpu)])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(muon_step, "is_for_triton", lambda tensor: tensor.dtype != torch.float64)
    return name


def two_optimizers(model: nn.Module, **options: Any) -> tuple[CoupledAdamW, BatchedMuon]:
    hidden = hidden_matrices(model)
    return CoupledAdamW(model, lr=0.01, exclude=hidden, **options), BatchedMuon(hidden, lr=0.02, ns_dtype="float32")


def assert_same_training(
    model: nn.Module, muon: torch.optim.Optimizer, expected: nn.Module, reference: torch.optim.Optimizer
) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)
        if mine in muon.state:
            momenta = muon.state[mine]["momentum_buffer"], reference.state[theirs]["momentum_buffer"]
            assert relative_error(*momenta) < 1e-5, name


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_factor_is_used_by_one_step_and_gradients_are_not_modified(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    params = matrices((5, 9), (9, 5))
    starts = [p.detach().clone() for p in params]
    steps = gradients_like(params, 3)
    optimizer = BatchedMuon(params, lr=0.02, ns_dtype="float32")
    factors = [0.125, None, 3.0]
    for step, factor in zip(steps, factors, strict=True):
        optimizer.grad_factor = None if factor is None else torch.full(shape, factor, dtype=dtype)
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        assert optimizer.grad_factor is None
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(params, step, strict=True))
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        clipped = [step[i] * (1.0 if factor is None else factor) for step, factor in zip(steps, factors, strict=True)]
        expected, momentum = muon_reference(start, clipped, lr=0.02, ratio=math.sqrt(max(1, p.shape[0] / p.shape[1])))
        assert relative_error(p, expected) < 1e-5
        assert relative_error(optimizer.state[p]["momentum_buffer"], momentum) < 1e-6


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_together_equals_clip_grad_norm_before_and_writes_no_gradient_of_a_matrix(max_norm: float) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    expected = copy.deepcopy(model)
    coupled, muon = two_optimizers(model)
    references = two_optimizers(expected)
    clip_together(coupled, muon, max_norm=max_norm)
    for step in range(3):
        backward(model, step)
        backward(expected, step)
        before = [p.grad.clone() for _, p in hidden_matrices(model)]
        coupled.step()
        muon.step()
        assert all(torch.equal(p.grad, grad) for (_, p), grad in zip(hidden_matrices(model), before, strict=True))
        norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
        for optimizer in references:
            optimizer.step()
        torch.testing.assert_close(coupled.grad_norm, norm)
        assert (norm > max_norm) == (max_norm == 0.1)
    assert_same_training(model, muon, expected, references[1])


def test_closures_work_and_the_limit_can_be_removed() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    expected = copy.deepcopy(model)
    coupled, muon = two_optimizers(model)
    references = two_optimizers(expected)
    clip_together(coupled, muon, max_norm=0.1)
    for step in range(3):
        limit = 0.1 if step < 2 else None
        coupled.max_grad_norm = limit
        coupled.step(lambda step=step: backward(model, step).item())
        assert muon.step(lambda: 7.0) == 7.0
        backward(expected, step)
        nn.utils.clip_grad_norm_(expected.parameters(), limit or math.inf)
        for optimizer in references:
            optimizer.step()
    assert_same_training(model, muon, expected, references[1])


@pytest.mark.usefixtures("implementation")
def test_a_nan_anywhere_reaches_all_matrices_as_with_clip_grad_norm() -> None:
    model = LanguageModel()
    coupled, muon = two_optimizers(model)
    clip_together(coupled, muon, max_norm=0.1)
    backward(model, 0)
    model.head.weight.grad[0, 0] = math.nan
    coupled.step()
    muon.step()
    assert all(p.isnan().all() for _, p in hidden_matrices(model))


def test_a_compiled_step_uses_the_factor_too() -> None:
    compiled, eager = matrices((4, 6), (6, 4)), matrices((4, 6), (6, 4))
    steps = gradients_like(eager, 3)
    optimizer, reference = (
        BatchedMuon(params, lr=torch.tensor(0.02), capturable=True, ns_dtype="float32") for params in (compiled, eager)
    )
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for i, gradients in enumerate(steps):
        factor = 0.25 / (i + 1)
        for p, q, gradient in zip(compiled, eager, gradients, strict=True):
            p.grad, q.grad = gradient.clone(), factor * gradient
        optimizer.grad_factor = torch.tensor(factor)
        step()
        reference.step()
        assert optimizer.grad_factor is None
    for p, q in zip(compiled, eager, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        momenta = optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"]
        assert relative_error(*momenta) < 1e-6


def test_temporary_memory_is_that_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_step, "BATCH_ELEMENTS", 4 * 64 * 256)
    params = matrices(*[(64, 256), (256, 64)] * 16)
    optimizer = BatchedMuon(params, ns_dtype="float32")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.grad_factor = torch.tensor(0.5)
    optimizer.step()
    optimizer.grad_factor = torch.tensor(0.5)
    assert peak_bytes(optimizer.step) <= 4 * (4 * 4 * 64 * 256)  # four times a batch in float32


def test_copies_do_not_carry_the_factor() -> None:
    optimizer = BatchedMuon(matrices((3, 4)))
    optimizer.grad_factor = torch.tensor(0.5)
    assert copy.deepcopy(optimizer).grad_factor is None
