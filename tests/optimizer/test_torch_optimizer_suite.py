"""Requirements of torch's test suite on every optimizer, checked for CoupledAdamW with torch's inputs for AdamW."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest: pip install expecttest")

from torch_optimizer_info import (
    COUPLED_ADAMW,
    DEVICE,
    assert_same,
    build,
    common,
    copies,
    each_input,
    error_inputs,
    every_input,
    marked,
    new_params,
    optim_inputs,
    take_steps,
)

from coupled_adam import CoupledAdamW

# AdamW of torch 2.6 and 2.7 accepts only a learning rate of shape ().
LRS_OF_ONE_ELEMENT = [torch.tensor([0.01])] if torch.__version__ >= "2.8" else []


def least_squares(seed: int = 0) -> tuple[list[nn.Parameter], Any]:
    """The problem from torch's own tests: a matrix, a bias and a vector."""
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.randn(10, 5, generator=generator).to(DEVICE))
    bias = nn.Parameter(torch.randn(10, generator=generator).to(DEVICE))
    vector = torch.randn(5, generator=generator).to(DEVICE)
    return [weight, bias], lambda: (weight.mv(vector) + bias).pow(2).sum()


def closure_of(optimizer: Optimizer, loss_of: Any) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_of()
        loss.backward()
        return loss

    return closure


@every_input
def test_the_loss_moves_in_the_right_direction(given: Any) -> None:
    params, loss_of = least_squares()
    optimizer = build(params, given.kwargs)
    closure = closure_of(optimizer, loss_of)
    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor)
    last = closure().item()
    assert last > first if given.kwargs.get("maximize") else last < first


@pytest.mark.parametrize(
    "schedules", COUPLED_ADAMW.scheduler_inputs, ids=lambda schedules: f"{len(schedules)} schedules"
)
@each_input
def test_the_loss_moves_in_the_right_direction_with_schedules(given: Any, schedules: Any) -> None:
    params, loss_of = least_squares()
    optimizer = build(params, given.kwargs)
    schedulers = [make(optimizer) for make in schedules]
    closure = closure_of(optimizer, loss_of)
    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    last = closure().item()
    assert last > first if given.kwargs.get("maximize") else last < first


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@each_input
def test_every_implementation_matches_the_loop(given: Any, dtype: torch.dtype, flag: str) -> None:
    results = []
    for value in (False, True):
        params = new_params(dtype)
        optimizer = build(params, {**given.kwargs, "foreach": False, "fused": False, flag: value})
        take_steps(optimizer, params, steps=7)
        results.append((params, optimizer))
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 1e-6}
    assert_same(results[0][0], results[1][0], **tolerance)
    for mine, theirs in zip(results[0][0], results[1][0], strict=True):
        for key, value in results[0][1].state[mine].items():
            torch.testing.assert_close(
                value, results[1][1].state[theirs][key], check_device=False, check_dtype=key != "step", **tolerance
            )


@every_input
def test_standard_parameters_equal_those_of_adamw(given: Any) -> None:
    mine = new_params()
    theirs = copies(mine)
    optimizer, adamw = build(mine, given.kwargs), AdamW(theirs[2:], **given.kwargs)
    take_steps(optimizer, mine)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for param in theirs:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        adamw.step()
    for left, right in zip(mine[2:], theirs[2:], strict=True):
        assert torch.equal(left, right)


@every_input
def test_parameters_without_gradient_are_left_alone(given: Any) -> None:
    params = new_params()
    before = copies(params)
    optimizer = build(params, given.kwargs)
    optimizer.step()
    assert_same(params, before, rtol=0, atol=0)
    assert not any(optimizer.state.values())


@every_input
def test_with_zero_gradients_only_weight_decay_changes_parameters(given: Any) -> None:
    params = new_params()
    before = copies(params)
    optimizer = build(params, {**given.kwargs, "weight_decay": 0.0})
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same(params, before, rtol=0, atol=0)


@every_input
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_all_groups(given: Any, set_to_none: bool) -> None:
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params, steps=1)
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in params:
        assert param.grad is None if set_to_none else not param.grad.any()


