"""Tests that need a separate process: two devices, and a Python without torch or without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = "import sys; sys.modules[{missing!r}] = None\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_sharded_tables_are_updated_like_unsharded_ones() -> None:
    pytest.importorskip("optax")
    result = python(str(Path(__file__).with_name("optax_sharding_worker.py")))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["ok"] * 4


def test_a_step_needs_no_torch() -> None:
    pytest.importorskip("optax")
    code = (
        "import jax, jax.numpy as jnp\n"
        "from coupled_adam.jax import coupled_adamw\n"
        "params = {'wte': jnp.ones((4, 2)), 'bias': jnp.ones(2)}\n"
        "optimizer = coupled_adamw(0.1, lambda path, leaf: path == 'wte', row_exponent=0.25)\n"
        "updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)\n"
        "print(jnp.shape(updates['wte']), sys.modules['torch'])\n"
    )
    result = python("-c", WITHOUT.format(missing="torch") + code)
    assert (result.returncode, result.stdout) == (0, "(4, 2) None\n"), result.stderr


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_without_its_packages_the_import_names_the_extra(missing: str) -> None:
    code = (
        "try:\n"
        "    import coupled_adam.jax\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, '[jax]' in str(error))\n"
    )
    result = python("-c", WITHOUT.format(missing=missing) + code)
    assert (result.returncode, result.stdout) == (0, "MissingPackageError True\n"), result.stderr
