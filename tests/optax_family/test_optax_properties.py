"""Invariants of the optax transformation, compared with optax's own Adam or with itself."""

import pickle
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import torch  # noqa: E402
from optax_runs import PARTIAL, gradients, relative_error, run, table  # noqa: E402

from coupled_adam import CoupledAdamW  # noqa: E402
from coupled_adam.jax import ScaleByCoupledAdamState, coupled_adam, scale_by_coupled_adam  # noqa: E402

V, H = 53, 19
jnp = jax.numpy


def test_the_defaults_divide_by_the_mean_of_adams_second_moment() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 5, np.float32)
    _, adam = run(optax.scale_by_adam(), params, grads)
    transformation = scale_by_coupled_adam()
    _, state = run(transformation, params, grads[:-1])
    updates, state = transformation.update(jnp.asarray(grads[-1]), state)
    mean = np.asarray(adam.nu, np.float64).mean(0, keepdims=True)
    expected = np.asarray(adam.mu, np.float64) / (1 - 0.9**5) / (np.sqrt(mean / (1 - 0.999**5)) + 1e-8)
    assert relative_error(state.column_nu, mean) < 1e-6
    assert relative_error(updates, expected) < 1e-6
    assert state.row_nu is None


def test_with_both_exponents_one_rank_one_gradients_give_adam() -> None:
    random = np.random.default_rng(0)
    rows, columns = random.standard_normal((V, 1)), random.standard_normal((1, H))
    grads = [size * rows * columns for size in random.standard_normal(4)]
    with jax.enable_x64(True):
        adam, _ = run(optax.adam(1e-3, eps=0.0), table((V, H)), grads)
        moved, _ = run(coupled_adam(1e-3, eps=0.0, row_exponent=1.0), table((V, H)), grads)
    assert relative_error(moved, adam) < 1e-12


@pytest.mark.parametrize("vocabulary_size", [None, 31])
def test_the_mean_embedding_stays_with_mean_free(vocabulary_size: int | None) -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 5, np.float32)
    real = slice(vocabulary_size)
    options = {"row_exponent": 0.5, "vocabulary_size": vocabulary_size}
    moved, _ = run(coupled_adam(0.1, mean_free=True, **options), params, grads)
    drifted, _ = run(coupled_adam(0.1, **options), params, grads)
    before = params[real].mean(0)
    assert np.abs(np.asarray(moved)[real].mean(0) - before).max() < 1e-6
    assert np.abs(np.asarray(drifted)[real].mean(0) - before).max() > 1e-3


def test_the_mean_embedding_stays_with_coupled_adam_when_gradients_sum_to_zero() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 5)
    grads = [(grad - grad.mean(0)).astype(np.float32) for grad in grads]
    moved, _ = run(coupled_adam(0.1), params, grads)
    assert np.abs(np.asarray(moved).mean(0) - params.mean(0)).max() < 1e-6
    assert np.abs(np.asarray(moved) - params).max() > 1e-2


def test_the_order_of_the_rows_does_not_matter() -> None:
    params, grads = table((V, H)), gradients((V, H), 3)
    order = np.random.default_rng(1).permutation(V)
    with jax.enable_x64(True):
        moved, _ = run(coupled_adam(0.1, **PARTIAL), params, grads)
        permuted, _ = run(coupled_adam(0.1, **PARTIAL), params[order], [grad[order] for grad in grads])
    assert relative_error(permuted, np.asarray(moved)[order]) < 1e-13


def test_padding_has_no_effect_on_the_rows_of_the_vocabulary() -> None:
    params, grads = table((V, H)), gradients((V, H), 3)
    padding = np.full((V - 31, H), 1e6)
    with jax.enable_x64(True):
        optimizer = coupled_adam(0.1, vocabulary_size=31, **PARTIAL)
        moved, _ = run(optimizer, params, grads)
        other, _ = run(optimizer, params, [np.concatenate([grad[:31], padding]) for grad in grads])
        alone, _ = run(coupled_adam(0.1, **PARTIAL), params[:31], [grad[:31] for grad in grads])
    assert relative_error(other[:31], moved[:31]) < 1e-13
    assert relative_error(alone, moved[:31]) < 1e-13
    assert relative_error(other[31:], moved[31:]) > 1e-3


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_nothing_moves_before_the_first_gradient(eps: float) -> None:
    params = table((V, H), np.float32)
    zeros = np.zeros_like(params)
    options = {"column_exponent": 0.5, **PARTIAL}
    with jax.debug_nans(True):
        moved, _ = run(coupled_adam(0.1, eps=eps, **options), params, [zeros, zeros])
    assert np.array_equal(moved, params)


def test_a_row_without_gradients_stays_even_without_eps() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 3, np.float32)
    for grad in grads:
        grad[7] = 0.0
    moved, _ = run(coupled_adam(0.1, eps=0.0, row_exponent=0.5), params, grads)
    assert np.isfinite(moved).all()
    assert np.array_equal(moved[7], params[7])
    assert (np.asarray(moved)[8] != params[8]).all()