@every_input
def test_an_optimizer_can_be_printed(given: Any) -> None:
    optimizer = build(new_params(), given.kwargs)
    text = repr(optimizer)
    assert text.startswith("CoupledAdamW (")
    assert all(
        f"{key}: {value}" in text for key, value in given.kwargs.items() if not isinstance(value, Tensor | tuple)
    )


def test_step_hooks_of_every_kind_run_once_in_order() -> None:
    params = new_params()
    optimizer = build(params, {})
    called: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("global before")),
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_post_hook(lambda *_: called.append("global after")),
    ]
    take_steps(optimizer, params, steps=1)
    for handle in handles:
        handle.remove()
    take_steps(optimizer, params, steps=1)
    assert called == ["global before", "before", "after", "global after"]


def test_a_step_pre_hook_can_replace_the_arguments() -> None:
    params, loss_of = least_squares()
    optimizer = build(params, {})
    closure = closure_of(optimizer, loss_of)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((optimizer, closure), {}))
    assert isinstance(optimizer.step(), Tensor)


@every_input
def test_a_tensor_learning_rate_equals_a_number(given: Any) -> None:
    if given.kwargs.get("foreach") and not given.kwargs.get("capturable"):
        pytest.skip("torch refuses a tensor lr with foreach=True and capturable=False")
    results = []
    for lr in (0.01, torch.tensor(0.01), *LRS_OF_ONE_ELEMENT):
        params = new_params()
        optimizer = build(params, {**given.kwargs, "lr": lr})
        take_steps(optimizer, params)
        results.append(params)
    for params in results[1:]:
        assert_same(results[0], params, rtol=1e-6, atol=1e-7)


def test_options_of_a_group_apply_only_to_that_group() -> None:
    params = new_params()
    groups = marked(params)
    groups[0]["lr"], groups[1]["weight_decay"] = 0.0, 0.0
    before = copies(params)
    optimizer = CoupledAdamW(groups, lr=0.1, weight_decay=0.5)
    take_steps(optimizer, params, steps=1)
    assert_same(params[:2], before[:2], rtol=0, atol=0)
    assert not any(torch.equal(param, old) for param, old in zip(params[2:], before[2:], strict=True))
    optimizer.param_groups[0]["lr"] = 0.1
    take_steps(optimizer, params, steps=1)
    assert not any(torch.equal(param, old) for param, old in zip(params[:2], before[:2], strict=True))


@every_input
def test_complex_tables_are_refused_and_other_complex_parameters_are_updated_as_by_adamw(given: Any) -> None:
    assert not COUPLED_ADAMW.supports_complex
    with pytest.raises(ValueError, match="complex64"):
        build([nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64, device=DEVICE))], given.kwargs)
    if given.kwargs.get("fused"):
        pytest.skip("torch's fused AdamW takes no complex parameters")
    mine = [*new_params()[:1], nn.Parameter(torch.ones(3, dtype=torch.complex64, device=DEVICE))]
    theirs = copies(mine[1:])
    take_steps(build(mine, given.kwargs), mine, steps=1)
    theirs[0].grad = mine[1].grad.clone()
    AdamW(theirs, **given.kwargs).step()
    assert torch.equal(mine[1], theirs[0])


def named(error_input: Any) -> str:
    return str(error_input.optimizer_error_input.desc)


@pytest.mark.parametrize("error_input", error_inputs(DEVICE, torch.float32), ids=named)
def test_errors_are_the_same_as_with_adamw(error_input: Any) -> None:
    given = error_input.optimizer_error_input
    params = [nn.Parameter(torch.randn(2, 3, device=DEVICE))] if given.params is None else given.params
    assert error_input.error_on is common.OptimizerErrorEnum.CONSTRUCTION_ERROR
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error_input.error_type, match=error_input.error_regex):
            CoupledAdamW(marked(params), **given.kwargs)


def test_torch_still_provides_the_inputs_used_here() -> None:
    """If torch renamed them, these tests would silently test nothing."""
    assert len(optim_inputs("cpu")) >= 4
    assert len(error_inputs("cpu", torch.float32)) >= 8
    assert {"foreach", "fused"} <= set(COUPLED_ADAMW.supported_impls)
    descriptions = [given.desc for given in optim_inputs("cpu")]
    assert not any("amsgrad" in description for description in descriptions)
