"""The family of second moments for JAX, as optax transformations. Does not import torch."""

from coupled_adam.base.extras import require

require("optax", "jax", "for coupled_adam.jax")  # before the imports below, so that the error names the extra

from coupled_adam.jax.coupled_aliases import coupled_adam, coupled_adamw  # noqa: E402
from coupled_adam.jax.coupled_transform import ScaleByCoupledAdamState, scale_by_coupled_adam  # noqa: E402

__all__ = ["ScaleByCoupledAdamState", "coupled_adam", "coupled_adamw", "scale_by_coupled_adam"]
