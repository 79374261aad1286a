"""The measured numbers as text, for the terminal and the page: tables over the checkpoints, and the paper's values.

Means over the checkpoints are in the paper's notation: 0.85(7) stands for 0.85 ± 0.07.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from coupled_adam.base.text import fixed, scientific, short, shorthand
from coupled_adam.metrics import METRICS
from coupled_adam.theory.record import PUBLISHED, CheckpointTheory, Optimizer, RunTheory, Spread

DASH = "—"
MOST_DECIMALS = 4
LEGEND = (
    "A: slope. I: mutual information in nats. X: mean of (1 - p)² where a token is the true one (i = t), and of p² "
    "where it is not (i ≠ t), with p the probability that the model predicts."
)
"""Legend of the second table."""
NAMES: dict[Optimizer, str] = {"sgd": "SGD", "adam": "Adam", "coupled": "Coupled", "own": "own"}
OWN_MARK = "*"


@dataclass(frozen=True)
class NumberColumn:
    """One number of every checkpoint."""

    group: str
    """Common heading of several columns, above their labels."""
    label: str
    value: Callable[[CheckpointTheory], float | None]
    summary: str | None = None
    """Name in `RunTheory.summary`; None without a mean over the checkpoints."""
    exponent_below: float = 1e-3
    """Smaller numbers are written with an exponent."""


@dataclass(frozen=True)
class Numbers:
    """A table with one row per checkpoint, and summary rows below."""

    title: str
    groups: Sequence[str]
    labels: Sequence[str]
    rows: Sequence[Sequence[str]]
    below: Sequence[Sequence[str]]
    """Mean and spread over the checkpoints, and the paper's values."""


def _update(name: Optimizer, part: str) -> Callable[[CheckpointTheory], float | None]:
    def value(checkpoint: CheckpointTheory) -> float | None:
        found: float = getattr(checkpoint.update(name), part)
        return found

    return value


def _fit(name: str, key: str) -> Callable[[CheckpointTheory], float | None]:
    def value(checkpoint: CheckpointTheory) -> float | None:
        found: float | None = getattr(checkpoint.fits[name], key)
        return found

    return value


FITS = (
    NumberColumn("E[v]", "A", _fit("second_moment", "A"), "second_moment_A", exponent_below=0.1),
    NumberColumn("E[v]", "R²", _fit("second_moment", "r2"), "second_moment_r2"),
    NumberColumn("E[v]", "centred", _fit("second_moment", "r2_centred"), "second_moment_r2_centred"),
    NumberColumn("E[v]", "I", _fit("second_moment", "mutual_information"), "second_moment_mutual_information"),
    NumberColumn("X, i = t", "R²", _fit("x_true", "r2"), "x_true_r2"),
    NumberColumn("X, i = t", "I", _fit("x_true", "mutual_information"), "x_true_mutual_information"),
    NumberColumn("X, i ≠ t", "R²", _fit("x_false", "r2"), "x_false_r2"),
    NumberColumn("X, i ≠ t", "I", _fit("x_false", "mutual_information"), "x_false_mutual_information"),
    NumberColumn("Theorem, R²", "rows", lambda each: each.theorem.r2, "theorem_r2"),
    NumberColumn("Theorem, R²", "elements", lambda each: each.theorem_elements.r2, "theorem_elements_r2"),
)


def through_input(checkpoint: CheckpointTheory, optimizer: Optimizer) -> float | None:
    """Sum of the input layer: its part of a tied table, or the whole sum of an untied input table; None if the
    optimizer does not train that table."""
    if not checkpoint.input_updates:
        return checkpoint.update(optimizer).input
    return next((each.total for each in checkpoint.input_updates if each.optimizer == optimizer), None)


def sums_table(run: RunTheory) -> Numbers:
    """Sums of gradients and updates, divided by the sums of the lengths; a star marks the run's own optimizer (see
    `own_note`)."""
    return _table("Sums over the vocabulary, divided by the sum of the lengths", run, sums_columns(run))


