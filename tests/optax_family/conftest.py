"""Run JAX on the CPU: on other devices it allocates most of the memory when it starts."""

import os
from importlib.util import find_spec

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# pytest collects doctests from every module, and these import JAX.
collect_ignore = [] if find_spec("optax") else ["optax_runs.py", "optax_sharding_worker.py"]
