"""The learning rate and the annealed row exponent at each step, as pure functions of the step.

    warm-up   lr * step / warmup_steps, from zero
    cosine    down to final_fraction * lr at total_steps, half a cosine wave
    constant  stays at lr
    wsd       warm-up, stable, decay: stays at lr, then linear down to final_fraction * lr at total_steps

    annealed  linear from start to end, then constant. The update of row i has the factor (s / r_i)^(y / 2) with the row
              exponent y, so a linear y multiplies the update by the same number at every step

Steps count from 0: the learning rate of `step` applies to the update from `step` to `step + 1`.
"""

import math

from coupled_adam.base.errors import UserError


def learning_rate(
    step: int,
    *,
    lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    kind: str = "cosine",
    final_fraction: float = 0.1,
    decay_steps: int = 0,
) -> float:
    """Compute the learning rate of a step.

    Args:
        step: the step, from 0; after total_steps the last value holds.
        lr: the highest learning rate.
        total_steps: number of steps in the run.
        warmup_steps: number of steps over which the learning rate rises from zero to lr.
        kind: "cosine", "constant" or "wsd".
        final_fraction: final value of cosine and wsd, as a fraction of lr.
        decay_steps: wsd only: length of the decay at the end.

    Returns:
        The learning rate, from 0 to lr.

    Example:
        >>> [learning_rate(step, lr=1.0, total_steps=110, warmup_steps=10) for step in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    if step < 0:
        raise UserError(f"step {step}: expected 0 or above")
    if step < warmup_steps:
        return lr * step / warmup_steps
    step = min(step, total_steps)
    if kind == "constant":
        return lr
    if kind == "cosine":
        progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        above_final = (1 + math.cos(math.pi * progress)) / 2
    elif kind == "wsd":
        remaining = total_steps - step
        above_final = min(remaining / decay_steps, 1.0) if decay_steps else 1.0
    else:
        raise UserError(f'schedule {kind!r}: expected "cosine", "constant" or "wsd"')
    return lr * (final_fraction + (1 - final_fraction) * above_final)


def annealed(step: int, *, start: float, end: float, steps: int) -> float:
    """Interpolate linearly from `start` to `end`, then stay at `end`.

    Args:
        step: the step, from 0.
        start: the value at step 0.
        end: the value from step `steps` on.
        steps: length of the interpolation, 1 or more.

    Example:
        >>> [annealed(step, start=1.0, end=0.5, steps=10) for step in (0, 5, 10, 1000)]
        [1.0, 0.75, 0.5, 0.5]
    """
    if step < 0:
        raise UserError(f"step {step}: expected 0 or above")
    return start + (end - start) * step / steps if step < steps else end
