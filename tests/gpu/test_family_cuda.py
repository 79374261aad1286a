"""The family's Triton kernels on a real GPU, compared with torch operations on the CPU."""

import copy
import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from coupled_adam.optimizer import family_blockwise
from coupled_adam.optimizer.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from family_tables import close, close_state, make_table, step_with_clipping, step_without_clipping

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
STATE = ("param", "exp_avg", "exp_avg_sq", "row_avg_sq", "step")
STEPS = pytest.mark.parametrize("take_step", [step_without_clipping, step_with_clipping])


@pytest.fixture
def kernels() -> ModuleType:
    return importlib.import_module("coupled_adam.optimizer.family_triton")


def to(table: Table, device: str, *, step: bool = False) -> Table:
    """A copy on another device; the step count stays on the host by default."""
    tensors: dict[str, Tensor] = {}
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        if isinstance(value, Tensor):
            copied = value.clone(memory_format=torch.preserve_format)
            tensors[field.name] = copied if field.name == "step" and not step else copied.to(device)
    hyper = {
        field.name: value.to(device)
        for field in dataclasses.fields(table.hyper)
        if isinstance(value := getattr(table.hyper, field.name), Tensor)
    }
    return dataclasses.replace(table, hyper=dataclasses.replace(table.hyper, **hyper), **tensors)


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("V", [1, 1501])
@pytest.mark.parametrize("H", [1, 70, 768, 1000, 4096, 8192, 9000])
def test_every_width_agrees_with_torch_operations(
    kernels: ModuleType, take_step: Any, H: int, V: int, momentum: bool
) -> None:
    # A single row without its mean is zero.
    expected = make_table((V, H), padding=V // 100, momentum=momentum, weight_decay=0.1, mean_free=V > 1)
    value = to(expected, "cuda")
    for _ in range(2):
        take_step(kernels, value)
        take_step(family_blockwise, expected)
    close_state(to(value, "cpu"), expected)


@STEPS
@pytest.mark.parametrize(
    "options",
    [
        {"mean_free": False},
        {"row_moment": False, "column_exponent": 0.5},
        {"row_exponent": 0.0, "eps": 0.0},
        {"row_exponent": 1.0, "column_exponent": 0.0, "maximize": True, "second_moment_scale": 0.125},
        {"beta1": 0.0, "beta2": 0.0, "padding": 1501},
        {"momentum": False, "row_exponent": 1.0},
        {"momentum": False, "mean_free": False, "maximize": True},
        {"momentum": False, "row_moment": False, "padding": 3},
    ],
    ids=str,
)
def test_every_option_agrees_with_torch_operations(
    kernels: ModuleType, take_step: Any, options: dict[str, Any]
) -> None:
    expected = make_table((1501, 768), **options)
    value = to(expected, "cuda")
    factor = torch.tensor(0.3)
    take_step(kernels, value, factor.cuda())
    take_step(family_blockwise, expected, factor)
    close_state(to(value, "cpu"), expected)


@STEPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", [(0, 1, 2), (0, 1), (2,)], ids=str)
def test_param_gradient_and_moment_may_each_have_a_narrow_dtype(
    kernels: ModuleType, take_step: Any, which: tuple[int, ...], dtype: torch.dtype
) -> None:
    dtypes = [dtype if i in which else torch.float32 for i in range(3)]
    expected = make_table((1501, 768), dtypes=(dtypes[0], dtypes[1], dtypes[2]), lr=1.0)
    value = to(expected, "cuda")
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    # Rounding differs in a few elements, by the last bit.
    for name, tensor_dtype in (("param", dtypes[0]), ("exp_avg", dtypes[2])):
        difference = getattr(value, name).cpu().double() - getattr(expected, name).double()
        size = getattr(expected, name).double().norm()
        last_bit = max(torch.finfo(tensor_dtype).eps, torch.finfo(dtypes[2]).eps)
        assert float(difference.norm() / size) < max(0.05 * last_bit, 1e-6)


@STEPS
@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_any_stride_is_accepted(kernels: ModuleType, take_step: Any, layout: str) -> None:
    expected = make_table((1501, 70))
    value = to(expected, "cuda")
    for name in ("param", "grad", "exp_avg"):
        tensor = getattr(value, name)
        if layout == "transposed":
            setattr(value, name, tensor.t().contiguous().t())
        else:
            setattr(value, name, torch.zeros(1501, 200, device="cuda")[:, 3:143:2].copy_(tensor))
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    close_state(to(value, "cpu"), expected)


@STEPS
@pytest.mark.parametrize("H", [768, 9000])
@pytest.mark.parametrize("size", [3e18, 1e25, 1e38])
def test_updates_with_huge_gradients_agree_with_torch_operations(
    kernels: ModuleType, take_step: Any, H: int, size: float
) -> None:
    expected = make_table((1501, H), size=size, padding=1)
    expected.grad[:, 3] *= 1e-25
    value = to(expected, "cuda")
    column_sums, row_sums = kernels.square_sums(value)
    exact = expected.grad.double().square()
    torch.testing.assert_close(column_sums.sum(0).cpu(), exact[:1500].sum(0), rtol=2e-6, atol=0)
    torch.testing.assert_close(row_sums.cpu(), exact.sum(1, keepdim=True), rtol=2e-6, atol=0)
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    close_state(to(value, "cpu"), expected)


@pytest.mark.parametrize("shape", [(0, 19), (5, 0), (0, 0), (0, 9000)], ids=str)
def test_an_empty_shard_has_sums_of_zero(kernels: ModuleType, shape: tuple[int, int]) -> None:
    table = to(make_table(shape), "cuda")
    table.width = 19
    column_sums, row_sums = kernels.square_sums(table)
    assert not column_sums.any()
    assert row_sums.shape == (shape[0], 1)
    assert not row_sums.any()
    sums = kernels.first_pass(table, None)
    assert not sums.column_sums.any()
    assert not sums.weighted_sums.any()
    kernels.advance_column_moment(table, column_sums, None)
    coefficient, offset = kernels.coefficients(table, sums.weighted_sums, torch.tensor(0.1, device="cuda"))
    kernels.move_rows(table, coefficient, sums.row_factor, offset)
    torch.cuda.synchronize()


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("mean_free", [True, False])
def test_found_inf_writes_nothing(kernels: ModuleType, take_step: Any, mean_free: bool, momentum: bool) -> None:
    value = to(make_table((1501, 768), mean_free=mean_free, momentum=momentum), "cuda", step=True)
    before = to(value, "cuda", step=True)
    take_step(kernels, value, found_inf=torch.ones((), device="cuda"))
    names = [name for name in ("grad", *STATE) if momentum or name != "exp_avg"]
    assert all(torch.equal(getattr(value, name), getattr(before, name)) for name in names)
    take_step(kernels, value, found_inf=torch.zeros((), device="cuda"))
    assert not torch.equal(value.param, before.param)
    assert value.step.item() == 4


@STEPS
def test_two_runs_are_bitwise_equal(kernels: ModuleType, take_step: Any) -> None:
    first = to(make_table((50_304, 768)), "cuda")
    second = to(first, "cuda")
    for table in (first, second):
        for _ in range(3):
            take_step(kernels, table)
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in STATE)


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
def test_the_host_never_waits_and_no_temporary_has_the_size_of_a_table(
    kernels: ModuleType, take_step: Any, momentum: bool
) -> None:
    table = to(make_table((50_304, 768), momentum=momentum), "cuda", step=True)
    take_step(kernels, table)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_step(kernels, table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    temporaries = torch.cuda.max_memory_allocated() - before
    assert temporaries < table.param.numel() * 4 / 16


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("mean_free", [True, False])
def test_a_graph_rereads_learning_rate_and_exponents(
    kernels: ModuleType, take_step: Any, mean_free: bool, momentum: bool
) -> None:
    numbers = {"lr": torch.tensor(0.01), "row_exponent": torch.tensor(0.25), "column_exponent": torch.tensor(1.0)}
    plain = make_table((1501, 768), weight_decay=0.1, mean_free=mean_free, momentum=momentum, **numbers)
    value = to(plain, "cuda", step=True)
    take_step(kernels, to(value, "cuda", step=True))  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take_step(kernels, value)
    expected = copy.deepcopy(plain)
    for lr, y, x in ((0.01, 0.25, 1.0), (0.02, 0.1, 0.5), (0.005, 0.0, 0.0)):
        for name, number in (("lr", lr), ("row_exponent", y), ("column_exponent", x)):
            getattr(value.hyper, name).fill_(number)
            setattr(expected.hyper, name, number)
        graph.replay()
        take_step(family_blockwise, expected)
    close_state(to(value, "cpu", step=True), expected)


def test_tables_of_more_than_2_to_the_31_elements(kernels: ModuleType) -> None:
    V, H = 1_050_001, 2048
    assert V * H > 2**31
    torch.manual_seed(0)
    small = make_table((8, H), dtypes=(torch.bfloat16,) * 3, step=0, lr=1.0)
    grad = torch.randn(V, H, dtype=torch.bfloat16, device="cuda")
    table = dataclasses.replace(
        small,
        rows=V,
        real_rows=V,
        param=torch.zeros_like(grad),
        grad=grad,
        exp_avg=torch.zeros_like(grad),
        exp_avg_sq=torch.zeros(1, H, device="cuda"),
        row_avg_sq=torch.zeros(V, 1, device="cuda"),
    )
    step_without_clipping(kernels, table)
    c = sum(block.double().square().sum(0) for block in grad.split(50_000)) / V
    r = torch.cat([block.double().square().mean(1, keepdim=True) for block in grad.split(50_000)])
    for rows in (slice(0, 3), slice(V // 2, V // 2 + 3), slice(V - 3, V)):
        expected = -grad[rows].double() / (c.sqrt() * (r[rows] / c.mean()) ** 0.125)
        close(table.exp_avg[rows].float(), 0.1 * grad[rows].float(), 1e-2)
        assert float((table.param[rows].double() - expected).norm() / expected.norm()) < 1e-2
