"""Every member of the family as an optax transformation, compared with the literal equations in float64."""

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import torch  # noqa: E402
from optax_runs import PARTIAL, gradients, oracle, relative_error, run, table  # noqa: E402

from coupled_adam import CoupledAdamW  # noqa: E402
from coupled_adam.jax import coupled_adam, coupled_adamw, scale_by_coupled_adam  # noqa: E402
from coupled_adam.optimizer.reference import reference_init, reference_step  # noqa: E402

MEMBERS: list[dict[str, Any]] = [
    {},
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
    {"lr": 0.1, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.1},
    {"scale_exponent": -2.5, "weight_decay": 0.05},
    {"b1": 0.0, "b2": 0.5},
    {"b2": 0.0},
    {"vocabulary_size": 31},
]
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-6}


def optimizer_of(lr: float = 1e-3, **options: Any) -> Any:
    return coupled_adam(lr, **options)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_every_member_gives_the_updates_of_the_equations(
    member: dict[str, Any], options: dict[str, Any], dtype: Any
) -> None:
    params, grads = table((53, 19), dtype), gradients((53, 19), 4, dtype)
    with jax.enable_x64(dtype == np.float64):
        moved, (state, *_) = run(optimizer_of(**member, **options), params, grads)
    expected = oracle(params, grads, **member, **options)
    tolerance, real = TOLERANCE[dtype], slice(options.get("vocabulary_size"))
    assert moved.dtype == state.column_nu.dtype == dtype
    assert (state.mu is None) == (options.get("b1") == 0)
    assert relative_error(moved, expected.embeddings) < tolerance
    # The table hardly moves in a few steps; the displacement is compared as well.
    way, expected_way = (np.asarray(values, np.float64) - params for values in (moved, expected.embeddings))
    assert relative_error(way, expected_way) < 500 * tolerance
    if state.mu is not None:
        assert state.mu.dtype == dtype
        assert relative_error(state.mu, expected.first_moment) < tolerance
    assert relative_error(state.column_nu, expected.second_moment[real].mean(0, keepdim=True)) < tolerance
    if "row_exponent" in member:
        assert relative_error(state.row_nu, expected.second_moment.mean(1, keepdim=True)) < tolerance
    else:
        assert state.row_nu is None
    assert state.count == expected.step


@pytest.mark.parametrize("options", [{}, {"vocabulary_size": 31}, {"column_exponent": 0.5}], ids=str)
def test_a_table_with_the_vocabulary_along_its_second_axis_moves_like_its_transpose(options: dict[str, Any]) -> None:
    params, grads = table((53, 19)), gradients((53, 19), 4)
    expected = oracle(params, grads, **PARTIAL, **options)
    with jax.enable_x64(True):
        optimizer = coupled_adam(1e-3, vocabulary_axis=1, **PARTIAL, **options)
        moved, (state, *_) = run(optimizer, params.T, [grad.T for grad in grads])
    assert relative_error(moved.T, expected.embeddings) < 1e-12
    assert (state.mu.shape, state.column_nu.shape, state.row_nu.shape) == ((19, 53), (19, 1), (1, 53))


def test_exponents_and_learning_rate_follow_their_schedules_under_jit() -> None:
    params, grads = table((53, 19)), gradients((53, 19), 6)
    # optax computes schedules in float32, which represents these values exactly.
    rows, columns = optax.linear_schedule(1.0, 0.0, 4), optax.linear_schedule(0.5, 1.0, 8)
    rates = optax.exponential_decay(2**-7, 1, 0.5)
    expected = reference_init(torch.from_numpy(params))
    for step, grad in enumerate(grads):
        exponents = {"row_exponent": max(1 - step / 4, 0), "column_exponent": 0.5 + step / 16}
        expected = reference_step(expected, torch.from_numpy(grad), lr=2 ** -(7 + step), mean_free=True, **exponents)
    with jax.enable_x64(True):
        optimizer = coupled_adam(rates, row_exponent=rows, column_exponent=columns, mean_free=True)
        moved, _ = run(optimizer, params, grads, jit=True)
    assert relative_error(moved, expected.embeddings) < 1e-12


