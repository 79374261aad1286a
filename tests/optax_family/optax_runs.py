"""Steps of an optax transformation, and the same steps by the literal equations in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from coupled_adam.optimizer.reference import ReferenceState, reference_init, reference_step

Array = np.ndarray[Any, Any]
PARTIAL: dict[str, Any] = {"row_exponent": 0.25, "mean_free": True}


def table(shape: tuple[int, int], dtype: Any = np.float64) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


def gradients(shape: tuple[int, int], steps: int, dtype: Any = np.float64) -> list[Array]:
    """Gradients whose rows differ by orders of magnitude, like those of frequent and rare tokens."""
    random = np.random.default_rng(sum(shape))
    scale = np.logspace(-4, 0, shape[0])[:, None]
    return [(random.standard_normal(shape) * scale).astype(dtype) for _ in range(steps)]


def run(
    optimizer: optax.GradientTransformation, params: Any, grads: list[Any], *, jit: bool = False, state: Any = None
) -> tuple[Any, Any]:
    """Parameters and state after one step for each gradient."""
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params) if state is None else state

    def step(params: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for grad in grads:
        params, state = step(params, state, jax.tree.map(jnp.asarray, grad))
    return params, state


def oracle(params: Array, grads: list[Array], *, b1: float = 0.9, b2: float = 0.999, **options: Any) -> ReferenceState:
    state = reference_init(torch.from_numpy(params))
    for grad in grads:
        state = reference_step(state, torch.from_numpy(grad), betas=(b1, b2), **options)
    return state


def relative_error(value: Any, expected: Any) -> float:
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    assert value.shape == expected.shape
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))
