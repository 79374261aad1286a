"""The family's Triton kernels in Triton's interpreter, compared with torch operations on the CPU."""

import copy
import importlib
import itertools
from types import ModuleType
from typing import Any

import pytest
import torch
from family_tables import (
    close,
    close_state,
    close_sums,
    make_table,
    moment_of,
    step_with_clipping,
    step_without_clipping,
    total,
)
from torch import Tensor

from coupled_adam.optimizer import family_blockwise
from coupled_adam.optimizer.reference import ReferenceState, reference_init, reference_step

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")

SHAPES = [(1, 1), (1, 5), (7, 1), (53, 19), (150, 70)]
# The last bit: the interpreter truncates to bfloat16 where a GPU rounds.
LAST_BIT = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Use tiles so small that a small table has many of them, several per program."""
    module = importlib.import_module("coupled_adam.optimizer.family_triton")
    for name in ("FIRST_PASS", "SQUARE_SUMS", "FIRST_MOMENT"):
        monkeypatch.setattr(module, name, getattr(module, name)._replace(elements=512))
    monkeypatch.setattr(module, "FIRST_MOMENT", module.FIRST_MOMENT._replace(columns=32))
    for name, size in (
        ("REDUCE_BLOCK_P", 2),
        ("REDUCE_PROGRAMS", 4),
        ("UPDATE_BLOCK_V", 16),
        ("UPDATE_BLOCK_H", 32),
        ("ROW_BLOCK_V", 32),
    ):
        monkeypatch.setattr(module, name, size)
    return module


STEPS = pytest.mark.parametrize("take_step", [step_without_clipping, step_with_clipping])


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("row_moment", [True, False])
@pytest.mark.parametrize(("shape", "padding"), [(shape, n) for shape in SHAPES for n in (0, 1, 6) if n <= shape[0]])
def test_each_function_agrees_with_torch_operations(
    kernels: ModuleType, shape: tuple[int, int], row_moment: bool, padding: int, momentum: bool
) -> None:
    value = make_table(shape, padding=padding, row_moment=row_moment, momentum=momentum, weight_decay=0.1)
    expected = copy.deepcopy(value)
    factor = torch.tensor(0.3)

    column_sums, row_sums = kernels.square_sums(value)
    expected_column_sums, expected_row_sums = family_blockwise.square_sums(expected)
    close(total(column_sums), total(expected_column_sums))
    close(row_sums, expected_row_sums)

    row_factor = None
    if row_sums is not None:
        row_factor = kernels.advance_row_moment(value, row_sums, factor)
        close(row_factor, family_blockwise.advance_row_moment(expected, row_sums, factor))
    kernels.advance_column_moment(value, column_sums, factor)
    family_blockwise.advance_column_moment(expected, column_sums, factor)
    close_state(value, expected)

    weighted_sums = kernels.advance_first_moment(value, row_factor, factor)
    expected_sums = family_blockwise.advance_first_moment(expected, row_factor, factor)
    close_state(value, expected)
    weights = 1.0 if row_factor is None else row_factor
    close_sums(weighted_sums, expected_sums, (moment_of(value, 0.3) * weights)[: value.real_rows])

    coefficient, offset = kernels.coefficients(value, weighted_sums, None)
    expected_coefficient, expected_offset = family_blockwise.coefficients(expected, weighted_sums, None)
    close(coefficient, expected_coefficient)
    close(offset, expected_offset)

    kernels.move_rows(value, coefficient, row_factor, offset, factor)
    family_blockwise.move_rows(expected, coefficient, row_factor, offset, factor)
    close_state(value, expected)
    kernels.apply_update(value, coefficient, row_factor, factor)
    family_blockwise.apply_update(expected, coefficient, row_factor, factor)
    close_state(value, expected)
    assert value.step.item() == 5


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("row_moment", [True, False])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1], ids=str)
def test_first_pass_does_the_work_of_three_functions(
    kernels: ModuleType, shape: tuple[int, int], padding: int, row_moment: bool, momentum: bool
) -> None:
    value = make_table(shape, padding=padding, row_moment=row_moment, momentum=momentum)
    expected = copy.deepcopy(value)
    factor = torch.tensor(0.3)
    sums, expected_sums = kernels.first_pass(value, factor), family_blockwise.first_pass(expected, factor)
    close_state(value, expected)
    close(total(sums.column_sums), total(expected_sums.column_sums))
    close(sums.row_factor, expected_sums.row_factor)
    weights = 1.0 if sums.row_factor is None else sums.row_factor
    close_sums(sums.weighted_sums, expected_sums.weighted_sums, (moment_of(value, 0.3) * weights)[: value.real_rows])


@STEPS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_exponent": 1.0, "weight_decay": 0.1},
        {"column_exponent": 0.0, "row_exponent": 1.0, "mean_free": False},
        {"column_exponent": 0.5, "second_moment_scale": 0.125, "maximize": True},
        {"row_exponent": 0.0, "mean_free": False},
        {"beta1": 0.0, "beta2": 0.0},
        {"momentum": False, "row_exponent": 1.0, "weight_decay": 0.1},
        {"momentum": False, "column_exponent": 0.5, "mean_free": False, "maximize": True},
        {"beta2": 0.0, "eps": 0.0},
    ],
    ids=str,
)
def test_every_option_gives_the_updates_of_the_literal_algorithm(
    kernels: ModuleType, take_step: Any, options: dict[str, Any]
) -> None:
    table = make_table((53, 19), padding=3, step=0, **options)
    for state in (table.exp_avg, table.exp_avg_sq, table.row_avg_sq):
        if state is not None:
            state.zero_()
    hyper = table.hyper
    expected: ReferenceState = reference_init(table.param)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        table.grad = torch.randn(53, 19, generator=generator) * table.param.abs()
        take_step(kernels, table)
        expected = reference_step(
            expected,
            table.grad,
            lr=float(hyper.lr),
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            scale_exponent=0.0 if hyper.second_moment_scale == 1 else 3.0,
            maximize=hyper.maximize,
            row_exponent=float(hyper.row_exponent),
            column_exponent=float(hyper.column_exponent),
            mean_free=hyper.mean_free,
            vocabulary_size=50,
        )
    error = (table.param.double() - expected.embeddings).norm() / expected.embeddings.norm()
    assert error < 1e-6
    assert table.step.item() == 4


@STEPS
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_param_gradient_and_moment_may_each_have_a_narrow_dtype(
    kernels: ModuleType, take_step: Any, narrow: torch.dtype, which: tuple[int, ...]
) -> None:
    dtypes = [narrow if i in which else torch.float32 for i in range(3)]
    value = make_table((53, 19), dtypes=(dtypes[0], dtypes[1], dtypes[2]), padding=3, lr=1.0)
    expected = copy.deepcopy(value)
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    close(value.exp_avg_sq, expected.exp_avg_sq)
    close(value.row_avg_sq, expected.row_avg_sq)
    close(value.exp_avg, expected.exp_avg, 2e-6 + LAST_BIT[dtypes[2]])
    difference = (value.param.double() - expected.param.double()).norm() / expected.param.double().norm()
    assert difference < 1e-6 + LAST_BIT[dtypes[0]] + LAST_BIT[dtypes[2]]


@STEPS
@pytest.mark.parametrize("layout", ["transposed", "sliced", "gradient transposed", "moment transposed"])
def test_any_stride_is_accepted(kernels: ModuleType, take_step: Any, layout: str) -> None:
    value = make_table((53, 19))
    expected = copy.deepcopy(value)

    def transposed(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t()

    if layout == "sliced":
        value.param = torch.zeros(53, 40)[:, 3:22].copy_(value.param)
        value.grad = torch.zeros(53, 40)[:, 3:41:2].copy_(value.grad)
    if layout == "transposed":
        value.param, value.grad, value.exp_avg = map(transposed, (value.param, value.grad, value.exp_avg))
    if layout == "gradient transposed":
        value.grad = transposed(value.grad)
    if layout == "moment transposed":
        value.exp_avg = transposed(value.exp_avg)
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    close_state(value, expected)


@STEPS
@pytest.mark.parametrize("size", [1e10, 3e18, 5e19, 1e25, 1e38])
def test_updates_with_huge_gradients_agree_with_torch_operations(
    kernels: ModuleType, take_step: Any, size: float
) -> None:
    value = make_table((53, 19), size=size, padding=1)
    expected = copy.deepcopy(value)
    take_step(kernels, value)
    take_step(family_blockwise, expected)
    close_state(value, expected)
    assert bool(value.param.isfinite().all())


def test_sums_of_huge_gradients_equal_float64_sums(kernels: ModuleType) -> None:
    table = make_table((53, 19), size=1e25, padding=4)
    table.grad[:, 3] *= 1e-25
    exact = table.grad.double().square()
    for column_sums in (kernels.square_sums(table)[0], kernels.first_pass(copy.deepcopy(table), None).column_sums):
        torch.testing.assert_close(column_sums.sum(0), exact[:49].sum(0), rtol=1e-6, atol=0)
    _, row_sums = kernels.square_sums(table)
    torch.testing.assert_close(row_sums, exact.sum(1, keepdim=True), rtol=1e-6, atol=0)


def test_clipping_of_huge_gradients_keeps_the_row_moments_exact(kernels: ModuleType) -> None:
    value = make_table((53, 19), size=1e25)
    expected = copy.deepcopy(value)
    factor = torch.tensor(1e-25)
    step_with_clipping(kernels, value, factor)
    step_with_clipping(family_blockwise, expected, factor)
    close_state(value, expected)
    value = make_table((53, 19), size=1e25)
    expected = copy.deepcopy(value)
    step_without_clipping(kernels, value, factor)
    step_without_clipping(family_blockwise, expected, factor)
    close_state(value, expected)


@STEPS
def test_a_nan_or_infinity_in_padding_stays_in_its_row(kernels: ModuleType, take_step: Any) -> None:
    value = make_table((53, 19), padding=3, mean_free=True)
    value.grad[51, 4], value.grad[52, 5] = float("nan"), float("inf")
    take_step(kernels, value)
    assert bool(value.param[:51].isfinite().all())
    assert bool(value.exp_avg_sq.isfinite().all())
    assert bool(value.param[51, 4].isnan())


@STEPS
def test_a_nan_reaches_its_column(kernels: ModuleType, take_step: Any) -> None:
    value = make_table((53, 19), mean_free=False)
    value.grad[11, 4] = float("nan")
    take_step(kernels, value)
    assert bool(value.exp_avg_sq[0, 4].isnan())
    assert value.row_avg_sq is not None
    assert bool(value.row_avg_sq[11].isnan())
    assert bool(value.row_avg_sq[12].isfinite())


@STEPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lr_and_exponents_in_tensors_and_a_step_count_on_the_device_give_the_same_result(
    kernels: ModuleType, take_step: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"lr": 0.01, "row_exponent": 0.25, "column_exponent": 0.75}
    by_value = make_table((53, 19), weight_decay=0.1, **numbers)
    by_address = make_table(
        (53, 19), weight_decay=0.1, **{name: torch.tensor(number, dtype=dtype) for name, number in numbers.items()}
    )
    take_step(kernels, by_address)  # all tensors on one device, as on a GPU with capturable=True
    monkeypatch.setattr(kernels, "step_on_device", lambda table: False)
    take_step(kernels, by_value)
    close_state(by_address, by_value)
    assert by_address.step.item() == 4


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("mean_free", [True, False])
@pytest.mark.parametrize("on_device", [True, False])
def test_found_inf_writes_nothing(
    kernels: ModuleType,
    take_step: Any,
    mean_free: bool,
    on_device: bool,
    momentum: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "step_on_device", lambda table: on_device)
    value = make_table((53, 19), mean_free=mean_free, momentum=momentum)
    before = copy.deepcopy(value)
    take_step(kernels, value, found_inf=torch.tensor(1.0))
    names = ["param", "grad", "exp_avg_sq", "row_avg_sq", *(["exp_avg"] if momentum else [])]
    for name in names:
        assert torch.equal(getattr(value, name), getattr(before, name))
    assert value.step.item() == (3 if on_device else 4)  # a step count on the host cannot know
    take_step(kernels, value, found_inf=torch.tensor(0.0))
    assert not torch.equal(value.param, before.param)


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("shape", [(0, 19), (5, 0), (0, 0)], ids=str)
def test_an_empty_shard_has_sums_of_zero(kernels: ModuleType, shape: tuple[int, int], momentum: bool) -> None:
    table = make_table(shape, momentum=momentum)
    table.width = 19
    column_sums, row_sums = kernels.square_sums(table)
    assert column_sums.shape[1] == shape[1]
    assert not column_sums.any()
    assert row_sums.shape == (shape[0], 1)
    assert not row_sums.any()
    sums = kernels.first_pass(table, None)
    assert not sums.column_sums.any()
    assert not sums.weighted_sums.any()
    assert not kernels.advance_first_moment(table, sums.row_factor, None).any()
    kernels.advance_column_moment(table, column_sums, None)
    coefficient, offset = kernels.coefficients(table, sums.weighted_sums, torch.tensor(0.1))
    kernels.move_rows(table, coefficient, sums.row_factor, offset)
    assert table.step.item() == 4


def test_a_shard_of_padding_has_sums_of_zero(kernels: ModuleType) -> None:
    table = make_table((7, 19), padding=7)
    before = table.exp_avg.clone()
    sums = kernels.first_pass(table, None)
    assert not sums.column_sums.any()
    assert not sums.weighted_sums.any()
    assert not torch.equal(table.exp_avg, before)


@pytest.mark.parametrize("mean_dtype", [torch.float32, torch.float64], ids=str)
def test_the_given_mean_second_moment_of_sharded_columns_is_used(kernels: ModuleType, mean_dtype: torch.dtype) -> None:
    table = make_table((53, 19), column_exponent=0.5)
    mean = torch.tensor(0.07, dtype=mean_dtype)
    coefficient, offset = kernels.coefficients(table, None, mean)
    close(coefficient, family_blockwise.coefficients(table, None, mean)[0])
    assert offset is None


@STEPS
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_rows_without_any_gradient_do_not_move(kernels: ModuleType, take_step: Any, eps: float) -> None:
    table = make_table((53, 19), eps=eps, mean_free=False, step=0)
    for state in (table.exp_avg, table.exp_avg_sq, table.row_avg_sq):
        assert state is not None
        state.zero_()
    table.grad[7:11] = 0
    before = table.param.clone()
    take_step(kernels, table)
    assert torch.equal(table.param[7:11], before[7:11])
    assert bool(table.param.isfinite().all())
    table.grad.zero_()
    for state in (table.exp_avg, table.exp_avg_sq, table.row_avg_sq):
        assert state is not None
        state.zero_()
    before = table.param.clone()
    take_step(kernels, table)
    assert torch.equal(table.param, before)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_row_exponent_zero_gives_a_factor_of_exactly_one(kernels: ModuleType, eps: float) -> None:
    table = make_table((53, 19), row_exponent=0.0, eps=eps)
    table.grad[3] = 0
    assert table.row_avg_sq is not None
    table.row_avg_sq[3] = 0
    sums = kernels.first_pass(copy.deepcopy(table), None)
    assert torch.equal(sums.row_factor, torch.ones(53, 1))
    _, row_sums = kernels.square_sums(table)
    assert torch.equal(kernels.advance_row_moment(table, row_sums, None), torch.ones(53, 1))


def test_rows_too_wide_for_registers_need_one_more_pass(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_WIDTH", 16)
    monkeypatch.setattr(kernels, "WIDE_ROW_BLOCK_H", 8)
    for size, momentum in itertools.product((1.0, 1e25), (True, False)):
        value = make_table((53, 19), padding=2, size=size, momentum=momentum)
        expected = copy.deepcopy(value)
        step_without_clipping(kernels, value)
        step_without_clipping(family_blockwise, expected)
        close_state(value, expected)


@STEPS
def test_two_runs_are_bitwise_equal(kernels: ModuleType, take_step: Any) -> None:
    tables = [make_table((150, 70)) for _ in range(2)]
    for table in tables:
        take_step(kernels, table)
    for name in ("param", "exp_avg", "exp_avg_sq", "row_avg_sq"):
        assert torch.equal(getattr(tables[0], name), getattr(tables[1], name))


@STEPS
@pytest.mark.parametrize("momentum", [True, False])
def test_mean_free_updates_add_up_to_zero(kernels: ModuleType, take_step: Any, momentum: bool) -> None:
    table = make_table((150, 70), padding=11, momentum=momentum)
    before = table.param.double()
    take_step(kernels, table)
    update = table.param.double() - before
    assert float(update[:139].sum(0).abs().max() / update.abs().sum(0).max()) < 1e-6
