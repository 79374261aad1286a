"""The two sentences on a study: the first about the loss, the second about the embeddings.

They claim only what the paper's test supports: nothing with one seed, and if Coupled Adam is worse, they say so. A
*size* is one combination of dataset size D and model.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coupled_adam.base.text import percent
from coupled_adam.inspection.plain_sentence import CENTRED_BELOW
from coupled_adam.metrics import METRICS, Lead
from coupled_adam.report.significance import Comparison, Summary, Values, as_list, compare, summarise

Outcome = Literal["better", "worse", "open", "mixed", "no claim"]
TablePrefix = Literal["", "output "]
"""Put before the word "embeddings": for an untied model, those of the output table."""
LEVEL = "significant at 95%"
COMBINATIONS = "combinations of data and model size"
LOSS_WORDS: dict[Outcome, tuple[str, str]] = {
    "better": ("significantly lower", "than"),
    "worse": ("significantly higher", "than"),
    "open": ("not significantly different", "from"),
    "no claim": ("untested for lack of seeds", ""),  # never the first of several
}
"""Description of a loss, and the preposition before what it is compared with."""


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
    losses: Sequence[Comparison],
    ratios: Sequence[Comparison],
    loss: str = METRICS["loss"].label,
    table: TablePrefix = "",
) -> Verdict:
    """Write the verdict on one optimizer against another.

    Args:
        first: name of the baseline, such as "standard Adam".
        second: name of the optimizer compared with it.
        losses: one comparison per size.
        ratios: the mean-embedding ratios, likewise.
        loss: name of the loss.
        table: prefix of the measured embeddings.
    """
    outcomes: list[Outcome] = [comparison.outcome for comparison in losses]
    sentence = _loss_sentence(first, second, losses, outcomes, loss)
    of_ratios = _overall([comparison.outcome for comparison in ratios])
    return Verdict(_overall(outcomes), sentence, _ratio_sentence(first, second, ratios, table), of_ratios)


def _overall(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome over all sizes."""
    return "no claim" if not outcomes else outcomes[0] if len(set(outcomes)) == 1 else "mixed"


def verdict_of_many(
    losses: Sequence[Mapping[str, Values]],
    ratios: Sequence[Mapping[str, Values]],
    loss: str = METRICS["loss"].label,
    table: TablePrefix = "",
) -> Verdict:
    """Write the verdict on more than two optimizers, such as all scale exponents of an ablation.

    Args:
        losses: for each size, the losses of every optimizer by name.
        ratios: the mean-embedding ratios, likewise.
        loss: name of the loss.
        table: prefix of the measured embeddings.
    """
    lowest = [_lowest_of(size) for size in losses if len(_summaries(size)) > 1]
    embeddings = _ratio_range(ratios, table)
    if not lowest:
        return Verdict("no claim", f"The {loss} was not measured.", embeddings)
    text = _lowest_at_one_size(lowest[0], loss) if len(lowest) == 1 else _lowest_over_sizes(lowest, loss)
    if not any(each.is_tested for each in lowest):
        return Verdict("no claim", text, embeddings)
    if all(each.higher == each.others for each in lowest) and len({each.name for each in lowest}) == 1:
        return Verdict("better", text, embeddings)
    return Verdict("open" if len(lowest) == 1 else "mixed", text, embeddings)


def _summaries(size: Mapping[str, Values]) -> dict[str, Summary]:
    """Summaries of the optimizers measured at this size."""
    summaries = {name: summarise(as_list(values)) for name, values in size.items()}
    return {name: summary for name, summary in summaries.items() if summary.mean is not None}


@dataclass(frozen=True)
class _Lowest:
    """The optimizer with the lowest mean loss at one size, and its comparison with the others."""

    name: str
    summary: Summary
    others: int
    """Number of other optimizers."""
    higher: int
    """Number of others that are significantly higher."""
    untested: int
    """Number of others that cannot be tested, because they or the lowest have one seed."""
    seeds_of_others: int
    """Largest number of seeds of another optimizer."""

    @property
    def is_tested(self) -> bool:
        """Whether any other can be tested."""
        return self.untested < self.others

    @property
    def is_clear(self) -> bool:
        """Whether it is significantly lower than all testable others."""
        return self.is_tested and self.higher == self.others - self.untested


def _lowest_of(size: Mapping[str, Values]) -> _Lowest:
    summaries = _summaries(size)
    best = min(summaries, key=lambda name: summaries[name].mean or 0.0)
    claims = [compare(size[name], size[best], "lower").significant for name in summaries if name != best]
    most = max(summary.count for name, summary in summaries.items() if name != best)
    return _Lowest(best, summaries[best], len(claims), claims.count(True), claims.count(None), most)


