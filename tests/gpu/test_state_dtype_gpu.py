"""First moments in bfloat16 on a real GPU: the bits of the CPU, new bits in each replay, and no synchronisation."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from side_streams import side_stream
from torch import Tensor, nn

from coupled_adam.optimizer import blockwise, family_blockwise, table_step
from coupled_adam.optimizer.reference_rounding import rounded_table

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from oracle import coupled, gradients, relative_error, run, table

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
MEMBERS: list[dict[str, Any]] = [
    {},
    {"row_exponent": 0.25},
    {"row_exponent": 0.25, "mean_free": True},
    {"row_exponent": 0.25, "mean_free": True, "max_grad_norm": 1e9},
]
FLAGS: list[dict[str, Any]] = [{}, {"fused": True}, {"capturable": True}]
SPECIAL = [0.0, -0.0, 1.0, 2.0**-149, -(2.0**-130), 3.3895313892515355e38, -3.3e38, float("nan")]


@pytest.fixture(params=["triton", "blockwise"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations on the GPU; the second runs if Triton is missing."""
    if request.param == "blockwise":
        monkeypatch.setattr(table_step, "kernels_for", lambda tensor: blockwise)
        monkeypatch.setattr(table_step, "family_kernels_for", lambda tensor: family_blockwise)


def bfloat16_state(param: nn.Parameter, **options: Any) -> Any:
    return coupled(param, state_dtype=torch.bfloat16, state_seed=11, **options)


def forget_moments(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().view(torch.int16)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("options", MEMBERS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (53, 19), (517, 2560), (70, 9000)], ids=str)
def test_the_same_float32_is_rounded_as_on_the_cpu(
    path: None, shape: tuple[int, int], options: dict[str, Any], flags: dict[str, Any]
) -> None:
    # From a moment of 0 and with beta1 = 0.5, the moment is bitwise equal to half the gradient.
    param, on_cpu = table(shape, device="cuda"), table(shape)
    optimizer = bfloat16_state(param, betas=(0.5, 0.9), **options, **flags)
    expected = bfloat16_state(on_cpu, betas=(0.5, 0.9), **options)
    for grad in gradients(shape, 3):
        forget_moments(optimizer, expected)
        run(optimizer, param, [grad.cuda()])
        run(expected, on_cpu, [grad])
        assert torch.equal(bits(optimizer.state[param]["exp_avg"]), bits(expected.state[on_cpu]["exp_avg"]))


def test_rounding_matches_the_literal_one(path: None) -> None:
    param = table((53, 19), device="cuda")
    optimizer = bfloat16_state(param, betas=(0.5, 0.9))
    for t, grad in enumerate(gradients((53, 19), 3), start=1):
        forget_moments(optimizer)
        run(optimizer, param, [2 * grad.cuda()])
        expected = rounded_table(grad, seed=11, table=0, step=t)
        assert torch.equal(optimizer.state[param]["exp_avg"].cpu().double(), expected)


def test_numbers_without_two_neighbours_are_rounded_to_nearest(path: None) -> None:
    param = table((2, len(SPECIAL)), device="cuda")
    grad = torch.tensor([SPECIAL, SPECIAL])
    optimizer = bfloat16_state(param, betas=(2.0**-30, 0.9))  # 1 - beta1 is 1 in float32: the moment is the gradient
    run(optimizer, param, [grad.cuda()])
    value = optimizer.state[param]["exp_avg"].cpu().float()
    exact = grad.bfloat16().float()
    close = (value - exact).abs() <= exact.abs() * 2**-7 + 2.0**-133
    assert bool((close | (value == exact) | (value.isnan() & exact.isnan())).all())


