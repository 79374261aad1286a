"""Finite gradients whose squares overflow float32: CoupledAdamW survives whatever torch.optim.AdamW survives."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, oracle, relative_error, run, table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import clipping

HUGE = [1e10, 3e18, 1e19, 1e25, 3e38]
FLAGS: list[dict[str, Any]] = [{}, {"fused": True}]
SHAPE = (35, 5)  # several tiles and row blocks; the last ones are not full
TALL = (300, 5)


def signs(*shape: int) -> Tensor:
    """-1 and 1, so that the largest float32 is an element too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).sign()


def clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    norm = torch.cat([grad.double().flatten() for grad in grads]).norm()
    return [grad.double() * (max_norm / (norm + 1e-6)).clamp(max=1.0) for grad in grads]


def state_is_finite(optimizer: torch.optim.Optimizer, key: str = "exp_avg") -> bool:
    return all(state[key].isfinite().all() for state in optimizer.state.values())


@pytest.fixture
def few_programs(path: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Triton program process many tiles, as for large tables."""
    if hasattr(path, "SUM_PROGRAMS"):
        monkeypatch.setattr(path, "SUM_PROGRAMS", 2)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", HUGE)
def test_column_sums_equal_float64_sums(path: ModuleType, size: float, dtype: torch.dtype) -> None:
    grad = (torch.rand(TALL, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    sums = path.column_square_sums(grad)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums.sum(0), grad.double().square().sum(0), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("few_programs")
def test_a_column_that_overflows_does_not_change_the_others(path: ModuleType) -> None:
    grad = torch.randn(TALL, generator=torch.Generator().manual_seed(1))
    plain = path.column_square_sums(grad).sum(0)
    grad[200, 2] = 1e30
    beside_a_spike = path.column_square_sums(grad).sum(0)
    torch.testing.assert_close(beside_a_spike[[0, 1, 3, 4]], plain[[0, 1, 3, 4]], rtol=1e-6, atol=0)
    torch.testing.assert_close(beside_a_spike[2], grad[:, 2].double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("few_programs")
def test_an_infinity_or_nan_survives_next_to_an_overflow(path: ModuleType) -> None:
    grad = torch.full(TALL, 1e25)
    grad[7, 1], grad[9, 2] = float("inf"), float("nan")
    sums = path.column_square_sums(grad).sum(0)
    assert sums[1].isinf()
    assert sums[2].isnan()
    assert sums[[0, 3, 4]].isfinite().all()


@pytest.mark.parametrize("size", [3e18, 1e19, 5e20])
def test_after_a_spike_updates_follow_algorithm_1(path: ModuleType, size: float) -> None:
    """Up to 5e20 AdamW's own second moment of one element stays finite."""
    param = table(SHAPE)
    grads = [signs(*SHAPE) * size, *gradients(SHAPE, 3)]
    expected = oracle(param, grads)
    optimizer = coupled(param)
    run(optimizer, param, grads)
    assert relative_error(param, expected.embeddings) < 1e-6
    second_moment = optimizer.state[param]["exp_avg_sq"]
    assert relative_error(second_moment.double(), expected.second_moment.mean(0, keepdim=True)) < 1e-6


def test_one_spike_in_the_whole_table_does_not_freeze_its_column(path: ModuleType) -> None:
    """The mean fits into float32, the square of the spike does not."""
    param = table(SHAPE)
    grads = [*gradients(SHAPE, 3)]
    grads[0][17, 3] = 2e20
    expected = oracle(param, grads)
    optimizer = coupled(param)
    run(optimizer, param, grads)
    assert relative_error(param, expected.embeddings) < 1e-6


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)], ids=str)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("size", HUGE)
def test_clipping_huge_gradients_is_exact(
    path: ModuleType, size: float, flags: dict[str, Any], betas: tuple[float, float]
) -> None:
    param, other = table(SHAPE), nn.Parameter(torch.randn(7, generator=torch.Generator().manual_seed(2)))
    grads = [signs(*SHAPE) * size, signs(7) * size * 0.5]
    if size == 3e38:
        grads = [grad / 64 for grad in grads]  # the norm must fit into float32 to be compared
    norm = torch.cat([grad.double().flatten() for grad in grads]).norm()
    ours, others = clipped(grads, 1.0)
    expected = oracle(param, [ours, *gradients(SHAPE, 2)], betas=betas)
    start, expected_other = other.detach().clone(), reference_adamw(other, others)
    optimizer = CoupledAdamW(
        [{"params": [param], "coupled": True, "weight_decay": 0.0, "betas": betas}, {"params": [other]}],
        max_grad_norm=1.0,
        error_if_nonfinite=True,  # they are finite
        **flags,
    )
    param.grad, other.grad = grads[0].clone(), grads[1].clone()
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.dtype == torch.float32
    assert relative_error(optimizer.grad_norm, norm) < 1e-6
    # Only the update of `other` is tested; it is a hundredth of its size.
    assert relative_error(other - start, expected_other - start) < 1e-3
    optimizer.max_grad_norm = None
    other.grad = None
    run(optimizer, param, gradients(SHAPE, 2))
    assert relative_error(param, expected.embeddings) < 1e-6


