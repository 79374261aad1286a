"""max_grad_norm inside the step equals clip_grad_norm_ before it."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, oracle, relative_error, run, table
from test_against_adamw import LanguageModel, train
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import blockwise, clipping, table_step


@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1e6])
@pytest.mark.parametrize(
    "flags", [{}, {"fused": True}, {"foreach": False}, {"capturable": False, "maximize": True}], ids=str
)
def test_clipping_inside_equals_clip_grad_norm_before(path: ModuleType, max_norm: float, flags: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inside = LanguageModel()
    before = copy.deepcopy(inside)
    train(inside, CoupledAdamW(inside, lr=0.01, weight_decay=0.1, max_grad_norm=max_norm, **flags))
    train(before, CoupledAdamW(before, lr=0.01, weight_decay=0.1, **flags), clip=max_norm)
    for mine, theirs in zip(inside.parameters(), before.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-6


@pytest.mark.parametrize("wide", ["all", "standard", "coupled"])
def test_fused_clipping_handles_float64_parameters_among_others(wide: str) -> None:
    """torch's fused kernels accept only a float32 scale."""
    torch.manual_seed(0)
    start = LanguageModel()
    for part in {"all": [start], "standard": [start.norm], "coupled": [start.embedding]}[wide]:
        part.double()
    trained = []
    for fused in (True, False):
        model = copy.deepcopy(start)
        optimizer = CoupledAdamW(model, lr=0.01, max_grad_norm=0.1, fused=fused)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()
        trained.append(model)
    for mine, theirs in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-6


def test_clipped_second_moment_is_that_of_the_clipped_gradient(path: ModuleType) -> None:
    param = table((20, 4))
    grads = gradients((20, 4), 5)
    clipped = [grad * min(1.0, 0.1 / (grad.double().norm().item() + 1e-6)) for grad in grads]
    expected = oracle(param, clipped)
    optimizer = coupled(param, max_grad_norm=0.1)
    run(optimizer, param, grads)
    assert relative_error(param, expected.embeddings) < 1e-6
    assert relative_error(optimizer.state[param]["exp_avg_sq"], expected.second_moment.mean(0, keepdim=True)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_grad_norm_is_the_norm_before_clipping(dtype: torch.dtype) -> None:
    """Even if the sum of squares of float16 gradients overflows float16."""
    param, other = table((20, 4), dtype), nn.Parameter(torch.randn(300, 7).to(dtype))
    optimizer = CoupledAdamW([{"params": [param], "coupled": True}, {"params": [other]}], max_grad_norm=1.0)
    param.grad, other.grad = (torch.randn_like(p) * 300 for p in (param, other))
    expected = torch.cat([param.grad.double().flatten(), other.grad.double().flatten()]).norm()
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert relative_error(optimizer.grad_norm, expected) < 1e-6


def test_grad_norm_is_none_without_clipping() -> None:
    param = table((5, 2))
    optimizer = coupled(param)
    run(optimizer, param, gradients((5, 2), 1))
    assert optimizer.grad_norm is None


def test_coupled_gradients_are_not_changed_and_standard_ones_are_clipped() -> None:
    param, other = table((20, 4)), nn.Parameter(torch.randn(3))
    optimizer = CoupledAdamW([{"params": [param], "coupled": True}, {"params": [other]}], max_grad_norm=1e-3)
    param.grad, other.grad = torch.randn(20, 4), torch.randn(3)
    coupled_before, standard_before = param.grad.clone(), other.grad.clone()
    optimizer.step()
    assert torch.equal(param.grad, coupled_before)
    assert optimizer.grad_norm is not None
    torch.testing.assert_close(other.grad, standard_before * (1e-3 / (optimizer.grad_norm + 1e-6)))


def test_gradients_at_the_limit_are_scaled_as_by_torch() -> None:
    """torch divides by norm + 1e-6, which matters for tiny norms."""
    param = table((4, 2))
    grad = torch.full((4, 2), 1e-7)
    expected = oracle(param, [grad * (1e-7 / (grad.double().norm().item() + 1e-6))], eps=0.0, betas=(0.5, 0.0))
    optimizer = coupled(param, max_grad_norm=1e-7, eps=0.0, betas=(0.5, 0.0))
    run(optimizer, param, [grad])
    assert relative_error(optimizer.state[param]["exp_avg"], expected.first_moment) < 1e-6


def test_a_float64_parameter_beside_a_float32_table_is_clipped_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factor is float64, which the table's Triton kernels must not get."""
    triton_kernels = pytest.importorskip("coupled_adam.optimizer.triton_kernels")
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            table_step, "kernels_for", lambda tensor: blockwise if tensor.dtype == torch.float64 else triton_kernels
        )
    param, other = table((20, 4)), nn.Parameter(torch.randn(3, dtype=torch.float64))
    optimizer = CoupledAdamW([{"params": [param], "coupled": True}, {"params": [other]}], max_grad_norm=0.1)
    param.grad, other.grad = torch.randn(20, 4), torch.randn(3, dtype=torch.float64)
    expected = oracle(
        param, [param.grad * 0.1 / torch.cat([param.grad.flatten(), other.grad]).norm()], weight_decay=0.01
    )
    optimizer.step()
    assert relative_error(param, expected.embeddings) < 1e-5


