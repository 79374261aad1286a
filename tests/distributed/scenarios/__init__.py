"""Scenarios for several ranks: one function each, which raises on the ranks where it fails.

The reference is always the same model on one rank, unsharded, or the float64 oracle.
"""

from collections.abc import Callable

from scenarios import (
    checkpoints,
    clipping,
    collectives,
    conversion,
    data_parallel,
    family,
    family_edges,
    flattened,
    hidden_matrices,
    late_changes,
    placements,
    rounded_moments,
    standard_groups,
    tensor_parallel,
    two_optimizers,
    zero_redundancy,
)

LAUNCHES = (2, 4, 1)  # numbers of ranks, in this order: later ones load checkpoints of earlier ones
MODULES = (
    data_parallel,
    placements,
    tensor_parallel,
    collectives,
    clipping,
    standard_groups,
    checkpoints,
    family,
    family_edges,
    hidden_matrices,
    conversion,
    zero_redundancy,
    late_changes,
    flattened,
    two_optimizers,
    rounded_moments,
)


def scenarios_on(ranks: int) -> dict[str, Callable[[], None]]:
    """The scenarios for this number of ranks, by name, in the order of their definition."""
    return {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if ranks in getattr(value, "ranks", ())
    }
