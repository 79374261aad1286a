"""On the CPU: elsewhere JAX takes most of the device's memory when it starts."""

import os
from importlib.util import find_spec

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Doctests are looked for in every module, and these import JAX.
collect_ignore = [] if find_spec("optax") else ["optax_runs.py", "optax_sharding_worker.py"]
