"""docs/jax.md: every example runs as written, and its result follows the equations."""

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import torch  # noqa: E402
from check_registry import Checks, Names  # noqa: E402
from page_examples import ROOT, Example, read_examples, run_here, save_files  # noqa: E402

from coupled_adam.optimizer.reference import reference_init, reference_step  # noqa: E402

PAGE = ROOT / "docs" / "jax.md"
EXAMPLES = [example for example in read_examples(PAGE) if not example.file]
CHECKS = Checks()
after = CHECKS.after


@pytest.fixture(scope="module", autouse=True)
def _in_a_readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The current folder, with tiny_jax.py, which is compiled once for all examples."""
    folder = tmp_path_factory.mktemp("reader")
    save_files(PAGE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        is_disabled = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than all steps
        yield
        jax.config.update("jax_disable_most_optimizations", is_disabled)
    sys.modules.pop("tiny_jax", None)


@functools.cache
def gradient_function() -> Any:
    from tiny_jax import loss

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_example_runs_as_written(example: Example) -> None:
    CHECKS[example.title](run_here(example))


def test_every_example_has_its_own_check_and_heading() -> None:
    assert sorted(example.title for example in EXAMPLES) == sorted(CHECKS)


def assert_trained_by_the_equations(
    params: Any,
    steps: int,
    *,
    lr: float,
    weight_decay: float = 1e-4,
    max_norm: float | None = None,
    exponents: list[float] | None = None,
    V: int = 101,
    **options: Any,
) -> None:
    """Assert that the table follows the oracle and the block follows optax.adamw."""
    from tiny_jax import batches, parameters

    model = parameters(V)
    adamw = optax.adamw(lr, weight_decay=weight_decay)
    adamw_state = adamw.init(model["block"])
    table = reference_init(torch.from_numpy(np.array(model["wte"]["embedding"])))
    for step, tokens in enumerate(batches(steps)):
        grads = gradient_function()(model, tokens)
        if max_norm is not None:
            norm = np.sqrt(sum(np.square(grad).sum() for grad in jax.tree.leaves(grads)))
            assert norm > max_norm
            grads = jax.tree.map(lambda grad, norm=norm: grad * max_norm / norm, grads)
        if exponents is not None:
            options["row_exponent"] = exponents[step]
        table = reference_step(table, torch.from_numpy(np.array(grads["wte"]["embedding"])), lr=lr, **options)
        updates, adamw_state = adamw.update(grads["block"], adamw_state, model["block"])
        block = optax.apply_updates(model["block"], updates)
        model = {"wte": {"embedding": jax.numpy.asarray(table.embeddings.float().numpy())}, "block": block}
    assert jax.tree.structure(params) == jax.tree.structure(model)
    for value, expected in zip(jax.tree.leaves(params), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=3e-6)
    assert np.abs(params["wte"]["embedding"] - parameters(V)["wte"]["embedding"]).max() > 1e-4


def moments(state: Any, label: str = "table") -> Any:
    return state.inner_states[label].inner_state[0]


@after("The whole loop")
def _(names: Names) -> None:
    assert_trained_by_the_equations(names["params"], 3, lr=1e-3, weight_decay=0.1)
    assert moments(names["state"]).count == 3


@after("Print the paths")
def _(names: Names) -> None:
    """Nothing to check: the output is already compared with the page."""


@after("A head that is not tied")
def _(names: Names) -> None:
    params = {"lm_head": {"kernel": jax.numpy.ones((16, 101))}, "block": jax.numpy.ones((16, 16))}
    state = names["optimizer"].init(params)
    assert moments(state).column_nu["lm_head"]["kernel"].shape == (16, 1)
    assert moments(state, "other").nu["block"].shape == (16, 16)


@after("Tables stored both ways")
def _(names: Names) -> None:
    assert moments(names["state"], "rows").column_nu["embedding"].shape == (1, 16)
    assert moments(names["state"], "columns").column_nu["lm_head"].shape == (16, 1)


@after("Partial coupling")
def _(names: Names) -> None:
    assert names["moved"] < 1e-6
    assert_trained_by_the_equations(names["params"], 3, lr=1e-2, row_exponent=0.25, mean_free=True)


@after("Anneal the exponent")
def _(names: Names) -> None:
    exponents = [1.0, 0.8125, 0.625, 0.4375, 0.25]
    assert_trained_by_the_equations(names["params"], 5, lr=1e-2, exponents=exponents, mean_free=True)


@after("Padded tables")
def _(names: Names) -> None:
    assert names["params"]["wte"]["embedding"].shape == (128, 16)
    assert_trained_by_the_equations(names["params"], 3, lr=1e-2, V=128, mean_free=True, vocabulary_size=101)


@after("Clipping")
def _(names: Names) -> None:
    assert_trained_by_the_equations(names["params"], 3, lr=1e-2, max_norm=0.1)


@after("Change options between steps")
def _(names: Names) -> None:
    assert names["state"].hyperparams["row_exponent"] == 0.25
    assert_trained_by_the_equations(names["params"], 4, lr=1e-2, exponents=[1.0, 1.0, 0.25, 0.25])


@after("Save and resume")
def _(names: Names) -> None:
    from tiny_jax import train

    params, state = train(names["params"], names["optimizer"], 3, state=names["state"], first=3)
    assert jax.tree.all(jax.tree.map(np.array_equal, (names["resumed"], names["resumed_state"]), (params, state)))
    assert moments(state).row_nu["wte"]["embedding"].shape == (101, 1)
