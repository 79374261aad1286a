"""Usual uses of a torch optimizer: copy, pickle, schedule, compile, accumulate, add groups, freeze."""

import copy
import io
import itertools
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from oracle import assert_matches, coupled, gradients, oracle, relative_error, run, table
from test_against_adamw import LanguageModel, train
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_continues_as_the_original(how: str) -> None:
    """Coupling, scale exponent and clipping survive, and so does the state."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = CoupledAdamW(model, lr=0.01, scale_exponent=1.0, max_grad_norm=0.1)
    train(model, optimizer, steps=2)
    if how == "deepcopy":
        other_model, other = copy.deepcopy((model, optimizer))
    elif how == "pickle":
        other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        other_model, other = torch.load(buffer, weights_only=False)
    assert other.defaults["max_grad_norm"] == 0.1
    assert optimizer.grad_norm is not None
    assert torch.equal(other.grad_norm, optimizer.grad_norm)
    train(model, optimizer, steps=2)
    train(other_model, other, steps=2)
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_learning_rate_schedules_reach_coupled_tables() -> None:
    param = table((10, 3))
    grads = gradients((10, 3), 3)
    optimizer = coupled(param, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    expected = reference_init(param)
    for i, grad in enumerate(grads):
        expected = reference_step(expected, grad, lr=0.1 * 0.5**i)
        run(optimizer, param, [grad])
        schedule.step()
    assert_matches(optimizer, param, expected)


def test_accumulated_gradients_equal_one_large_batch() -> None:
    torch.manual_seed(0)
    whole, parts = LanguageModel(), LanguageModel()
    parts.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, 23, (4, 9))
    for model, chunks in ((whole, 1), (parts, 4)):
        optimizer = CoupledAdamW(model, lr=0.01)
        for chunk in tokens.chunk(chunks):
            (
                nn.functional.cross_entropy(model(chunk[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten()) / chunks
            ).backward()
        optimizer.step()
    for mine, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_parameters_without_gradient_are_left_alone() -> None:
    first, second = table((6, 2)), table((8, 3))
    optimizer = CoupledAdamW([{"params": [first, second], "coupled": True}], max_grad_norm=1.0)
    run(optimizer, second, gradients((8, 3), 2))
    assert torch.equal(first, table((6, 2)))
    assert first not in optimizer.state or not optimizer.state[first]
    assert optimizer.state[second]["step"].item() == 2


def test_a_step_without_any_gradient_does_nothing() -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model, max_grad_norm=1.0)
    optimizer.step()
    assert not any(optimizer.state.values())


def test_each_table_has_its_own_second_moment() -> None:
    params = [table((6, 2)), table((9, 2)), table((5, 7))]
    optimizer = CoupledAdamW([{"params": params[:2], "coupled": True}, {"params": params[2:], "coupled": True}])
    grads = [gradients((6, 2), 3), gradients((9, 2), 3), gradients((5, 7), 3)]
    expected = [oracle(p, g, weight_decay=0.01) for p, g in zip(params, grads, strict=True)]
    for step in range(3):
        for param, of_param in zip(params, grads, strict=True):
            param.grad = of_param[step]
        optimizer.step()
    for param, state in zip(params, expected, strict=True):
        assert_matches(optimizer, param, state)


def test_groups_can_be_added_later() -> None:
    first, second, third = table((6, 2)), table((8, 3)), nn.Parameter(torch.randn(3))
    optimizer = coupled(first, scale_exponent=2.0, max_grad_norm=5.0)
    optimizer.add_param_group({"params": [second], "coupled": True})
    optimizer.add_param_group({"params": [third]})
    assert [group["coupled"] for group in optimizer.param_groups] == [True, True, False]
    assert [group["scale_exponent"] for group in optimizer.param_groups] == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match=r"group 3: .*'parameter 0'.*\(4,\).*\(V, H\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4))], "coupled": True})
    assert len(optimizer.param_groups) == 3


def test_error_if_nonfinite_can_be_switched_during_training() -> None:
    param = table((6, 2))
    optimizer = coupled(param)
    optimizer.error_if_nonfinite = True
    with pytest.raises(RuntimeError, match="'parameter 0'"):
        run(optimizer, param, [torch.full((6, 2), torch.nan)])
    optimizer.add_param_group({"params": [table((5, 3))], "coupled": True})
    assert [group["error_if_nonfinite"] for group in optimizer.param_groups] == [True, True]
    optimizer.error_if_nonfinite = False
    run(optimizer, param, [torch.full((6, 2), torch.nan)])
    assert param.isnan().all()


def test_missing_triton_is_reported_once_and_only_if_cuda_needs_it() -> None:
    """In its own process: the result of the first step is cached for all others."""
    program = """
