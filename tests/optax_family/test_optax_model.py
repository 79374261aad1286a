"""`coupled_adamw`: tables use coupled_adam and the rest optax.adamw; and its use with other parts of optax."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

from optax_runs import PARTIAL, gradients, oracle, relative_error, run, table  # noqa: E402

from coupled_adam.jax import coupled_adam, coupled_adamw  # noqa: E402

V, H = 53, 19
jnp = jax.numpy
MASK = {"wte": True, "block": {"kernel": False, "bias": False}}


def is_table(path: str, leaf: Any) -> bool:
    return path == "wte"


def model(dtype: Any = np.float32) -> dict[str, Any]:
    return {"wte": table((V, H), dtype), "block": {"kernel": table((H, H), dtype), "bias": np.zeros(H, dtype)}}


def model_gradients(steps: int, dtype: Any = np.float32) -> list[dict[str, Any]]:
    tables, kernels = gradients((V, H), steps, dtype), gradients((H, H), steps, dtype)
    return [
        {"wte": of_table, "block": {"kernel": of_kernel, "bias": of_kernel[0]}}
        for of_table, of_kernel in zip(tables, kernels, strict=True)
    ]


@pytest.mark.parametrize(
    ("tables", "jit"),
    [(is_table, False), (is_table, True), (MASK, True), ({"wte": True, "block": False}, False)],
    ids=["predicate, eager", "predicate, jit", "tree, jit", "prefix, eager"],
)
def test_other_parameters_are_bitwise_equal_to_adamw_and_tables_are_coupled(tables: Any, jit: bool) -> None:
    options = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
    optimizer = coupled_adamw(0.01, tables, weight_decay=0.1, **options, **PARTIAL)
    moved, state = run(optimizer, model(), model_gradients(3), jit=jit)
    blocks = [grad["block"] for grad in model_gradients(3)]
    others, _ = run(optax.adamw(0.01, weight_decay=0.1, **options), model()["block"], blocks, jit=jit)
    assert all(np.array_equal(moved["block"][key], others[key]) for key in ("kernel", "bias"))
    expected = oracle(model()["wte"], gradients((V, H), 3, np.float32), lr=0.01, **options, **PARTIAL)
    assert relative_error(moved["wte"], expected.embeddings) < 1e-6
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.inner_states["table"])]
    assert shapes == [(), (V, H), (1, H), (V, 1)]


def test_tables_are_not_decayed_and_the_mask_selects_the_others() -> None:
    zeros = [jax.tree.map(np.zeros_like, model())]
    mask = {"wte": True, "block": {"kernel": True, "bias": False}}
    params = model()
    params["block"]["bias"] = np.ones(H, np.float32)
    for given in (mask, lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params)):
        moved, _ = run(coupled_adamw(0.1, is_table, weight_decay=0.5, mask=given), params, zeros)
        assert np.array_equal(moved["wte"], params["wte"])
        assert np.array_equal(moved["block"]["bias"], params["block"]["bias"])
        np.testing.assert_allclose(moved["block"]["kernel"], 0.95 * params["block"]["kernel"], rtol=1e-6)


def test_the_defaults_equal_those_of_adamw() -> None:
    params = {"wte": model()["wte"], "block": model()["block"]["kernel"]}
    grads = [{"wte": grad["wte"], "block": grad["block"]["kernel"]} for grad in model_gradients(2)]
    moved, _ = run(coupled_adamw(0.01, is_table), params, grads)
    expected, _ = run(optax.adamw(0.01), params["block"], [grad["block"] for grad in grads])
    assert np.array_equal(moved["block"], expected)


def test_a_learning_rate_schedule_applies_to_all_parameters() -> None:
    schedule = optax.piecewise_constant_schedule(0.5, {1: 0.0})
    moved, state = run(coupled_adamw(schedule, is_table), model(), model_gradients(1))
    still, _ = run(coupled_adamw(schedule, is_table), moved, model_gradients(2), state=state)
    assert not np.array_equal(moved["wte"], model()["wte"])
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, still))


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        (lambda path, leaf: leaf.ndim == 1, "'block/bias'"),  # no table
        (lambda path, leaf: False, "'block/kernel'"),  # none selected; names the matrices to choose from
        ({"wte": False, "block": False}, "'wte'"),
        ({"wte": "yes", "block": False}, "'yes'"),
        (lambda path, leaf: None, "tables"),
        ("wte", "'wte'"),
    ],
)
def test_a_wrong_choice_of_tables_is_an_error_that_names_it(tables: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        coupled_adamw(1e-3, tables).init(jax.tree.map(jnp.asarray, model()))


def test_two_tables_with_different_axes_are_each_coupled_over_their_vocabulary() -> None:
    params = {"embedding": table((V, H)), "head": table((V, H)).T}
    grads = [{"embedding": grad, "head": grad.T} for grad in gradients((V, H), 3)]
    with jax.enable_x64(True):
        transformations = {"rows": coupled_adam(0.01), "columns": coupled_adam(0.01, vocabulary_axis=1)}
        optimizer = optax.partition(transformations, {"embedding": "rows", "head": "columns"})
        moved, _ = run(optimizer, params, grads)
    assert relative_error(moved["head"].T, moved["embedding"]) < 1e-14


def test_accumulated_gradients_of_narrow_tables_are_one_step() -> None:
    params, grads = model(jnp.bfloat16), model_gradients(2)
    optimizer = optax.MultiSteps(coupled_adamw(0.01, is_table, **PARTIAL), every_k_schedule=2)
    moved, _ = run(optimizer, params, grads, jit=True)
    mean = [jax.tree.map(lambda first, second: (first + second) / 2, *grads)]
    expected, _ = run(coupled_adamw(0.01, is_table, **PARTIAL), params, mean, jit=True)
    assert moved["wte"].dtype == jnp.bfloat16
    assert relative_error(moved["wte"], expected["wte"]) < 1e-3


def test_a_step_with_a_nan_is_skipped_by_apply_if_finite() -> None:
    grads = model_gradients(2, jnp.bfloat16)
    spoiled = jax.tree.map(np.copy, grads[0])
    spoiled["wte"][0, 0] = np.nan
    optimizer = optax.apply_if_finite(coupled_adamw(0.01, is_table, **PARTIAL), max_consecutive_errors=3)
    moved, _ = run(optimizer, model(jnp.bfloat16), [grads[0], spoiled, grads[1]], jit=True)
    expected, _ = run(optimizer, model(jnp.bfloat16), grads, jit=True)
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, expected))


def test_injected_options_can_be_changed_between_steps() -> None:
    params, grads = table((V, H), np.float32), gradients((V, H), 2, np.float32)
    injected = optax.inject_hyperparams(coupled_adam, static_args="vocabulary_axis")
    optimizer = injected(0.1, row_exponent=1.0, mean_free=True, vocabulary_size=31)
    moved, state = run(optimizer, params, grads[:1], jit=True)
    state.hyperparams["row_exponent"] = jnp.asarray(0.25)
    moved, _ = run(optimizer, moved, grads[1:], state=state, jit=True)
    plain = coupled_adam(0.1, row_exponent=lambda step: 1 - 0.75 * step, mean_free=True, vocabulary_size=31)
    expected, _ = run(plain, params, grads)
    assert relative_error(moved, expected) < 1e-5  # b2 is a float32 here, and 1 - b2 has four digits


def test_optax_finds_the_moments_of_a_model_in_its_state() -> None:
    optimizer = coupled_adamw(0.01, is_table, **PARTIAL)
    state = optimizer.init(jax.tree.map(jnp.asarray, model()))
    ones = optax.tree_map_params(optimizer, lambda leaf: leaf + 1, state)
    moments = ones.inner_states["table"].inner_state[0]
    assert moments.count == 0
    assert all(bool((leaf == 1).all()) for leaf in jax.tree.leaves((moments.mu, moments.column_nu, moments.row_nu)))
