"""Findings of a run for each step of the paper's argument: a sentence, the numbers, the figures.

The page states the claims. The sentences here are computed from the numbers, so they also report contradictions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coupled_adam.base.text import fixed
from coupled_adam.metrics import METRICS
from coupled_adam.theory.record import OPTIMIZERS, PUBLISHED, RunTheory
from coupled_adam.theory.theory_numbers import number, optimizers_of, spread

if TYPE_CHECKING:  # needs matplotlib, but the terminal uses the sentences too
    from coupled_adam.base.captioned_figure import CaptionedFigure

PARTS_OF_OWN = ("output", "total")
VANISHES = 2e-3
"""Smaller relative sums count as zero: rounding leaves about 1e-8 in float32 and 1e-3 in bf16."""


@dataclass(frozen=True)
class Fact:
    """One key number."""

    value: str
    label: str
    paper: str | None = None
    """The paper's value."""


@dataclass(frozen=True)
class Chapter:
    """Measurements for one step of the argument."""

    finding: str
    facts: Sequence[Fact]
    figures: "Sequence[CaptionedFigure]"


def findings(run: RunTheory) -> list[str]:
    """Three sentences: whether the expected sums vanish, where the rest comes from, and how well a line fits."""
    return [sentence for sentence, _ in (_updates(run), _tying(run), _second_moment(run))]


def chapters(run: RunTheory, figures: "Mapping[str, CaptionedFigure]") -> dict[str, Chapter]:
    """The chapters of the page by name.

    Args:
        run: with at least one checkpoint.
        figures: from `run_figures.draw_run_figures`.
    """
    told = {
        "gradients": (_gradients(run), ("gradients_example", "gradient_sums")),
        "updates": (_updates(run), ("update_sums",)),
        "tying": (_tying(run), ()),
        "second_moment": (_second_moment(run), ("prior", "second_moment", "second_moment_constant")),
        "derivation": (_derivation(run), ("theorem", "conditional_expectations")),
    }
    return {
        name: Chapter(finding, facts, [figures[each] for each in shown])
        for name, ((finding, facts), shown) in told.items()
    }


def _gradients(run: RunTheory) -> tuple[str, list[Fact]]:
    identity = max(each.identity_error for each in run.checkpoints)
    largest = max(value for each in run.checkpoints for value in each.gradient_sums["output"])
    verdict = "it vanishes up to rounding" if largest < VANISHES else "it does not vanish"
    finding = (
        f"In every batch of every checkpoint the sum is at most {number(largest)} of the sum of the lengths: {verdict}."
    )
    return finding, [
        Fact(number(identity), "largest relative difference between the formula and autograd, in float64"),
        Fact(number(largest), "largest sum of output-layer gradients, relative to their lengths"),
    ]


def _updates(run: RunTheory) -> tuple[str, list[Fact]]:
    sgd, adam, coupled = (max(each.update(name).output for each in run.checkpoints) for name in OPTIMIZERS)
    verdict = "as claimed" if sgd < VANISHES and coupled < VANISHES < adam else "not as claimed"
    finding = (
        f"Through the output layer the sum of updates is at most {number(sgd)} of the sum of the lengths for SGD, "
        f"{number(adam)} for Adam and {number(coupled)} for Coupled Adam: {verdict}."
    )
    facts = [
        Fact(number(sgd), "SGD: largest sum of updates, output layer's part"),
        Fact(number(adam), "Adam: the same"),
        Fact(number(coupled), "Coupled Adam: the same"),
    ]
    if "own" in optimizers_of(run):
        output, total = (max(getattr(each.update("own"), part) for each in run.checkpoints) for part in PARTS_OF_OWN)
        finding += (
            f" This run was trained with another member of the family, {run.member}: its sum is at most "
            f"{number(output)} through the output layer, and {number(total)} over the whole update."
        )
        facts.append(Fact(number(total), f"{run.member}, the run's own: largest sum of whole updates"))
    return finding, facts


def _tying(run: RunTheory) -> tuple[str, list[Fact]]:
    first, last = run.checkpoints[0].mu_norm, run.checkpoints[-1].mu_norm
    # All digits of float32: if the sum vanishes, the mean does not move at all.
    shift = Fact(
        f"{fixed(first, 7)} to {fixed(last, 7)}",
        f"{METRICS['mu_norm'].symbol} of this run, trained with {run.trained_with}: first to last checkpoint",
    )
    coupled = [each.update("coupled") for each in run.checkpoints]
    smallest, largest = min(each.total for each in coupled), max(each.total for each in coupled)
    if not run.tied:
        finding = (
            "This model is not tied, so its output table has no such part: Coupled Adam's whole sum is at most "
            f"{number(largest)} of the sum of the lengths."
        )
        return finding, [Fact(number(largest), "Coupled Adam: largest sum of updates"), shift]
    output, through_input = max(each.output for each in coupled), max(each.input for each in coupled)
    is_confirmed = output < VANISHES and output < 0.01 * through_input
    verdict = (
        "All of it comes through the input layer, as the hypothesis says; the output layer's part is rounding."
        if is_confirmed
        else "Not all of it comes through the input layer, so the hypothesis does not hold here."
    )
    adam = run.checkpoints[-1].update("adam")
    finding = (
        f"Coupled Adam's whole sum is {number(smallest)} to {number(largest)} of the sum of the lengths. {verdict}"
    )
    return finding, [
        Fact(number(through_input), "Coupled Adam: largest part of the input layer"),
        Fact(number(output), "Coupled Adam: largest part of the output layer"),
        Fact(number(adam.input), f"Adam, last checkpoint: part of the input layer; the whole is {number(adam.total)}"),
        shift,
    ]


def _second_moment(run: RunTheory) -> tuple[str, list[Fact]]:
    r2 = _fact(run, "second_moment_r2", "R² of the fit")
    finding = (
        "A line through the origin fits the second moment against the unigram probability with R² = "
        f"{r2.value}; the paper reports {r2.paper}."
    )
    return finding, [
        r2,
        _fact(run, "second_moment_mutual_information", "mutual information in nats"),
        _fact(run, "second_moment_A", "A", exponent_below=0.1),
    ]


def _derivation(run: RunTheory) -> tuple[str, list[Fact]]:
    rows = _fact(run, "theorem_r2", "Theorem: R² of rows, averaged over the width")
    elements = _fact(run, "theorem_elements_r2", "Theorem: R² of all elements")
    x_true, x_false = _fact(run, "x_true_r2", "X(i=t): R²"), _fact(run, "x_false_r2", "X(i≠t): R²")
    finding = (
        f"The right-hand side gives the measured squared gradients with R² = {rows.value} averaged over the width, and "
        f"{elements.value} element by element. A line through the origin fits X(i=t) with R² = {x_true.value} (paper: "
        f"{x_true.paper}) and X(i≠t) with R² = {x_false.value} (paper: {x_false.paper})."
    )
    return finding, [
        rows,
        elements,
        x_true,
        _fact(run, "x_true_mutual_information", "X(i=t): mutual information"),
        x_false,
        _fact(run, "x_false_mutual_information", "X(i≠t): mutual information"),
    ]


def _fact(run: RunTheory, name: str, label: str, exponent_below: float = 1e-3) -> Fact:
    """Mean and spread over the checkpoints, and the paper's."""
    paper = spread(PUBLISHED[name]) if name in PUBLISHED else None
    return Fact(spread(run.summary.get(name), exponent_below), label, paper)
