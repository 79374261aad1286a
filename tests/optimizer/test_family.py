"""Every member of the family of second moments, compared with the literal equations in float64."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, assert_first_moment, coupled, gradients, oracle, relative_error, run, table
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import ReferenceState, family_denominator, reference_step

PARTIAL = {"row_exponent": 0.25, "mean_free": True}
WITHOUT_MOMENTUM = {"betas": (0.0, 0.99), "row_exponent": 1.0, "mean_free": True}
MEMBERS: list[dict[str, Any]] = [
    {"row_exponent": 0.25},
    PARTIAL,
    {"row_exponent": 1.0},
    {"row_exponent": 1.0, "column_exponent": 0.0},
    {"column_exponent": 0.0},
    {"mean_free": True},
    {"row_exponent": 0.5, "column_exponent": 0.75, "mean_free": True},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    {"scale_exponent": -2.5, "maximize": True, "weight_decay": 0.05},
    {"betas": (0.0, 0.5)},
    {"betas": (0.0, 0.95), "maximize": True, "weight_decay": 0.05, "vocabulary_size": 31},
    {"betas": (0.9, 0.0)},
    {"vocabulary_size": 31},
]


def assert_family_matches(optimizer: CoupledAdamW, param: nn.Parameter, expected: ReferenceState) -> None:
    """Assert that embeddings, both moments and step count agree with the oracle, which has a full second moment."""
    tolerance = 3 * TOLERANCE[param.dtype]
    moment_tolerance = 1e-13 if param.dtype == torch.float64 else 2e-6
    state, group = optimizer.state[param], optimizer.param_groups[0]
    real = slice(group["vocabulary_size"])
    assert relative_error(param, expected.embeddings) < tolerance
    assert_first_moment(optimizer, param, expected, max(tolerance, moment_tolerance))
    assert relative_error(state["exp_avg_sq"], expected.second_moment[real].mean(0, keepdim=True)) < moment_tolerance
    if "row_avg_sq" in state:
        assert relative_error(state["row_avg_sq"], expected.second_moment.mean(1, keepdim=True)) < moment_tolerance
    assert state["step"].item() == expected.step


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_every_member_gives_the_updates_of_the_equations(
    path: ModuleType, member: dict[str, Any], options: dict[str, Any]
) -> None:
    param = table((53, 19))
    grads = gradients((53, 19), 5)
    expected = oracle(param, grads, **member, **options)
    optimizer = coupled(param, **member, **options)
    run(optimizer, param, grads)
    assert_family_matches(optimizer, param, expected)
    assert ("row_avg_sq" in optimizer.state[param]) == ("row_exponent" in member)


@pytest.mark.parametrize("member", [PARTIAL, WITHOUT_MOMENTUM], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (33, 300)], ids=str)
def test_every_shape_and_dtype_gives_the_updates_of_the_equations(
    request: pytest.FixtureRequest,
    path: ModuleType,
    dtype: torch.dtype,
    shape: tuple[int, int],
    member: dict[str, Any],
) -> None:
    if dtype == torch.float64 and "triton" in request.node.callspec.params["path"]:
        pytest.skip("float64 is updated in torch operations")
    param = table(shape, dtype)
    grads = gradients(shape, 3, dtype)
    expected = oracle(param, grads, **member)
    optimizer = coupled(param, **member)
    run(optimizer, param, grads)
    assert_family_matches(optimizer, param, expected)


@pytest.mark.parametrize(
    "member",
    [PARTIAL, {"row_exponent": 0.25}, WITHOUT_MOMENTUM, {**WITHOUT_MOMENTUM, "mean_free": False}],
    ids=str,
)
@pytest.mark.parametrize(
    "flags",
    [
        {"fused": True},
        {"capturable": True},
        {"foreach": True},
        {"foreach": False},
        {"max_grad_norm": 0.01},
        {"error_if_nonfinite": True},
        {"max_grad_norm": 0.01, "vocabulary_size": 20},
    ],
    ids=str,
)
def test_every_flag_gives_the_updates_of_the_equations(
    path: ModuleType, member: dict[str, Any], flags: dict[str, Any]
) -> None:
    param = table((40, 8))
    grads = gradients((40, 8), 5)
    clipped = []
    for grad in grads:
        param.grad = grad.clone()
        if "max_grad_norm" in flags:
            nn.utils.clip_grad_norm_([param], flags["max_grad_norm"])
        clipped.append(param.grad)
    vocabulary_size = flags.get("vocabulary_size")
    expected = oracle(param, clipped, vocabulary_size=vocabulary_size, **member)
    optimizer = coupled(param, **member, **flags)
    run(optimizer, param, grads)
    assert_family_matches(optimizer, param, expected)
    if "max_grad_norm" in flags:
        assert optimizer.grad_norm is not None
        assert float(optimizer.grad_norm) == pytest.approx(float(grads[-1].norm()), rel=1e-6)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_exponents_may_change_between_steps(path: ModuleType, as_tensor: bool) -> None:
    param = table((40, 8))
    grads = gradients((40, 8), 6)
    expected = oracle(param, grads[:1], row_exponent=1.0, mean_free=True)
    schedule = [(0.75, 1.0), (0.5, 0.75), (0.25, 0.5), (0.0, 0.25), (0.1, 0.0)]
    for grad, (y, x) in zip(grads[1:], schedule, strict=True):
        expected = reference_step(expected, grad, row_exponent=y, column_exponent=x, mean_free=True)
    start = (torch.tensor(1.0), torch.tensor(1.0)) if as_tensor else (1.0, 1.0)
    optimizer = coupled(param, row_exponent=start[0], column_exponent=start[1], mean_free=True, capturable=as_tensor)
    run(optimizer, param, grads[:1])
    group = optimizer.param_groups[0]
    for grad, (y, x) in zip(grads[1:], schedule, strict=True):
        if as_tensor:
            group["row_exponent"].fill_(y)
            group["column_exponent"].fill_(x)
        else:
            group["row_exponent"], group["column_exponent"] = y, x
        run(optimizer, param, [grad])
    assert_family_matches(optimizer, param, expected)


def test_an_exponent_annealed_from_zero_continues_coupled_adam(path: ModuleType) -> None:
    """Row moments created in the middle of training start at the mean of the column moments."""
    param = table((40, 8))
    grads = gradients((40, 8), 4)
    before = oracle(param, grads[:3])
    optimizer = coupled(param)
    run(optimizer, param, grads[:3])
    assert "row_avg_sq" not in optimizer.state[param]
    optimizer.param_groups[0]["row_exponent"] = 0.5
    c = before.second_moment.mean(0, keepdim=True)  # (1, H)
    beta1, beta2 = 0.9, 0.999
    m = beta1 * before.first_moment + (1 - beta1) * grads[3].double()
    c_hat = (beta2 * c + (1 - beta2) * grads[3].double().square().mean(0, keepdim=True)) / (1 - beta2**4)
    r = beta2 * c.mean() + (1 - beta2) * grads[3].double().square().mean(1, keepdim=True)
    r_hat, s = r / (1 - beta2**4), c_hat.mean()
    u = m / (1 - beta1**4) * s**0.25 / ((c_hat.sqrt() + 1e-8) * (r_hat.sqrt() + 1e-8) ** 0.5)
    run(optimizer, param, grads[3:])
    assert relative_error(param, before.embeddings - 1e-3 * u) < 1e-6
    assert relative_error(optimizer.state[param]["row_avg_sq"], r) < 1e-6


def test_row_moments_are_still_updated_when_the_exponent_returns_to_zero(path: ModuleType) -> None:
    param = table((40, 8))
    grads = gradients((40, 8), 4)
    optimizer = coupled(param, row_exponent=0.5)
    run(optimizer, param, grads[:2])
    optimizer.param_groups[0]["row_exponent"] = 0.0
    run(optimizer, param, grads[2:])
    expected = oracle(param, grads)  # only the second moment matters
    assert relative_error(optimizer.state[param]["row_avg_sq"], expected.second_moment.mean(1, keepdim=True)) < 1e-6


def test_explicit_defaults_are_bitwise_equal_to_coupled_adam(path: ModuleType) -> None:
    params = [table((40, 8)), table((40, 8))]
    grads = gradients((40, 8), 5)
    plain = coupled(params[0])
    family = coupled(params[1], row_exponent=0.0, column_exponent=1.0, mean_free=False)
    run(plain, params[0], grads)
    run(family, params[1], grads)
    assert torch.equal(params[0], params[1])
    assert plain.state[params[0]].keys() == family.state[params[1]].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("member", [*MEMBERS, {}], ids=str)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_a_first_gradient_of_zeros_moves_nothing(path: ModuleType, member: dict[str, Any], eps: float) -> None:
    if not member and eps == 0:
        pytest.skip("0 / 0 in Coupled Adam, as in AdamW")
    param = table((9, 4))
    before = param.detach().clone()
    optimizer = coupled(param, **member, eps=eps)
    run(optimizer, param, [torch.zeros(9, 4)])
    assert torch.equal(param, before)
    run(optimizer, param, gradients((9, 4), 2))
    assert param.isfinite().all()


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_columns_of_zeros_and_rows_never_seen_stay_finite(path: ModuleType, member: dict[str, Any]) -> None:
    param = table((9, 4))
    grads = gradients((9, 4), 3)
    for grad in grads:
        grad[:, 1] = 0
        grad[5] = 0
    before = param.detach().clone()
    expected = oracle(param, grads, **member)
    optimizer = coupled(param, **member)
    run(optimizer, param, grads)
    assert_family_matches(optimizer, param, expected)
    assert torch.equal(param[:, 1], before[:, 1])
    if not member.get("mean_free"):
        assert torch.equal(param[5], before[5])


def test_a_row_never_seen_moves_with_the_mean_only_when_eps_is_zero(path: ModuleType) -> None:
    param = table((9, 4))
    grads = gradients((9, 4), 3)
    for grad in grads:
        grad[5] = 0
    expected = oracle(param, grads, **PARTIAL, eps=0.0)
    optimizer = coupled(param, **PARTIAL, eps=0.0)
    run(optimizer, param, grads)
    assert_family_matches(optimizer, param, expected)


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_gradients_whose_squares_overflow_float32_give_no_nan(path: ModuleType, member: dict[str, Any]) -> None:
    param = table((9, 4))
    grads = [grad * 1e25 for grad in gradients((9, 4), 2)]
    optimizer = coupled(param, **member)
    run(optimizer, param, grads)
    assert param.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary_size", [None, 60])
def test_mean_free_updates_do_not_move_the_mean_embedding(
    path: ModuleType, dtype: torch.dtype, vocabulary_size: int | None
) -> None:
    param = table((90, 12), dtype)
    real = slice(vocabulary_size)
    before = param.detach().double()[real].mean(0)
    optimizer = coupled(param, lr=0.05, row_exponent=0.25, mean_free=True, vocabulary_size=vocabulary_size)
    drifting = table((90, 12), dtype)
    other = coupled(drifting, lr=0.05, row_exponent=0.25, vocabulary_size=vocabulary_size)
    grads = [grad + 0.3 for grad in gradients((90, 12), 6, dtype)]
    run(optimizer, param, grads)
    run(other, drifting, grads)
    moved = (param.detach().double()[real].mean(0) - before).abs().max().item()
    drifted = (drifting.detach().double()[real].mean(0) - before).abs().max().item()
    rounding = 6 * torch.finfo(dtype).eps * float(param.detach().abs().max()) / 2
    assert moved < rounding / 3  # steps times half a unit in the last place; the errors partly cancel
    assert drifted > 0.1


def random_gradients(seed: int, shape: tuple[int, int], steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape[0], 1, generator=generator, dtype=torch.float64) + 0.01
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * scale for _ in range(steps)]


exponents = st.floats(0, 1)
seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 12), st.integers(1, 9))


@given(seeds, shapes)
@settings(max_examples=25)
def test_row_and_column_moments_have_the_same_mean(seed: int, shape: tuple[int, int]) -> None:
    param = table(shape, torch.float64)
    optimizer = coupled(param, row_exponent=0.3)
    run(optimizer, param, random_gradients(seed, shape))
    state = optimizer.state[param]
    assert float(state["row_avg_sq"].mean()) == pytest.approx(float(state["exp_avg_sq"].mean()), rel=1e-12)


@given(seeds, shapes, exponents, exponents, st.booleans())
@settings(max_examples=25)
def test_a_permuted_vocabulary_gives_permuted_updates(
    seed: int, shape: tuple[int, int], x: float, y: float, mean_free: bool
) -> None:
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    params = [table(shape, torch.float64), nn.Parameter(table(shape, torch.float64).detach()[order])]
    grads = random_gradients(seed, shape)
    for param, rows in zip(params, (slice(None), order), strict=True):
        optimizer = coupled(param, column_exponent=x, row_exponent=y, mean_free=mean_free)
        run(optimizer, param, [grad[rows] for grad in grads])
    torch.testing.assert_close(params[0][order], params[1], rtol=1e-12, atol=1e-12)


@given(seeds, shapes, exponents, exponents, st.booleans())
@settings(max_examples=25)
def test_duplicating_every_row_does_not_change_the_updates(
    seed: int, shape: tuple[int, int], x: float, y: float, mean_free: bool
) -> None:
    once = table(shape, torch.float64)
    twice = nn.Parameter(once.detach().repeat(2, 1))
    grads = random_gradients(seed, shape)
    options = {"column_exponent": x, "row_exponent": y, "mean_free": mean_free}
    run(coupled(once, **options), once, grads)
    run(coupled(twice, **options), twice, [grad.repeat(2, 1) for grad in grads])
    torch.testing.assert_close(twice, once.detach().repeat(2, 1), rtol=1e-12, atol=1e-12)


@given(seeds, shapes)
@settings(max_examples=25)
def test_with_rank_one_gradients_the_factored_member_equals_adam(seed: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(shape[0], 1, generator=generator, dtype=torch.float64) + 0.1
    b = torch.rand(1, shape[1], generator=generator, dtype=torch.float64) + 0.1
    alphas = torch.randn(4, generator=generator, dtype=torch.float64)
    params = [table(shape, torch.float64), table(shape, torch.float64)]
    grads = [alpha * a * b for alpha in alphas]
    run(coupled(params[0], row_exponent=1.0, eps=0.0), params[0], grads)
    run(torch.optim.AdamW([params[1]], eps=0.0, weight_decay=0.0), params[1], grads)
    torch.testing.assert_close(params[0], params[1], rtol=1e-11, atol=1e-11)


@given(seeds, shapes, exponents, exponents, st.booleans(), st.integers(-40, 40))
@settings(max_examples=25)
def test_scaling_all_gradients_does_not_change_the_updates(
    seed: int, shape: tuple[int, int], x: float, y: float, mean_free: bool, k: int
) -> None:
    params = [table(shape, torch.float64), table(shape, torch.float64)]
    grads = random_gradients(seed, shape)
    for param, scale in zip(params, (1.0, 2.0**k), strict=True):
        optimizer = coupled(param, column_exponent=x, row_exponent=y, mean_free=mean_free, eps=0.0)
        run(optimizer, param, [grad * scale for grad in grads])
    torch.testing.assert_close(params[0], params[1], rtol=1e-11, atol=1e-11)


@given(seeds, shapes)
@settings(max_examples=25)
def test_row_exponent_one_and_column_exponent_zero_keep_one_number_per_row(seed: int, shape: tuple[int, int]) -> None:
    """Compared with a plain loop over rows: Adam with one second moment per row."""
    param = table(shape, torch.float64)
    expected = param.detach().clone()
    grads = random_gradients(seed, shape)
    run(coupled(param, row_exponent=1.0, column_exponent=0.0, eps=0.0), param, grads)
    for i in range(shape[0]):
        m, v = torch.zeros(shape[1], dtype=torch.float64), 0.0
        for t, grad in enumerate(grads, 1):
            m = 0.9 * m + 0.1 * grad[i]
            v = 0.999 * v + 0.001 * float((grad[i] ** 2).mean())
            expected[i] -= 1e-3 * (m / (1 - 0.9**t)) / (v / (1 - 0.999**t)) ** 0.5
    torch.testing.assert_close(param.detach(), expected, rtol=1e-11, atol=1e-11)


def test_the_oracle_with_default_exponents_is_algorithm_1() -> None:
    v_hat = torch.rand(7, 5, dtype=torch.float64)
    denominator = family_denominator(v_hat, eps=1e-3, n=2.0)
    torch.testing.assert_close(denominator, ((v_hat.mean(0, keepdim=True) / 4).sqrt() + 1e-3).expand(7, 5))