def test_an_exponent_that_grows_from_zero_knows_the_rows_from_the_start() -> None:
    params, grads = table((53, 19)), gradients((53, 19), 5)
    expected = reference_init(torch.from_numpy(params))
    for step, grad in enumerate(grads):
        expected = reference_step(expected, torch.from_numpy(grad), row_exponent=step / 4)
    with jax.enable_x64(True):
        moved, _ = run(coupled_adam(1e-3, row_exponent=optax.linear_schedule(0.0, 1.0, 4)), params, grads)
    assert relative_error(moved, expected.embeddings) < 1e-12


@pytest.mark.parametrize("member", [{}, PARTIAL, {"row_exponent": 1.0, "column_exponent": 0.5}], ids=str)
def test_torch_and_optax_take_the_same_steps(member: dict[str, Any]) -> None:
    params, grads = table((53, 19), np.float32), gradients((53, 19), 6, np.float32)
    options = {"eps": 1e-6, "scale_exponent": 1.5, "weight_decay": 0.1, **member}
    parameter = torch.nn.Parameter(torch.from_numpy(params.copy()))
    of_torch = CoupledAdamW([{"params": [parameter], "coupled": True}], lr=0.01, betas=(0.8, 0.95), **options)
    for grad in grads:
        parameter.grad = torch.from_numpy(grad.copy())
        of_torch.step()
    moved, (state, *_) = run(coupled_adam(0.01, 0.8, 0.95, **options), params, grads, jit=True)
    assert relative_error(moved, parameter.detach()) < 1e-6
    assert relative_error(state.mu, of_torch.state[parameter]["exp_avg"]) < 1e-6
    assert relative_error(state.column_nu, of_torch.state[parameter]["exp_avg_sq"]) < 1e-6
    if state.row_nu is not None:
        assert relative_error(state.row_nu, of_torch.state[parameter]["row_avg_sq"]) < 1e-6


def test_clipping_first_gives_the_updates_of_clipped_gradients() -> None:
    params, grads = table((53, 19)), gradients((53, 19), 4)
    limit = 0.5
    assert min(np.linalg.norm(grad) for grad in grads) > limit
    clipped = [grad * limit / np.linalg.norm(grad) for grad in grads]
    expected = oracle(params, clipped, **PARTIAL)
    with jax.enable_x64(True):
        optimizer = optax.chain(optax.clip_by_global_norm(limit), coupled_adam(1e-3, **PARTIAL))
        moved, _ = run(optimizer, params, grads, jit=True)
    assert relative_error(moved, expected.embeddings) < 1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_tables_have_wide_second_moments_and_updates_as_wide_as_the_first(dtype: str) -> None:
    narrow = jax.numpy.dtype(dtype)
    params = table((53, 19)).astype(narrow)
    grads = [grad.astype(narrow) for grad in gradients((53, 19), 1)]
    expected = oracle(params.astype(np.float64), [grad.astype(np.float64) for grad in grads], lr=0.1, **PARTIAL)
    rounded = expected.embeddings.numpy().astype(np.float32).astype(narrow)
    for mu_dtype in (narrow, np.dtype("float32")):
        optimizer = coupled_adam(0.1, mu_dtype=None if mu_dtype == narrow else mu_dtype, **PARTIAL)
        updates, _ = optimizer.update(jax.numpy.asarray(grads[0]), optimizer.init(jax.numpy.asarray(params)))
        moved, (state, *_) = run(optimizer, params, grads)
        assert moved.dtype == narrow
        assert updates.dtype == state.mu.dtype == mu_dtype
        assert state.column_nu.dtype == state.row_nu.dtype == np.float32
        assert relative_error(state.column_nu, expected.second_moment.mean(0, keepdim=True)) < 1e-6
        assert relative_error(moved, expected.embeddings) < {"bfloat16": 4e-3, "float16": 5e-4}[dtype]
    # Rounded once; a number halfway between two may go either way.
    assert np.mean(np.asarray(moved) == rounded) > 0.99


