"""The two sentences on a study: the first about the loss, the second about the embeddings.

They claim only what a test supports: nothing with one seed, and if Coupled Adam is worse, they say so. The primary
comparisons decide about the loss of a pair with an AdamW baseline, the paper's test about everything else. The
sentences on more than two optimizers are in several_optimizers.py. A *size* is one combination of dataset size D and
model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coupled_adam.base.text import percent
from coupled_adam.inspection.plain_sentence import CENTRED_BELOW
from coupled_adam.metrics import METRICS, Lead
from coupled_adam.report.significance import Comparison, Summary

Outcome = Literal["better", "worse", "open", "mixed", "no claim"]
TablePrefix = Literal["", "output "]
"""Put before the word "embeddings": for an untied model, those of the output table."""
LEVEL = "significant at 95%"
PAPERS_TEST = ", by the paper's one-sided test"
"""Added to a claim about the loss that the primary comparisons do not cover."""
COMBINATIONS = "combinations of data and model size"
MOST_NAMED = 6
"""Longer lists of sizes or optimizers are only counted: the tables have them."""
LOSS_WORDS: dict[Outcome, tuple[str, str]] = {
    "better": ("significantly lower", "than"),
    "worse": ("significantly higher", "than"),
    "open": ("not significantly different", "from"),
    "no claim": ("untested for lack of seeds", ""),  # never the first of several
}
"""Description of a loss, and the preposition before what it is compared with."""


@dataclass(frozen=True)
class SizedComparison:
    """The comparison of a pair at one size, and what it shows."""

    size: str
    """Such as "82M tokens, 30M"."""
    comparison: Comparison
    outcome: Outcome
    is_paired: bool = False
    """Whether the outcome is that of runs with the same seed."""


class Claim(NamedTuple):
    """One of the two sentences of a verdict."""

    outcome: Outcome
    sentence: str
    note: str
    """Caveat for the reader, or empty."""


@dataclass(frozen=True)
class Verdict:
    """The verdict of a study."""

    outcome: Outcome
    """For the loss: significantly better or worse at all sizes, open at all sizes, mixed, or no claim because there are
    too few seeds."""
    loss: str
    """The sentence about the loss."""
    embeddings: str
    """The sentence about the embeddings."""
    embeddings_outcome: Outcome = "no claim"
    """The same for the mean-embedding ratio; no claim for more than two optimizers."""
    lead: Lead = "loss"
    """Which sentence comes first."""
    loss_note: str = ""
    """Caveat after the sentence about the loss."""

    @property
    def claims(self) -> list[Claim]:
        """Both sentences, in their order."""
        both = [Claim(self.outcome, self.loss, self.loss_note), Claim(self.embeddings_outcome, self.embeddings, "")]
        return both if self.lead == "loss" else both[::-1]

    @property
    def text(self) -> str:
        """The whole verdict as one paragraph."""
        return " ".join(part for claim in self.claims for part in (claim.sentence, claim.note) if part)


def verdict_of_pair(
    first: str,
    second: str,
    losses: Sequence[SizedComparison],
    ratios: Sequence[SizedComparison],
    loss: str = METRICS["loss"].label,
    table: TablePrefix = "",
    test: str = "",
) -> Verdict:
    """Write the verdict on one optimizer against another.

    Args:
        first: name of the baseline, such as "standard Adam".
        second: name of the optimizer compared with it.
        losses: one comparison per size.
        ratios: the mean-embedding ratios, likewise.
        loss: name of the loss.
        table: prefix of the measured embeddings.
        test: added to the level of claims about the loss, such as `PAPERS_TEST`.
    """
    outcome, of_ratios = (overall([each.outcome for each in compared]) for compared in (losses, ratios))
    sentence = _loss_sentence(first, second, losses, loss, test)
    return Verdict(outcome, sentence, _ratio_sentence(first, second, ratios, table), of_ratios)


def overall(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of all comparisons together."""
    return "no claim" if not outcomes else outcomes[0] if len(set(outcomes)) == 1 else "mixed"


def _loss_sentence(first: str, second: str, losses: Sequence[SizedComparison], name: str, test: str) -> str:
    if not losses:
        return f"The {name} was not measured for both {first} and {second}."
    if len(losses) > 1:
        return _loss_over_sizes(first, second, losses, name, test)
    loss = losses[0].comparison
    new, old = shown_loss(loss.second), shown_loss(loss.first)
    seeds = _seeds(losses[0])
    subject = _at_start(second)
    significant = f"{new} against {old}, {LEVEL} over {seeds}{test}"
    match losses[0].outcome:
        case "better":
            return f"{subject} reaches a lower {name} than {first}: {significant}."
        case "worse":
            return f"{subject} reaches a higher {name} than {first}: {significant}."
        case "open":
            return (
                f"The {name}es of {second} ({new}) and {first} ({old}) do not differ significantly at 95% over "
                f"{seeds}{test}."
            )
        case _:
            return f"With {seeds} nothing can be claimed about the {name}: {new} with {second}, {old} with {first}."