def _lowest_at_one_size(lowest: _Lowest, loss: str) -> str:
    text = f"Of {lowest.others + 1} optimizers, {lowest.name} has the lowest {loss}, {_shown(lowest.summary, 'loss')}"
    if lowest.is_tested:
        text += f": {_share(lowest.higher, lowest.others, 'other')} significantly higher at 95%"
        if lowest.untested:
            text += f", {lowest.untested} cannot be tested (one seed{' each' if lowest.untested > 1 else ''})"
        return f"{text}."
    if lowest.summary.count > 1:
        return f"{text}; the others have one seed each, so nothing can be claimed."
    if lowest.seeds_of_others > 1:
        return f"{text}; it has one seed, so nothing can be claimed."
    return f"{text}; with one seed each, nothing can be claimed."


def _lowest_over_sizes(lowest: Sequence[_Lowest], loss: str) -> str:
    """Describe how often each optimizer has the lowest loss, and how often significantly."""
    tested, clear = sum(each.is_tested for each in lowest), sum(each.is_clear for each in lowest)
    some_have_one = any(each.untested for each in lowest if each.is_tested)
    rivals = "all others with more than one seed" if some_have_one else "all others"
    claims = False
    if not tested:
        single = all(each.summary.count == each.seeds_of_others == 1 for each in lowest)
        end = f"; with {'one seed each' if single else 'so few seeds'}, nothing can be claimed"
    elif clear == len(lowest):
        end = f", each time significantly lower than {rivals} (at 95%)"
    elif clear == 0 and tested == len(lowest):
        end = f", nowhere significantly lower than {rivals} (at 95%)"
    else:
        claims, end = True, f"; significantly: at 95%, lower than {rivals}"
    parts: list[str] = []
    for name, count in Counter(each.name for each in lowest).most_common():
        where = _all(count) if count == len(lowest) else str(count)
        part = f"{name} in {where}" if parts else f"{name} has the lowest {loss} in {where}"
        own = [each for each in lowest if each.name == name]
        parts.append(f"{part} ({_claims(own)})" if claims else part)
    return f"Over {len(lowest)} {COMBINATIONS}, {_enumerated(parts)}{end}."


def _claims(lowest: Sequence[_Lowest]) -> str:
    """Short description of the claims about one optimizer at the sizes where it is the lowest."""
    clear, untested = sum(each.is_clear for each in lowest), sum(not each.is_tested for each in lowest)

    def counted(words: str, count: int) -> str:
        return words if count == len(lowest) else f"{words} in {count}"

    parts = [counted("significantly", clear)] if clear else ["not significantly"] if untested < len(lowest) else []
    return ", ".join([*parts, counted("no claim", untested) + " for lack of seeds"] if untested else parts)


def _loss_sentence(
    first: str, second: str, losses: Sequence[Comparison], outcomes: Sequence[Outcome], name: str
) -> str:
    if not losses:
        return f"The {name} was not measured for both {first} and {second}."
    if len(losses) > 1:
        return _loss_over_sizes(first, second, losses, outcomes, name)
    loss = losses[0]
    new, old = _shown(loss.second, "loss"), _shown(loss.first, "loss")
    seeds = _seeds(loss)
    subject = _at_start(second)
    match outcomes[0]:
        case "better":
            return f"{subject} reaches a lower {name} than {first}: {new} against {old}, {LEVEL} over {seeds}."
        case "worse":
            return f"{subject} reaches a higher {name} than {first}: {new} against {old}, {LEVEL} over {seeds}."
        case "open":
            return (
                f"The {name}es of {second} ({new}) and {first} ({old}) do not differ significantly at 95% over {seeds}."
            )
        case _:
            return f"With {seeds} nothing can be claimed about the {name}: {new} with {second}, {old} with {first}."


def _loss_over_sizes(
    first: str, second: str, losses: Sequence[Comparison], outcomes: Sequence[Outcome], name: str
) -> str:
    total = len(losses)
    if set(outcomes) == {"no claim"}:
        lower = sum((loss.difference or 0.0) < 0 for loss in losses)
        seeds = {_seeds(loss) for loss in losses}
        few = seeds.pop() if len(seeds) == 1 else "so few seeds"
        return (
            f"With {few} nothing can be claimed; the {name} of {second} is below that of {first} in {lower} of {total} "
            f"{COMBINATIONS}."
        )
    counts = Counter(outcomes)
    found = [outcome for outcome in LOSS_WORDS if counts[outcome]]
    parts = []
    for outcome in found:
        is_first = outcome == found[0]
        words, against = LOSS_WORDS[outcome]
        if is_first:  # the baseline is named once
            words = f"{words} {against} that of {first}"
        if counts[outcome] == total:
            where = f"{_all(total)} {COMBINATIONS}"
        else:
            where = f"{counts[outcome]} of {total} {COMBINATIONS}" if is_first else f"{counts[outcome]}"
        parts.append(f"{words} in {where}")
    return f"The {name} of {second} is {_enumerated(parts)} (at 95%)."


