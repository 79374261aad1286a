"""Leave out the doctests of coupled_adam.jax where its extra is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("optax") else ["coupled_adam/jax"]