def test_float64_tables_are_clipped_in_float64() -> None:
    param = table((20, 4), torch.float64)
    grads = gradients((20, 4), 5, torch.float64)
    expected = oracle(param, [grad * (0.1 / (grad.norm() + 1e-6)).clamp(max=1.0) for grad in grads])
    optimizer = coupled(param, max_grad_norm=0.1)
    run(optimizer, param, grads)
    assert relative_error(param, expected.embeddings) < 1e-13


def test_max_grad_norm_can_be_changed_during_training() -> None:
    param = table((20, 4))
    optimizer = coupled(param, max_grad_norm=1.0, betas=(0.5, 0.9))
    optimizer.max_grad_norm = 0.25
    run(optimizer, param, [torch.ones(20, 4)])
    torch.testing.assert_close(optimizer.state[param]["exp_avg"].norm().item(), 0.125, rtol=1e-5, atol=0)
    assert optimizer.state_dict()["param_groups"][0]["max_grad_norm"] == 0.25
    optimizer.param_groups[0]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=r"set optimizer.max_grad_norm"):
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid max_grad_norm value: -1"):
        optimizer.max_grad_norm = -1


def test_float16_gradients_beside_complex_ones_do_not_overflow() -> None:
    grads = [torch.full((1000,), 30000.0, dtype=torch.float16), torch.ones(2, dtype=torch.complex64)]
    assert clipping.square_norm(grads).isfinite()


def test_complex_gradients_count_with_their_absolute_value() -> None:
    grad = torch.randn(5, dtype=torch.complex64)
    expected = grad.to(torch.complex128).abs().square().sum()
    torch.testing.assert_close(clipping.square_norm([grad]), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradients_are_not_masked(path: ModuleType, value: float) -> None:
    """One bad entry spoils its column for the whole vocabulary, and no other column."""
    param = table((10, 4))
    before = param.detach().clone()
    optimizer = coupled(param)
    grad = torch.randn(10, 4)
    grad[3, 1] = value
    run(optimizer, param, [grad])
    assert not optimizer.state[param]["exp_avg_sq"][0, 1].isfinite()
    assert optimizer.state[param]["exp_avg_sq"][0, [0, 2, 3]].isfinite().all()
    changed = param.detach() != before
    assert changed[:, [0, 2, 3]].all()
    # A NaN spreads over the column; an infinite second moment stops it.
    assert param[:, 1].isnan().all() if value != value else not changed[[0, 1, 2, 4], 1].any()


@pytest.mark.parametrize("where", ["coupled", "standard"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_error_if_nonfinite_names_the_tensor_and_writes_nothing(
    path: ModuleType, where: str, clip: float | None
) -> None:
    param, other = table((10, 4)), nn.Parameter(torch.randn(3))
    optimizer = CoupledAdamW(
        [{"params": [("wte.weight", param)], "coupled": True}, {"params": [("norm.bias", other)]}],
        max_grad_norm=clip,
        error_if_nonfinite=True,
    )
    run_both = [torch.randn(10, 4), torch.randn(3)]
    param.grad, other.grad = run_both[0].clone(), run_both[1].clone()
    optimizer.step()
    saved = copy.deepcopy((param.detach(), other.detach(), optimizer.state_dict()["state"]))
    param.grad, other.grad = run_both[0].clone(), run_both[1].clone()
    (param if where == "coupled" else other).grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="wte.weight" if where == "coupled" else "norm.bias"):
        optimizer.step()
    assert torch.equal(param, saved[0])
    assert torch.equal(other, saved[1])
    for index, state in saved[2].items():
        for key, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][index][key], value)


def test_error_if_nonfinite_names_the_tensor_when_others_have_no_gradient() -> None:
    param, rests, other = table((10, 4)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    groups = [
        {"params": [("wte.weight", param)], "coupled": True},
        {"params": [("rests.bias", rests), ("norm.bias", other)]},
    ]
    optimizer = CoupledAdamW(groups, error_if_nonfinite=True)
    param.grad, other.grad = torch.randn(10, 4), torch.full((3,), float("nan"))
    with pytest.raises(RuntimeError, match=r"in 'norm\.bias'\."):
        optimizer.step()