def sums_columns(run: RunTheory) -> list[NumberColumn]:
    """Columns of the sums: for three optimizers, and for the run's own if it is none of them."""
    shown = optimizers_of(run)
    labels = {name: NAMES[name] + OWN_MARK * (name == run.own) for name in shown}
    of_input = labels if run.tied else NAMES  # an untied input table may have another optimizer
    return [
        NumberColumn("mean", METRICS["mu_norm"].symbol, lambda each: each.mu_norm, exponent_below=0.1),
        *(NumberColumn("whole update", labels[name], _update(name, "total")) for name in shown),
        NumberColumn("output layer", "gradients", lambda each: max(each.gradient_sums["output"])),
        *(NumberColumn("output layer", labels[name], _update(name, "output")) for name in shown),
        NumberColumn("input layer", "gradients", lambda each: max(each.gradient_sums["input"])),
        *(
            NumberColumn("input layer", of_input[name], partial(through_input, optimizer=name))
            for name in shown
            if name != "sgd"
        ),
    ]


def optimizers_of(run: RunTheory) -> list[Optimizer]:
    """Optimizers whose updates were summed at every checkpoint of a run."""
    return [name for name in NAMES if all(name in each.optimizers for each in run.checkpoints)]


def own_note(run: RunTheory) -> str:
    """Explanation of the star; empty if the run's optimizer is unknown."""
    if run.own is None:
        return ""
    return f"{OWN_MARK}: the optimizer of the output table{f', {run.member}' if run.member else ''}."


def fits_table(run: RunTheory) -> Numbers:
    """The fits against the unigram probability, and the Theorem."""
    return _table("Fits against the unigram probability, through the origin", run, FITS)


def _table(title: str, run: RunTheory, columns: Sequence[NumberColumn]) -> Numbers:
    rows = [
        [
            short(checkpoint.tokens_seen),
            *(number(column.value(checkpoint), column.exponent_below) for column in columns),
        ]
        for checkpoint in run.checkpoints
    ]
    below = [
        [name, *(spread(of.get(column.summary or ""), column.exponent_below) for column in columns)]
        for name, of in (("mean", run.summary), ("paper", PUBLISHED))
        if any(column.summary in of for column in columns)
    ]
    groups, labels = [column.group for column in columns], [column.label for column in columns]
    return Numbers(title, ["", *groups], ["tokens", *labels], rows, below)


def number(value: float | None, exponent_below: float = 1e-3) -> str:
    """Format with three decimals, and small numbers with an exponent.

    Example:
        >>> number(0.5512), number(2.94e-8), number(0.0), number(None)
        ('0.551', '2.9e-8', '0', '—')
    """
    if value is None:
        return DASH
    return fixed(value, 3) if abs(value) >= exponent_below else scientific(value)


def spread(value: Spread | None, exponent_below: float = 1e-3) -> str:
    """Format a mean and its standard deviation in the paper's notation, with as many digits as the deviation allows.

    Example:
        >>> spread(Spread(0.853, 0.0691)), spread(Spread(0.0031, 0.0012)), spread(Spread(15.2, 3.1))
        ('0.85(7)', '0.003(1)', '15(3)')
        >>> spread(Spread(2.13e-5, 4e-6)), spread(Spread(1e-4, None)), spread(Spread(0.5, None))
        ('2.1(4)e-5', '1.0e-4', '0.500')
    """
    if value is None:
        return DASH
    if value.std is None:
        return number(value.mean, exponent_below)
    if 0 < abs(value.mean) < exponent_below:
        exponent = math.floor(math.log10(abs(value.mean)))
        scale = 10.0**-exponent
        return f"{spread(Spread(value.mean * scale, value.std * scale))}e{exponent}"
    leading = float(f"{value.std:.0e}")  # one digit: 0.0096 counts as 0.01
    decimals = 3 if leading == 0 else min(MOST_DECIMALS, max(0, -math.floor(math.log10(leading))))
    return shorthand(value.mean, value.std, decimals)