import sys, warnings
from types import SimpleNamespace
sys.modules["coupled_adam.optimizer.triton_kernels"] = None  # as if its imports failed
import torch
from coupled_adam.optimizer import blockwise, table_step
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert table_step.kernels_for(torch.zeros(1)) is blockwise
    assert caught == []
    on_cuda = SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert [table_step.kernels_for(on_cuda) for _ in range(2)] == [blockwise, blockwise]
for warning in caught:
    print(warning.category.__name__, warning.message)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"UserWarning .*Triton.*\n", done.stdout)


def test_state_has_torch_keys_and_one_row_of_second_moment() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        param = table((11, 4), dtype)
        optimizer = coupled(param)
        run(optimizer, param, gradients((11, 4), 1, dtype))
        state = optimizer.state[param]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert state["exp_avg"].shape == (11, 4)
        assert state["exp_avg"].dtype == dtype
        assert state["exp_avg_sq"].shape == (1, 4)
        assert state["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("flags", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")], ids=str
)
def test_the_step_count_lives_where_torch_puts_it(flags: dict[str, Any], device: str) -> None:
    """On the host, or beside the parameter when fused or capturable; seen here on the meta device."""
    param = nn.Parameter(torch.zeros(4, 2, device="meta"))
    param.grad = torch.zeros(4, 2, device="meta")
    optimizer = coupled(param, **flags)
    lists: list[list[Any]] = [[] for _ in range(6)]
    optimizer._init_group(optimizer.param_groups[0], *lists)
    assert optimizer.state[param]["step"].device.type == device


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.1}, {"lr": torch.tensor(0.01)}, {"options": {"output_embeddings": {"betas": (0.0, 0.9)}}}],
    ids=str,
)
def test_compiled_step_equals_the_eager_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    compiled_model = LanguageModel()
    eager_model = copy.deepcopy(compiled_model)
    compiled_optimizer = CoupledAdamW(compiled_model, **options)
    eager_optimizer = CoupledAdamW(eager_model, **options)
    torch._dynamo.reset()
    compiled_step = torch.compile(compiled_optimizer.step)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for mine, theirs in zip(compiled_model.parameters(), eager_model.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        compiled_step()
        eager_optimizer.step()
    for mine, theirs in zip(compiled_model.parameters(), eager_model.parameters(), strict=True):
        # In standard groups, torch's compiled AdamW computes 1 - beta2^t in float32, which loses digits.
        is_table = mine is compiled_model.embedding.weight
        assert relative_error(mine, theirs) < (1e-6 if is_table else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_temporaries_have_at_most_6_mib_and_a_quarter_of_the_table(dtype: torch.dtype) -> None:
    """Counted by torch's profiler; the row blocks are the only temporaries."""
    for shape, options in itertools.product(
        [(60_000, 256), (2048, 768), (4096, 64), (401, 64)],
        [
            {},
            {"max_grad_norm": 0.1},
            {"fused": True},
            {"maximize": True, "weight_decay": 0.1},
            {"betas": (0.0, 0.99), "max_grad_norm": 0.1},
        ],
    ):
        if shape[0] == 60_000 and options:
            continue  # the limit does not depend on it, and a large table is slow
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = coupled(param, **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        # The blocks need a few more numbers per column, and a quarter is rounded up to a whole row.
        assert peak_bytes(optimizer.step) <= min(param.numel() * param.itemsize / 4, 6 * 2**20) + 64 * shape[1]


def peak_bytes(function: Any) -> int:
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    peak = allocated = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak
