"""The primary comparisons of a study: the test loss of every optimizer against the standard one (AdamW) of its size.

All of them, over all sizes, are one family, and their p-values are corrected by Holm's method. They decide the table
`primary` and what the verdict claims about the loss. All other comparisons of a report are secondary and not corrected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coupled_adam.metrics import METRICS
from coupled_adam.report.baselines import baseline_pairs
from coupled_adam.report.grid import CellRuns, Grid
from coupled_adam.report.significance import CONFIDENCE, Comparison, compare, holm, paired_differences, summarise

LOSS = METRICS["loss"]


@dataclass(frozen=True)
class PrimaryComparison:
    """The losses of one cell against those of a standard one with the same D and model."""

    baseline: CellRuns
    optimizer: CellRuns
    comparison: Comparison
    corrected_p: float | None = None
    """The two-sided p of the paired test, corrected by Holm's method; None with fewer than two common seeds."""

    @property
    def difference(self) -> float | None:
        """Mean of optimizer minus baseline over the common seeds, also if there is only one; None without any."""
        common = paired_differences(self.baseline.values(LOSS.key), self.optimizer.values(LOSS.key))
        return summarise(common).mean

    @property
    def outcome(self) -> Literal["better", "worse", "open", "no claim"]:
        """Outcome of the corrected test for the optimizer; open: no significant difference."""
        difference = self.comparison.paired_difference
        if self.corrected_p is None or difference is None:
            return "no claim"
        if self.corrected_p >= 1 - CONFIDENCE:
            return "open"
        return "better" if difference < 0 else "worse"

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant after the correction."""
        return self.outcome in ("better", "worse")


def primary_comparisons(grid: Grid) -> list[PrimaryComparison]:
    """Compare every optimizer with every baseline of its D and model, also those that cannot be tested."""
    found = []
    for place in grid.places:
        for first, second in baseline_pairs(place.cells):
            baseline, cell = place.cells[first], place.cells[second]
            compared = compare(baseline.values(LOSS.key), cell.values(LOSS.key), LOSS.better)
            found.append(PrimaryComparison(baseline, cell, compared))
    return as_one_family(found)


def as_one_family(comparisons: Sequence[PrimaryComparison]) -> list[PrimaryComparison]:
    """Correct the p-values of all these comparisons by Holm's method; those that cannot be tested stay without one."""
    found = list(comparisons)
    tested = [number for number, each in enumerate(found) if each.comparison.paired_two_sided_p is not None]
    corrected = holm([found[number].comparison.paired_two_sided_p or 0.0 for number in tested])
    for number, p in zip(tested, corrected, strict=True):
        found[number] = replace(found[number], corrected_p=p)
    return found


def corrected_count(comparisons: Sequence[PrimaryComparison]) -> int:
    """Number of comparisons that the correction covers."""
    return sum(each.corrected_p is not None for each in comparisons)
