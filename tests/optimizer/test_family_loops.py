"""The compiled CPU loops of the family of second moments: which tables use them, and the result of each loop."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from call_counts import counted
from oracle import coupled, gradients, oracle, relative_error, run, table
from torch import Tensor, nn

from coupled_adam.optimizer import blockwise, family_blockwise
from coupled_adam.optimizer.table import Hyperparameters, Table

SHAPE = (301, 37)
PARTIAL: dict[str, Any] = {"row_exponent": 0.25, "mean_free": True}
LOOPS = ("square_sums", "first_pass", "advance_row_moment", "advance_first_moment", "apply_update", "move_rows")


@pytest.fixture
def loops(numba_loops: ModuleType) -> ModuleType:
    """The compiled loops of the family, for tables of any size."""
    return importlib.import_module("coupled_adam.optimizer.family_numba")


def build_table(grad: Tensor, *, real_rows: int | None = None, step: int = 0, **numbers: Any) -> Table:
    """A table in the middle of training, with row moments."""
    V, H = grad.shape
    generator = torch.Generator().manual_seed(1)
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "second_moment_scale": 1.0}
    return Table(
        rows=V if real_rows is None else real_rows,
        param=torch.randn(V, H, generator=generator).to(grad.dtype),
        grad=grad,
        exp_avg=torch.randn(V, H, generator=generator).to(grad.dtype),
        exp_avg_sq=torch.rand(1, H, generator=generator),
        step=torch.tensor(float(step)),
        hyper=Hyperparameters(**{**hyper, "maximize": False, "row_exponent": 0.25, "mean_free": True, **numbers}),
        width=H,
        real_rows=V if real_rows is None else real_rows,
        row_avg_sq=torch.rand(V, 1, generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("member", "expected_calls"),
    [
        (PARTIAL, ["first_pass", "move_rows"]),
        ({"mean_free": True}, ["first_pass", "move_rows"]),
        ({"row_exponent": 0.25}, ["square_sums", "advance_row_moment", "apply_update"]),
        ({"column_exponent": 0.5}, ["apply_update"]),
        (
            {**PARTIAL, "max_grad_norm": 1e6},
            ["square_sums", "advance_row_moment", "advance_first_moment", "move_rows"],
        ),
        ({"mean_free": True, "max_grad_norm": 1e6}, ["advance_first_moment", "move_rows"]),
        ({**PARTIAL, "lr": torch.tensor(0.1), "row_exponent": torch.tensor(0.25)}, ["first_pass", "move_rows"]),
        ({**PARTIAL, "betas": (0.0, 0.99)}, ["first_pass", "move_rows"]),
        (
            {**PARTIAL, "betas": (0.0, 0.99), "max_grad_norm": 1e6},
            ["square_sums", "advance_row_moment", "advance_first_moment", "move_rows"],
        ),
        ({"row_exponent": 0.25, "betas": (0.0, 0.99)}, ["square_sums", "advance_row_moment", "apply_update"]),
    ],
    ids=str,
)
def test_large_contiguous_tables_use_the_compiled_loops(
    loops: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    member: dict[str, Any],
    expected_calls: list[str],
    dtype: torch.dtype,
) -> None:
    calls = counted(monkeypatch, loops, LOOPS)
    param = table(SHAPE, dtype)
    run(coupled(param, **member), param, gradients(SHAPE, 3, dtype))
    assert calls == expected_calls * 3


@pytest.mark.parametrize("kind", ["float16", "float64", "transposed table", "transposed gradient", "small"])
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e6}, {"mean_free": False}], ids=str)
def test_tables_that_the_loops_do_not_support_use_torch_operations(
    loops: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """A transposed gradient rules out only the loops that read it."""
    dtype = getattr(torch, kind) if kind.startswith("float") else torch.float32
    param, grads = table(SHAPE, dtype), gradients(SHAPE, 3, dtype)
    if kind == "transposed table":
        param = nn.Parameter(param.detach().t().contiguous().t())
    if kind == "transposed gradient":
        grads = [grad.t().contiguous().t() for grad in grads]
    if kind == "small":
        monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", param.numel() + 1)
    calls = counted(monkeypatch, loops, LOOPS)
    member = {**PARTIAL, **options}
    expected = oracle(param, grads, row_exponent=0.25, mean_free=member["mean_free"])
    optimizer = coupled(param, **member)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    assert relative_error(param, expected.embeddings) < (1e-2 if kind == "float16" else 3e-6)
    assert set(calls) <= ({"move_rows"} if kind == "transposed gradient" else set()) | (
        {"square_sums", "advance_row_moment"} if kind == "transposed table" else set()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"mean_free": False}, {"betas": (0.0, 0.99)}], ids=str)
def test_a_step_gives_the_same_bits_for_any_number_of_threads(
    loops: ModuleType, threads: Callable[[int], None], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    results = []
    for number in (1, 2, 2, 2, 5):
        threads(number)
        param, grads = table(SHAPE, dtype), gradients(SHAPE, 5, dtype)
        optimizer = coupled(param, **{**PARTIAL, **options}, vocabulary_size=290)
        run(optimizer, param, grads)
        # The float32 state would hide differences in a float64 sum.
        sums = [
            *loops.square_sums(grads[0], 290),
            *loops.first_pass(build_table(grads[0], real_rows=290), 1.0),
            loops.advance_first_moment(build_table(grads[0], real_rows=290), None, 1.0),
        ]
        results.append([*sums, param.detach(), *optimizer.state[param].values()])
    for result in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("real_rows", [0, 1, 7, 8, 250, 301])
def test_sums_equal_float64_sums_over_the_rows_that_are_not_padding(
    loops: ModuleType, dtype: torch.dtype, real_rows: int
) -> None:
    grad = gradients(SHAPE, 1, dtype)[0]
    squares = grad.double().square()
    column_sums, row_sums = loops.square_sums(grad, real_rows)
    torch.testing.assert_close(column_sums, squares[:real_rows].sum(0, keepdim=True), rtol=1e-13, atol=0)
    torch.testing.assert_close(row_sums, squares.sum(1, keepdim=True), rtol=1e-13, atol=0)
    one_pass, several = build_table(grad, real_rows=real_rows), build_table(grad, real_rows=real_rows)
    moments = (0.9 * one_pass.exp_avg.double() + 0.1 * -2.0 * grad.double()).to(dtype)
    r = 0.99 * one_pass.row_avg_sq.double() + 0.01 * 4.0 * squares.mean(1, keepdim=True)
    rho = ((r / 0.01).sqrt() + 1e-8) ** -0.25
    weighted = (rho * moments.double())[:real_rows].sum(0, keepdim=True)
    column_sums, weighted_sums, row_factor = loops.first_pass(one_pass, -2.0)
    torch.testing.assert_close(column_sums, squares[:real_rows].sum(0, keepdim=True), rtol=1e-13, atol=0)
    row_factors = loops.advance_row_moment(several, row_sums, -2.0)
    more_sums = loops.advance_first_moment(several, row_factors, -2.0)
    # A float32 first moment may round to the neighbour of the bfloat16 to which float64 rounds.
    atol = 2e-5 if dtype == torch.float32 else 0.02
    for sums, factors, result in ((weighted_sums, row_factor, one_pass), (more_sums, row_factors, several)):
        torch.testing.assert_close(factors, rho.float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(result.row_avg_sq, r.float(), rtol=1e-6, atol=0)
        torch.testing.assert_close(result.exp_avg, moments, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)
        torch.testing.assert_close(sums, weighted, rtol=1e-5, atol=atol)


def test_a_table_without_row_moments_has_factors_of_one(loops: ModuleType) -> None:
    grad = gradients(SHAPE, 1)[0]
    grad[3] = 1e30
    grad[4] = float("inf")
    whole = build_table(grad)
    whole.row_avg_sq = None
    _, weighted_sums, row_factor = loops.first_pass(whole, 1.0)
    assert row_factor is None
    torch.testing.assert_close(weighted_sums, whole.exp_avg.double().sum(0, keepdim=True), rtol=1e-5, atol=1e-4)


def test_an_exponent_of_zero_gives_factors_of_exactly_one(loops: ModuleType) -> None:
    grad = gradients(SHAPE, 1)[0]
    grad[3], grad[4], grad[5] = 1e30, float("inf"), float("nan")
    for factors in (
        loops.first_pass(build_table(grad, row_exponent=0.0), 1.0)[2],
        loops.advance_row_moment(build_table(grad, row_exponent=0.0), grad.double().square().sum(1, keepdim=True), 1.0),
    ):
        assert torch.equal(factors, torch.ones(SHAPE[0], 1))


def test_a_row_without_any_gradient_has_a_factor_of_zero_if_eps_is_zero(loops: ModuleType) -> None:
    grad = gradients(SHAPE, 1)[0]
    grad[5] = 0
    whole = build_table(grad, eps=0.0, row_exponent=0.5)
    assert whole.row_avg_sq is not None
    whole.row_avg_sq.zero_()
    factors = loops.first_pass(whole, 1.0)[2]
    assert factors.isfinite().all()
    assert (factors == 0).flatten().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("size", [1e-25, 1e19, 3e38])
def test_sums_of_squares_that_float32_cannot_hold_are_exact(loops: ModuleType, size: float) -> None:
    grad = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * size
    squares = grad.double().square()
    column_sums, row_sums = loops.square_sums(grad, SHAPE[0])
    torch.testing.assert_close(column_sums, squares.sum(0, keepdim=True), rtol=1e-13, atol=0)
    torch.testing.assert_close(row_sums, squares.sum(1, keepdim=True), rtol=1e-13, atol=0)
    first_pass = loops.first_pass(build_table(grad), 1.0)
    torch.testing.assert_close(first_pass[0], squares.sum(0, keepdim=True), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e30}, {"mean_free": False}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_nonfinite_values_spread_as_with_torch_operations(
    loops: ModuleType, monkeypatch: pytest.MonkeyPatch, value: float, options: dict[str, Any], dtype: torch.dtype
) -> None:
    results: list[list[Tensor]] = []
    for smallest in (1, SHAPE[0] * SHAPE[1] + 1):
        monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", smallest)
        param, grads = table(SHAPE, dtype), gradients(SHAPE, 3, dtype)
        grads[1][17, 5] = value
        optimizer = coupled(param, **{**PARTIAL, **options})
        run(optimizer, param, grads)
        results.append([param.detach(), *optimizer.state[param].values()])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_bfloat16_is_rounded_as_torch_rounds_it(loops: ModuleType) -> None:
    """To nearest, ties to even; also next to overflow, among the smallest numbers, and NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (512, 128), generator=generator, dtype=torch.int32).to(torch.int16)
    moment = bits.view(torch.bfloat16).clone()  # all kinds of numbers, including NaN
    moment[moment.isinf()] = torch.finfo(torch.bfloat16).max
    coefficient = (torch.randint(1, 2**16, (1, 128), generator=generator) / 2**15).float()
    row_factor = (torch.randint(1, 2**7, (512, 1), generator=generator) / 2**6).float()
    expected = (coefficient * (row_factor * moment.float())).bfloat16()
    moved = build_table(moment)
    moved.param.zero_()
    moved.exp_avg.copy_(moment)
    loops.move_rows(moved, coefficient, row_factor, None)
    torch.testing.assert_close(moved.param, expected, rtol=0, atol=0, equal_nan=True)
    updated = build_table(moment, beta1=0.0)
    updated.param.zero_()
    updated.exp_avg.zero_()
    loops.apply_update(updated, coefficient, row_factor, 1.0)
    torch.testing.assert_close(updated.exp_avg, moment, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(updated.param, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().any()
    assert expected.isinf().any()


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (1, 5), (5, 1)], ids=str)
def test_the_smallest_tables_have_sums_too(loops: ModuleType, shape: tuple[int, int]) -> None:
    for build in (loops.first_pass, lambda whole, _: family_blockwise.first_pass(whole, None)):
        whole = build_table(torch.ones(shape))
        column_sums, weighted_sums, row_factor = build(whole, 1.0)
        assert row_factor.shape == (shape[0], 1)
        assert column_sums.sum(0).tolist() == [shape[0]] * shape[1]
        expected = (row_factor * whole.exp_avg).double().sum(0)
        torch.testing.assert_close(weighted_sums.sum(0), expected, rtol=1e-6, atol=1e-6)
    column_sums, row_sums = loops.square_sums(torch.ones(shape), shape[0])
    assert column_sums.tolist() == [[shape[0]] * shape[1]]
    assert row_sums.tolist() == [[shape[1]]] * shape[0]
    loops.move_rows(whole, torch.ones(1, shape[1]), row_factor, torch.zeros(1, shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(60_000, 256), (2048, 768), (700, 64)], ids=str)
