"""The theory of a run as metrics of its result, for tables over seeds, sizes and optimizers.

All other measurements stay in the run folder, under `theory/`.
"""

from statistics import fmean

from coupled_adam.metrics import THEORY_PREFIX
from coupled_adam.theory.record import OPTIMIZERS, RunTheory

THEORY_BATCHES = f"{THEORY_PREFIX}batches"


def theory_metrics(theory: RunTheory) -> dict[str, float | None]:
    """Metrics of a run by their keys in its result, all with the prefix `theory_`.

    - `second_moment_r2` and similar keys: means over the checkpoints of `RunTheory.summary`.
    - `updates_adam` and similar keys: the sum of updates divided by the sum of their lengths, averaged over the
      checkpoints; with the suffix `_output` or `_input`, the part of that layer. `updates_own` is the optimizer that
      the run was trained with.
    - `gradient_sum`: the largest such ratio of output-layer gradients in any batch.
    - `identity_error`: the largest at any checkpoint.

    Args:
        theory: of at least one checkpoint.
    """
    found: dict[str, float | None] = {name: spread.mean for name, spread in theory.summary.items()}
    found["gradient_sum"] = max(max(each.gradient_sums["output"]) for each in theory.checkpoints)
    found["identity_error"] = max(each.identity_error for each in theory.checkpoints)
    own = {} if theory.own is None else {"own": theory.own}
    for name, optimizer in ({each: each for each in OPTIMIZERS} | own).items():
        sums = [each.update(optimizer) for each in theory.checkpoints]
        found[f"updates_{name}"] = fmean(each.total for each in sums)
        found[f"updates_{name}_output"] = fmean(each.output for each in sums)
        found[f"updates_{name}_input"] = fmean(each.input for each in sums)
    found["checkpoints"] = len(theory.checkpoints)
    found["batches"] = theory.batches
    return {f"{THEORY_PREFIX}{name}": value for name, value in found.items()}