def _loss_over_sizes(first: str, second: str, losses: Sequence[SizedComparison], name: str, test: str) -> str:
    total = len(losses)
    sizes = _sizes_by_outcome(losses)
    if set(sizes) == {"no claim"}:
        lower = sum((each.comparison.difference or 0.0) < 0 for each in losses)
        seeds = {_seeds(each) for each in losses}
        few = seeds.pop() if len(seeds) == 1 else "so few seeds"
        return (
            f"With {few} nothing can be claimed; the {name} of {second} is below that of {first} in {lower} of {total} "
            f"{COMBINATIONS}."
        )
    parts: list[str] = []
    for outcome in (each for each in LOSS_WORDS if each in sizes):
        words, against = LOSS_WORDS[outcome]
        if not parts:  # the baseline is named once
            words = f"{words} {against} that of {first}"
        parts.append(f"{words} in {_count_of_sizes(sizes[outcome], total, COMBINATIONS if not parts else '')}")
    level = f" (at 95%{test})" if len(parts) == 1 else f"; tested at 95%{test}"
    return f"The {name} of {second} is {enumerated(parts)}{level}."


def _sizes_by_outcome(compared: Sequence[SizedComparison]) -> dict[Outcome, list[str]]:
    found: dict[Outcome, list[str]] = {}
    for each in compared:
        found.setdefault(each.outcome, []).append(each.size)
    return found


def _count_of_sizes(sizes: Sequence[str], total: int, noun: str) -> str:
    """Such as "all 3 combinations", "1 of 2 combinations (at 82M tokens, 30M)", or with an empty noun "1 (at ...)"."""
    if len(sizes) == total:
        return f"{all_of(total)} {noun}".rstrip()
    count = f"{len(sizes)} of {total} {noun}" if noun else f"{len(sizes)}"
    return f"{count} (at {'; '.join(sizes)})" if len(sizes) <= MOST_NAMED else count


def _ratio_sentence(first: str, second: str, ratios: Sequence[SizedComparison], table: TablePrefix) -> str:
    if not ratios:
        return "The embeddings were not measured."
    new = _range([ratio.comparison.mean1 for ratio in ratios])
    old = _range([ratio.comparison.mean0 for ratio in ratios])
    centred = all((ratio.comparison.mean1 or 0.0) < CENTRED_BELOW for ratio in ratios)
    has_length = f"mean {table}embedding has {new} of a typical embedding's length, against {old} with {first}"
    total = len(ratios)
    sizes = _sizes_by_outcome(ratios)
    outcome = overall([ratio.outcome for ratio in ratios])
    if outcome == "no claim":
        return f"With {second} the {has_length}; there are too few seeds to test this."
    if outcome == "better":
        where = "stay centred at the origin" if centred else "lie closer to the origin"
        certain = LEVEL if total == 1 else f"{LEVEL} in {all_of(total)}"
        return f"The {table}embeddings of {second} {where}: its {has_length}, {certain}."
    if outcome == "worse":
        return f"The {table}embeddings of {second} lie farther from the origin: its {has_length}, {LEVEL}."
    if outcome == "open":
        return f"The {table}embeddings of {second} are not significantly closer to the origin at 95%: its {has_length}."
    words: dict[Outcome, str] = {
        "better": "significantly closer to the origin",
        "worse": "significantly farther from it" if "better" in sizes else "significantly farther from the origin",
        "open": "not significantly closer"
        if "better" in sizes or "worse" in sizes
        else "not significantly closer to the origin",
        "no claim": LOSS_WORDS["no claim"][0],
    }
    parts: list[str] = []
    for each in (outcome for outcome in words if outcome in sizes):
        parts.append(f"{words[each]} in {_count_of_sizes(sizes[each], total, 'sizes' if not parts else '')}")
    return f"The {table}embeddings of {second} are {enumerated(parts)}: its {has_length}."


def _range(ratios: Sequence[float | None]) -> str:
    values = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def shown_loss(summary: Summary) -> str:
    """Mean and standard deviation of a loss."""
    assert summary.mean is not None
    return METRICS["loss"].mean_text(summary.mean, summary.std, summary.count)


def _seeds(compared: SizedComparison) -> str:
    first, second = compared.comparison.first.count, compared.comparison.second.count
    pairs = compared.comparison.pairs
    if compared.is_paired and min(first, second) > 1 and {first, second} != {pairs}:
        return "fewer than two common seeds" if pairs < 2 else f"{pairs} common seeds"
    if first != second:
        return f"{first} and {second} seeds"
    return "one seed each" if first == 1 else f"{first} seeds each"


def all_of(count: int) -> str:
    """Such as "both" or "all 3"."""
    return "both" if count == 2 else f"all {count}"


def enumerated(parts: Sequence[str]) -> str:
    """Join with commas and a final "and"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _at_start(name: str) -> str:
    """Capitalise the name of an optimizer, for the start of a sentence."""
    return name[:1].upper() + name[1:]
