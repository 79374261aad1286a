"""Losses and ratios of a few seeds, and their verdict."""

from coupled_adam.report.significance import compare
from coupled_adam.report.verdict_sentences import SizedComparison, Verdict, verdict_of_pair

OLD, NEW = "standard Adam", "Coupled Adam"
LOW, HIGH, NEAR_HIGH = [3.01, 3.02, 3.03], [3.10, 3.11, 3.12], [3.09, 3.11, 3.13]
BEATEN, OTHER_BEATEN = {"a": LOW, "b": HIGH, "c": HIGH}, {"a": HIGH, "b": LOW, "c": HIGH}
UNCLEAR = {"a": LOW, "b": LOW, "c": HIGH}
RATIO_LOW, RATIO_HIGH = [0.01, 0.02, 0.03], [0.84, 0.85, 0.86]
Pair = tuple[list[float], list[float]]


def losses(*pairs: Pair) -> list[SizedComparison]:
    """One comparison per size, by the paper's test; the sizes are 1B tokens, 2B tokens and so on."""
    compared = [compare(old, new, "lower") for old, new in pairs]
    return [SizedComparison(f"{place}B tokens, S", each, each.outcome) for place, each in enumerate(compared, 1)]


CENTRED = losses((RATIO_HIGH, RATIO_LOW))


def pair(*pairs: Pair, ratios: list[SizedComparison] = CENTRED) -> Verdict:
    return verdict_of_pair(OLD, NEW, losses(*pairs), ratios)
