"""Compare steps with tables sharded over two CPU devices with the same steps on one.

Runs in a separate process, because the number of devices is set before JAX starts. Prints "ok" for each sharding.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax_runs import PARTIAL, gradients, relative_error, run, table

from coupled_adam.jax import coupled_adamw

V, H = 40, 8
ROWS, COLUMNS = PartitionSpec("devices", None), PartitionSpec(None, "devices")
PADDED = {"row_exponent": 0.5, "vocabulary_size": 31, "mean_free": True}


def compare(options: dict[str, Any], ways: list[tuple[PartitionSpec, AxisType]]) -> None:
    params = {"wte": table((V, H), np.float32), "bias": np.ones(H, np.float32)}
    grads = [{"wte": grad, "bias": grad[0]} for grad in gradients((V, H), 3, np.float32)]
    optimizer = coupled_adamw(0.1, lambda path, leaf: path == "wte", **options)
    expected, state = run(optimizer, params, grads, jit=True)
    expected_moments = moments_of(state)

    for spec, axis_type in ways:
        mesh = jax.make_mesh((2,), ("devices",), axis_types=(axis_type,))
        shardings = {"wte": NamedSharding(mesh, spec), "bias": NamedSharding(mesh, PartitionSpec())}
        sharded = jax.device_put(params, shardings)
        start = moments_of(optimizer.init(sharded))
        moved, state = run(optimizer, sharded, [jax.device_put(grad, shardings) for grad in grads], jit=True)
        moments = moments_of(state)
        assert moved["wte"].sharding.is_equivalent_to(shardings["wte"], 2)
        for name in ("wte", "bias"):
            assert relative_error(moved[name], expected[name]) < 1e-6
        for key in ("mu", "column_nu", "row_nu"):
            assert relative_error(getattr(moments, key)["wte"], getattr(expected_moments, key)["wte"]) < 1e-6
        for at_a_time in (start, moments):
            assert at_a_time.mu["wte"].sharding.is_equivalent_to(shardings["wte"], 2)
            assert at_a_time.row_nu["wte"].is_fully_replicated == (spec == COLUMNS)
            assert at_a_time.column_nu["wte"].is_fully_replicated == (spec == ROWS)
        print("ok")


def moments_of(state: Any) -> Any:
    return state.inner_states["table"].inner_state[0]


def main() -> None:
    assert jax.device_count() == 2
    compare(PARTIAL, [(ROWS, AxisType.Auto), (COLUMNS, AxisType.Explicit)])
    compare(PADDED, [(COLUMNS, AxisType.Auto), (ROWS, AxisType.Explicit)])


if __name__ == "__main__":
    main()