def test_a_narrow_table_does_not_stop_the_second_moment() -> None:
    params, grads = table((53, 19)).astype(jax.numpy.bfloat16), gradients((53, 19), 30, np.float32)
    _, state = run(scale_by_coupled_adam(), params, grads, jit=True)
    expected = oracle(params.astype(np.float64), grads)
    assert relative_error(state.column_nu, expected.second_moment.mean(0, keepdim=True)) < 1e-6


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16", "float32", np.dtype("float32")], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("build", [scale_by_coupled_adam, functools.partial(coupled_adam, 1.0)])
def test_without_a_first_moment_updates_have_the_dtype_that_they_would_have_with_it(
    build: Any, dtype: str, mu_dtype: Any
) -> None:
    params = jax.numpy.asarray(table((53, 19)), dtype)
    grad = jax.numpy.asarray(gradients((53, 19), 1)[0], "bfloat16")
    optimizers = [build(b1=b1, mu_dtype=mu_dtype) for b1 in (0.0, 0.5)]
    updates = [each.update(grad, each.init(params), params)[0] for each in optimizers]
    expected = jax.numpy.dtype(dtype if mu_dtype is None else mu_dtype)
    assert updates[0].dtype == updates[1].dtype == expected
    assert relative_error(*(np.asarray(each, np.float64) for each in updates)) < 1e-2


def test_without_params_a_missing_first_moment_counts_as_having_the_dtype_of_the_gradient() -> None:
    grad = jax.numpy.asarray(gradients((53, 19), 1)[0], "bfloat16")
    optimizer = scale_by_coupled_adam(b1=0.0)
    updates, _ = optimizer.update(grad, optimizer.init(jax.numpy.zeros((53, 19))))
    assert updates.dtype == "bfloat16"


@pytest.mark.parametrize("wrapped", [False, True])
def test_narrow_gradients_leave_the_mean_embedding_of_a_wide_table_in_place_without_a_first_moment(
    wrapped: bool,
) -> None:
    options = {"b1": 0.0, "row_exponent": 1.0, "mean_free": True}
    optimizer: Any = coupled_adamw(1.0, lambda path, leaf: path == "wte", **options)
    optimizer = optax.MultiSteps(optimizer, 1) if wrapped else optimizer
    params = {"wte": jax.numpy.asarray(table((53, 19), np.float32)), "bias": jax.numpy.zeros(19)}
    grad = jax.numpy.asarray(gradients((53, 19), 1)[0], "bfloat16")
    updates, _ = optimizer.update({"wte": grad, "bias": grad[0]}, optimizer.init(params), params)
    assert updates["wte"].dtype == np.float32
    assert np.abs(np.asarray(updates["wte"]).mean(0)).max() < 1e-6
    assert np.abs(np.asarray(updates["wte"])).max() > 0.1


def test_mu_dtype_applies_only_to_the_first_moment() -> None:
    params, grads = table((53, 19), np.float32), gradients((53, 19), 3, np.float32)
    optimizer = coupled_adam(1e-3, mu_dtype="bfloat16", **PARTIAL)
    moved, (state, *_) = run(optimizer, params, grads, jit=True)
    assert state.mu.dtype == jax.numpy.bfloat16
    assert moved.dtype == state.column_nu.dtype == state.row_nu.dtype == np.float32
    expected = oracle(params, grads, **PARTIAL)
    assert relative_error(state.mu, expected.first_moment) < 1e-2
    assert relative_error(np.asarray(moved) - params, expected.embeddings.numpy() - params) < 1e-2
