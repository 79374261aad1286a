"""The theory of a run as metrics of its result: what tables compare over seeds, sizes and optimizers.

Everything else that was measured stays in the run folder, under `theory/`.
"""

from statistics import fmean

from coupled_adam.metrics import THEORY_PREFIX
from coupled_adam.theory.record import OPTIMIZERS, RunTheory

THEORY_BATCHES = f"{THEORY_PREFIX}batches"


def theory_metrics(theory: RunTheory) -> dict[str, float | None]:
    """Numbers of a run by their names in its result, all beginning with `theory_`.

    `second_moment_r2` and the like are the means over the checkpoints of `RunTheory.summary`. `updates_adam` and the
    like are means over the checkpoints of the sum of updates over the sum of their lengths, with `_output` and `_input`
    behind them those of the layers; `updates_own` is that of the optimizer that the run was trained with.
    `gradient_sum` is the largest such sum of output-layer gradients in any batch, and `identity_error` the largest at
    any checkpoint.

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