def _ratio_sentence(first: str, second: str, ratios: Sequence[Comparison], table: TablePrefix) -> str:
    if not ratios:
        return "The embeddings were not measured."
    new = _range([ratio.mean1 for ratio in ratios])
    old = _range([ratio.mean0 for ratio in ratios])
    centred = all((ratio.mean1 or 0.0) < CENTRED_BELOW for ratio in ratios)
    has_length = f"mean {table}embedding has {new} of a typical embedding's length, against {old} with {first}"
    total = len(ratios)
    counts: Counter[Outcome] = Counter(ratio.outcome for ratio in ratios)
    if counts["no claim"] == total:
        return f"With {second} the {has_length}; there are too few seeds to test this."
    if counts["better"] == total:
        where = "stay centred at the origin" if centred else "lie closer to the origin"
        certain = LEVEL if total == 1 else f"{LEVEL} in {_all(total)}"
        return f"The {table}embeddings of {second} {where}: its {has_length}, {certain}."
    if counts["worse"] == total:
        return f"The {table}embeddings of {second} lie farther from the origin: its {has_length}, {LEVEL}."
    if counts["open"] == total:
        return f"The {table}embeddings of {second} are not significantly closer to the origin at 95%: its {has_length}."
    words: dict[Outcome, str] = {
        "better": "significantly closer to the origin",
        "worse": "significantly farther from it" if counts["better"] else "significantly farther from the origin",
        "open": "not significantly closer"
        if counts["better"] or counts["worse"]
        else "not significantly closer to the origin",
    }
    found = [outcome for outcome in words if counts[outcome]]
    parts = [
        f"{words[outcome]} in {counts[outcome]}{f' of {total}' if outcome == found[0] else ''}" for outcome in found
    ]
    unclaimed = f" (no claim in {counts['no claim']})" if counts["no claim"] else ""
    return f"The {table}embeddings of {second} are {_enumerated(parts)}{unclaimed}: its {has_length}."


def _ratio_range(ratios: Sequence[Mapping[str, Values]], table: TablePrefix) -> str:
    """Describe the lowest and highest mean-embedding ratio among the optimizers' means over all sizes."""
    means: dict[str, list[float]] = {}
    for size in ratios:
        for name, summary in _summaries(size).items():
            means.setdefault(name, []).append(summary.mean or 0.0)
    if not means:
        return "The embeddings were not measured."
    over_sizes = {name: sum(values) / len(values) for name, values in means.items()}
    low, high = min(over_sizes, key=lambda name: over_sizes[name]), max(over_sizes, key=lambda name: over_sizes[name])
    lowest, highest = percent(over_sizes[low]), percent(over_sizes[high])
    has = f"mean {table}embedding has"
    of_length = "of a typical embedding's length; 0% means centred at the origin."
    if lowest == highest:
        return f"With every optimizer, the {has} {lowest} {of_length}"
    return f"The {has} {lowest} ({low}) to {highest} ({high}) {of_length}"


def _range(ratios: Sequence[float | None]) -> str:
    values = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def _shown(summary: Summary, metric: str) -> str:
    assert summary.mean is not None
    return METRICS[metric].mean_text(summary.mean, summary.std, summary.count)


def _seeds(comparison: Comparison) -> str:
    first, second = comparison.first.count, comparison.second.count
    if first != second:
        return f"{first} and {second} seeds"
    return "one seed each" if first == 1 else f"{first} seeds each"


def _share(part: int, whole: int, noun: str) -> str:
    """Such as "all 10 others are", "3 of the 10 others are", "none of the 10 others is"."""
    if whole == 1:
        return f"the {noun} is" if part else f"the {noun} is not"
    if part == whole:
        return f"{_all(whole)} {noun}s are"
    return f"{part or 'none'} of the {whole} {noun}s {'is' if part < 2 else 'are'}"


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {count}"


def _enumerated(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _at_start(name: str) -> str:
    """Capitalise the name of an optimizer, for the start of a sentence."""
    return name[:1].upper() + name[1:]