def test_sums_of_the_first_pass_stay_within_the_memory_limit(
    loops: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.undo()  # pieces of the usual size
    whole = build_table(torch.ones(shape, dtype=dtype))
    made: list[int] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.numel() * tensor.itemsize)
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    loops.first_pass(whole, 1.0)
    assert sum(made) <= min(whole.grad.numel() * whole.grad.itemsize / 4, 6 * 2**20) + 64 * shape[1]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.99)], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e-3}, {"mean_free": False}], ids=str)
def test_a_step_writes_no_gradient_and_autograd_notices_the_written_table(
    loops: ModuleType, options: dict[str, Any], betas: tuple[float, float]
) -> None:
    param = table(SHAPE)
    optimizer = coupled(param, **{**PARTIAL, **options}, betas=betas, maximize=True)
    run(optimizer, param, gradients(SHAPE, 1))
    state = optimizer.state[param]
    written = [param, state["row_avg_sq"], *([state["exp_avg"]] if betas[0] else [])]
    versions = [tensor._version for tensor in written]
    loss = param.square().sum()  # saves the table for the backward pass
    grad = gradients(SHAPE, 1)[0]
    param.grad = grad.clone()
    optimizer.step()
    assert torch.equal(param.grad, grad)
    assert all(tensor._version > before for tensor, before in zip(written, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_works_in_inference_mode(loops: ModuleType) -> None:
    with torch.inference_mode():
        param, grads = table(SHAPE), gradients(SHAPE, 2)
        expected = oracle(param, grads, **PARTIAL)
        run(coupled(param, **PARTIAL), param, grads)
        assert relative_error(param, expected.embeddings) < 3e-6