@pytest.mark.parametrize("member", [{}, {"row_exponent": 0.25}, {"column_exponent": 0.5}, PARTIAL], ids=str)
def test_an_infinite_gradient_has_the_same_effect_as_in_the_torch_optimizer(member: dict[str, Any]) -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 3, np.float32)
    grads[1][3, 5] = np.inf
    moved, _ = run(coupled_adam(0.1, **member), params, grads)
    parameter = torch.nn.Parameter(torch.from_numpy(params.copy()))
    optimizer = CoupledAdamW([{"params": [parameter], "coupled": True}], lr=0.1, weight_decay=0.0, **member)
    for grad in grads:
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    assert np.isnan(moved[3, 5])
    assert np.isfinite(moved[:, 4]).all()
    np.testing.assert_allclose(moved, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_steps_in_a_scan_equal_steps_in_a_loop() -> None:
    params, grads = jnp.asarray(table((V, H), np.float32)), gradients((V, H), 4, np.float32)
    optimizer = coupled_adam(0.1, mu_dtype="bfloat16", **PARTIAL)

    def step(carry: Any, grad: Any) -> tuple[Any, None]:
        updates, state = optimizer.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (scanned, state), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.stack(grads))
    looped, _ = run(optimizer, params, grads)
    assert relative_error(scanned, looped) < 1e-6
    assert state[0].count == 4


def test_a_flattened_and_pickled_state_continues_bitwise_equally() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 6, np.float32)
    optimizer = coupled_adam(optax.linear_schedule(0.1, 0.0, 10), **PARTIAL)
    half, state = run(optimizer, params, grads[:3])
    leaves = pickle.loads(pickle.dumps([np.asarray(leaf) for leaf in jax.tree.leaves(state)]))
    structure = jax.tree.structure(optimizer.init(jnp.asarray(params)))
    resumed = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    assert isinstance(resumed[0], ScaleByCoupledAdamState)
    continued, _ = run(optimizer, np.asarray(half), grads[3:], state=resumed)
    uninterrupted, _ = run(optimizer, params, grads)
    assert np.array_equal(continued, uninterrupted)


def test_a_table_keeps_a_number_for_each_row_and_column() -> None:
    state = scale_by_coupled_adam(**PARTIAL).init(jnp.zeros((V, H), jnp.bfloat16))
    moments = jax.tree.leaves((state.column_nu, state.row_nu))
    assert sum(moment.size for moment in moments) == V + H
    assert {moment.dtype.name for moment in moments} == {"float32"}
    state = scale_by_coupled_adam().init(jnp.zeros((V, H)))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (V, H), (1, H)]
    state = scale_by_coupled_adam(b1=0.0, row_exponent=1.0).init(jnp.zeros((V, H)))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (1, H), (V, 1)]


def test_a_state_without_a_first_moment_cannot_continue_with_momentum_but_the_reverse_can() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 4, np.float32)
    _, state = run(coupled_adam(0.1, b1=0.0), params, grads[:2])
    with pytest.raises(ValueError, match=r"b1 is 0\.9"):
        run(coupled_adam(0.1), params, grads[2:], state=state)
    _, state = run(coupled_adam(0.1), params, grads[:2])
    _, (state, *_) = run(coupled_adam(0.1, b1=0.0), params, grads[2:], state=state)
    assert relative_error(state.mu, grads[-1]) < 1e-6


def test_weight_decay_can_be_enabled_later_with_the_same_state() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 2, np.float32)
    _, state = run(coupled_adam(0.1), params, grads)
    run(coupled_adam(0.1, weight_decay=0.1), params, grads, state=state)
    structures = [jax.tree.structure(coupled_adam(0.1, weight_decay=decay).init(params)) for decay in (0.0, 0.1)]
    assert structures[0] == structures[1]


@pytest.mark.parametrize(
    "options",
    [
        {"row_exponent": 1.5},
        {"row_exponent": "half"},
        {"column_exponent": -0.1},
        {"column_exponent": None},
        {"scale_exponent": 65},
        {"vocabulary_size": 0},
        {"vocabulary_size": 2.5},
        {"vocabulary_size": True},
        {"vocabulary_axis": 2},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_an_error_that_names_it_and_its_value(options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=option) as error:
        coupled_adam(1e-3, **options)
    assert repr(value) in str(error.value)


def test_more_vocabulary_than_rows_is_an_error_that_names_the_table() -> None:
    with pytest.raises(ValueError, match=r"'wte/embedding'.*\b54\b|\b54\b.*'wte/embedding'"):
        coupled_adam(1e-3, vocabulary_size=V + 1).init({"wte": {"embedding": jnp.zeros((V, H))}})


@pytest.mark.parametrize(
    "leaf", [np.zeros(3, np.float32), np.zeros((2, 3, 4)), np.zeros((0, 3)), np.zeros((2, 3), np.int32)], ids=str
)
def test_a_leaf_that_is_not_a_table_is_an_error_that_names_its_path(leaf: Any) -> None:
    with pytest.raises(ValueError, match=r"'block/0/scale'"):
        scale_by_coupled_adam().init({"block": [{"scale": jnp.asarray(leaf)}]})


def test_a_state_without_row_moments_is_refused_for_a_row_exponent() -> None:
    params = jnp.zeros((V, H))
    state = scale_by_coupled_adam().init(params)
    with pytest.raises(ValueError, match=r"row_exponent.*0\.25"):
        scale_by_coupled_adam(row_exponent=0.25).update(params, state)