@pytest.mark.parametrize("options", MEMBERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_agree_with_the_cpu(path: None, dtype: torch.dtype, options: dict[str, Any]) -> None:
    shape = (1501, 768)
    param, on_cpu = table(shape, dtype, "cuda"), table(shape, dtype)
    optimizer, expected = bfloat16_state(param, fused=True, **options), bfloat16_state(on_cpu, **options)
    grads = gradients(shape, 4, dtype)
    run(optimizer, param, [grad.cuda() for grad in grads])
    run(expected, on_cpu, grads)
    moment, expected_moment = optimizer.state[param]["exp_avg"], expected.state[on_cpu]["exp_avg"]
    assert moment.dtype == torch.bfloat16
    # Moments that differ in the last bit of float32 are sometimes rounded in different directions.
    assert float((bits(moment) != bits(expected_moment)).double().mean()) < 1e-3
    assert relative_error(moment, expected_moment) < 1e-3
    assert relative_error(param, on_cpu) < (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("options", MEMBERS, ids=str)
def test_cuda_graph_replays_with_the_bits_of_its_step(path: None, options: dict[str, Any]) -> None:
    shape = (530, 190)
    captured, eager = table(shape, device="cuda"), table(shape, device="cuda")
    optimizer = bfloat16_state(captured, capturable=True, **options)
    eager_optimizer = bfloat16_state(eager, capturable=True, **options)
    grads = gradients(shape, 6, device="cuda")
    captured.grad, eager.grad = grads[0].clone(), grads[0].clone()
    with side_stream():
        for _ in range(2):
            optimizer.step()
            eager_optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for grad in grads[1:]:
        captured.grad.copy_(grad)
        eager.grad.copy_(grad)
        graph.replay()
        eager_optimizer.step()
    assert torch.equal(captured, eager)
    assert torch.equal(bits(optimizer.state[captured]["exp_avg"]), bits(eager_optimizer.state[eager]["exp_avg"]))


@pytest.mark.parametrize("options", MEMBERS, ids=str)
def test_a_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    param = table((530, 190), device="cuda")
    optimizer = bfloat16_state(param, fused=True, **options)
    run(optimizer, param, gradients((530, 190), 2, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", MEMBERS, ids=str)
def test_a_skipped_step_does_not_change_the_moments(options: dict[str, Any]) -> None:
    param = table((530, 190), device="cuda")
    optimizer = bfloat16_state(param, fused=True, **options)
    run(optimizer, param, gradients((530, 190), 2, device="cuda"))
    before = copy.deepcopy(optimizer.state[param])
    optimizer.grad_scale = torch.tensor(1.0, device="cuda")
    optimizer.found_inf = torch.tensor(1.0, device="cuda")
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[param].items())


def test_the_compiled_step_has_the_same_bits() -> None:
    shape = (230, 60)
    param, eager = table(shape, device="cuda"), table(shape, device="cuda")
    optimizer = bfloat16_state(param, betas=(0.5, 0.9))
    eager_optimizer = bfloat16_state(eager, betas=(0.5, 0.9))
    torch._dynamo.reset()
    compiled_step = torch.compile(optimizer.step)
    for grad in gradients(shape, 3, device="cuda"):
        forget_moments(optimizer, eager_optimizer)
        param.grad, eager.grad = grad.clone(), grad.clone()
        compiled_step()
        eager_optimizer.step()
        assert torch.equal(bits(optimizer.state[param]["exp_avg"]), bits(eager_optimizer.state[eager]["exp_avg"]))


@pytest.mark.parametrize("options", MEMBERS, ids=str)
def test_no_temporary_of_the_size_of_the_table_is_allocated(options: dict[str, Any]) -> None:
    shape = (50_304, 768)
    param = table(shape, device="cuda")
    optimizer = bfloat16_state(param, fused=True, **options)
    run(optimizer, param, gradients(shape, 1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 8 * 2**20


def test_elements_beyond_index_2_to_the_32_have_their_own_bits() -> None:
    # 2^32 + 2^20 elements: 16 GiB for the table, 16 GiB for its gradient, 8 GiB for the moments.
    V, H = 2**20 + 2**8, 2**12
    param = nn.Parameter(torch.zeros(V, H, device="cuda"))
    # Half of it is halfway between two bfloat16 numbers.
    param.grad = torch.full((V, H), 2 * (1 + 2.0**-8), device="cuda")
    optimizer = bfloat16_state(param, betas=(0.5, 0.9), fused=True)
    optimizer.step()
    moments = optimizer.state[param]["exp_avg"]
    first, last = moments[:256] != 1, moments[-256:] != 1
    for part in (first, last):
        assert abs(float(part.float().mean()) - 0.5) < 0.01
    assert abs(float((first == last).float().mean()) - 0.5) < 0.01
