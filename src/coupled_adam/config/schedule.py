"""The learning rate and the annealed row exponent at each step, as pure functions of the step.

    warm-up   lr * step / warmup_steps, from zero
    cosine    down to final_fraction * lr at total_steps, half a cosine wave
    constant  stays at lr
    wsd       warm-up, stable, decay: stays at lr, then down in a straight line to final_fraction * lr at total_steps

    annealed  from start in a straight line to end, then constant. The update of row i has the factor (s / r_i)^(y / 2),
              y the row exponent: a straight line in y multiplies it by the same number at every step

Steps count from 0, so a step's learning rate is the one for the update that makes it step + 1.
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
    """The learning rate of one step.

    Args:
        step: the step, from 0; beyond total_steps the schedule's last value holds.
        lr: the highest learning rate.
        total_steps: steps of the whole run.
        warmup_steps: steps over which the learning rate rises from zero to lr.
        kind: "cosine", "constant" or "wsd".
        final_fraction: where cosine and wsd end, as a part of lr.
        decay_steps: wsd only: length of the decay at the end.

    Returns:
        the learning rate, from 0 to lr.

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
    """A value that goes in a straight line from `start` to `end`, and stays there.

    Args:
        step: the step, from 0.
        start: the value at step 0.
        end: the value from step `steps` on.
        steps: length of the line, 1 or more.

    Example:
        >>> [annealed(step, start=1.0, end=0.5, steps=10) for step in (0, 5, 10, 1000)]
        [1.0, 0.75, 0.5, 0.5]
    """
    if step < 0:
        raise UserError(f"step {step}: expected 0 or above")
    return start + (end - start) * step / steps if step < steps else end
