"""Requirements of torch's test suite on the state of every optimizer: save, load, copy, pickle, hooks."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest: pip install expecttest")

from torch_optimizer_info import (
    COUPLED_ADAMW,
    assert_same,
    build,
    copies,
    each_input,
    every_input,
    marked,
    new_params,
    take_steps,
)

from coupled_adam import CoupledAdamW


def public_attributes(optimizer: Optimizer) -> set[str]:
    return {name for name in vars(optimizer) if not name.startswith("_")}


def assert_same_state(optimizer: Optimizer, other: Optimizer, **tolerance: float) -> None:
    mine, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for index, state in mine.items():
        assert state.keys() == theirs[index].keys()
        for key, value in state.items():
            torch.testing.assert_close(value, theirs[index][key], check_device=False, **tolerance)


@every_input
def test_a_state_dict_continues_the_run(given: Any) -> None:
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params)
    other_params = copies(params)
    other = build(other_params, given.kwargs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch keeps the tensors without copying them
    assert_same_state(optimizer, other, rtol=0, atol=0)
    take_steps(optimizer, params, seed=2)
    take_steps(other, other_params, seed=2)
    assert_same(params, other_params, rtol=0, atol=0)


@every_input
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_saved_state_dict_is_the_same_when_loaded(given: Any, weights_only: bool) -> None:
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=weights_only)
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
    other = build(copies(params), given.kwargs)
    other.load_state_dict(loaded)
    assert_same_state(optimizer, other, rtol=0, atol=0)


@each_input
def test_older_state_dicts_can_be_loaded(given: Any) -> None:
    """Files written before torch had some of the flags."""
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params)
    for flag in COUPLED_ADAMW.not_og_supported_flags:
        older = copy.deepcopy(optimizer.state_dict())
        for group in older["param_groups"]:
            group.pop(flag, None)
        optimizer.load_state_dict(older)
        take_steps(optimizer, params, steps=1)
        assert all(flag in group for group in optimizer.param_groups)


@each_input
def test_a_state_dict_with_a_number_for_step_can_be_loaded(given: Any) -> None:
    """torch wrote such files before 1.12."""
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params)
    older = copy.deepcopy(optimizer.state_dict())
    for state in older["state"].values():
        state["step"] = float(state["step"])
    optimizer.load_state_dict(older)
    take_steps(optimizer, params, steps=1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}


@every_input
@pytest.mark.parametrize("named_first", [True, False])
def test_named_and_unnamed_state_dicts_fit_together(given: Any, named_first: bool) -> None:
    optimizers = []
    for named in (named_first, not named_first):
        params = new_params()
        groups = marked(params)
        if named:
            for group in groups:
                group["params"] = [(f"p{param.dim()}{i}", param) for i, param in enumerate(group["params"])]
        optimizer = CoupledAdamW(groups, **given.kwargs)
        take_steps(optimizer, params, seed=3 if named == named_first else 4)
        optimizers.append(optimizer)
    saved, loaded = optimizers
    names = [group.get("param_names") for group in loaded.param_groups]
    loaded.load_state_dict(saved.state_dict())
    assert_same_state(saved, loaded, rtol=0, atol=0)
    if not named_first:
        assert [group["param_names"] for group in loaded.param_groups] == names


@every_input
def test_deepcopy_and_pickle_keep_every_public_attribute(given: Any) -> None:
    params = new_params()
    optimizer = build(params, {**given.kwargs, "max_grad_norm": 1.0})
    take_steps(optimizer, params)
    assert "grad_norm" in public_attributes(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert public_attributes(other) == public_attributes(optimizer)
        assert_same_state(optimizer, other, rtol=0, atol=0)
        assert torch.equal(other.grad_norm, optimizer.grad_norm)


@every_input
def test_every_parameter_has_state_after_a_step(given: Any) -> None:
    params = new_params()
    optimizer = build(params, given.kwargs)
    take_steps(optimizer, params, steps=1)
    for param in params:
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(isinstance(value, Tensor) for value in optimizer.state[param].values())


@every_input
def test_the_step_count_has_the_dtype_that_torch_uses(given: Any) -> None:
    """torch uses float32, or float64 if that is the default dtype and the optimizer is not fused."""
    before = torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            params = new_params()
            theirs = copies(params)
            optimizer, adamw = build(params, given.kwargs), AdamW(theirs, **given.kwargs)
            take_steps(optimizer, params, steps=1)
            take_steps(adamw, theirs, steps=1)
            for mine, other in zip(params, theirs, strict=True):
                assert optimizer.state[mine]["step"].dtype == adamw.state[other]["step"].dtype
    finally:
        torch.set_default_dtype(before)


def test_state_dict_hooks_see_and_change_the_state_dict() -> None:
    params = new_params()
    optimizer = build(params, {})
    take_steps(optimizer, params)
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, given: {**given, "note": 1})
    saved = optimizer.state_dict()
    assert called == ["before"]
    assert saved["note"] == 1


def test_load_state_dict_hooks_run_in_order_of_registration() -> None:
    params = new_params()
    optimizer = build(params, {})
    take_steps(optimizer, params)
    saved = optimizer.state_dict()
    called: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("second"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("fourth"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("third"), prepend=True)
    optimizer.load_state_dict(saved)
    assert called == ["first", "second", "third", "fourth"]