def reference_adamw(param: nn.Parameter, grad: Tensor) -> Tensor:
    """A parameter after one step of torch.optim.AdamW in float64."""
    copied = nn.Parameter(param.detach().double())
    copied.grad = grad.double()
    torch.optim.AdamW([copied]).step()
    return copied.detach()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("size", [3e18, 1e25, 3e38])
@pytest.mark.parametrize("where", ["table", "standard", "both"])
def test_gradients_that_adamw_survives_are_survived(
    path: ModuleType, where: str, size: float, max_norm: float | None, flags: dict[str, Any]
) -> None:
    ours = [table(SHAPE), nn.Parameter(torch.randn(40, 3))]
    theirs = copy.deepcopy(ours)
    optimizer = CoupledAdamW(
        [{"params": ours[:1], "coupled": True}, {"params": ours[1:]}], max_grad_norm=max_norm, **flags
    )
    adamw = torch.optim.AdamW(theirs, **flags)
    for step in range(3):
        grads = [signs(*SHAPE), signs(40, 3)]
        if step == 0:
            grads = [
                grad * size if where in (name, "both") else grad
                for grad, name in zip(grads, ("table", "standard"), strict=True)
            ]
        for params in (ours, theirs):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
        optimizer.step()
        if max_norm is not None:
            clip_grad_norm_(theirs, max_norm)
        adamw.step()
    assert all(param.isfinite().all() for param in theirs)
    assert state_is_finite(adamw)
    assert all(param.isfinite().all() for param in ours)
    assert state_is_finite(optimizer)
    if state_is_finite(adamw, "exp_avg_sq"):
        assert state_is_finite(optimizer, "exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_square_norm_of_standard_gradients_equals_the_float64_norm(dtype: torch.dtype) -> None:
    grads = [(signs(50) * 1e25).to(dtype), (signs(3, 4) * 3e38).to(dtype), signs(5).to(dtype)]
    expected = sum(grad.double().square().sum() for grad in grads)
    torch.testing.assert_close(clipping.square_norm(grads), expected, rtol=1e-6, atol=0)


def test_square_norm_of_many_large_norms_does_not_overflow() -> None:
    """Each norm fits into float32, the sum of their squares does not."""
    grads = [torch.full((1,), 1e19) for _ in range(9)]
    torch.testing.assert_close(clipping.square_norm(grads).sqrt().item(), 3e19, rtol=1e-6, atol=0)


def test_square_norm_of_an_infinite_gradient_is_infinite() -> None:
    assert clipping.square_norm([torch.tensor([1.0, float("inf")]), torch.tensor([1e30])]).isinf()
    assert clipping.square_norm([torch.tensor([1.0, float("nan")]), torch.tensor([1e30])]).isnan()
