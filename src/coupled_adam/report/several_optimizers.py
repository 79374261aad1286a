"""The two sentences on more than two optimizers: the lowest loss and what is certain about it, and the embeddings.

With an AdamW baseline the primary comparisons decide, and only comparisons with the baseline are claimed. Without one,
the lowest loss is compared with all others by the paper's test.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coupled_adam.base.text import percent
from coupled_adam.metrics import METRICS
from coupled_adam.report.significance import Summary, Values, as_list, compare, summarise
from coupled_adam.report.verdict_sentences import (
    COMBINATIONS,
    MOST_NAMED,
    PAPERS_TEST,
    Outcome,
    TablePrefix,
    Verdict,
    all_of,
    enumerated,
    overall,
    shown_loss,
)

AGAINST_BASELINE: dict[Outcome, str] = {
    "better": "significantly lower",
    "worse": "significantly higher",
    "open": "not significantly different",
    "no claim": "untested for lack of common seeds",
}


@dataclass(frozen=True)
class AgainstBaseline:
    """One optimizer against the AdamW baseline of its size."""

    size: str
    """Such as "82M tokens, 30M"."""
    baseline: str
    optimizer: str
    outcome: Outcome


def verdict_against_baseline(
    losses: Sequence[Mapping[str, Values]],
    ratios: Sequence[Mapping[str, Values]],
    compared: Sequence[AgainstBaseline],
    loss: str = METRICS["loss"].label,
    table: TablePrefix = "",
    test: str = "",
) -> Verdict:
    """Write the verdict on several optimizers compared with an AdamW baseline.

    Args:
        losses: for each size, the losses of every optimizer by name.
        ratios: the mean-embedding ratios, likewise.
        compared: the primary comparisons with the baseline of each size, at least one.
        loss: name of the loss.
        table: prefix of the measured embeddings.
        test: added to the level of the claims, such as ", corrected for 4 comparisons".
    """
    measured = [size for size in losses if len(_summaries(size)) > 1]
    lowest = [_lowest_of(size) for size in measured]
    outcome = overall([each.outcome for each in compared])
    names = list(dict.fromkeys(each.baseline for each in compared))
    baseline = names[0] if len(names) == 1 else "the best AdamW baseline of each size"
    text = _who_is_lowest(lowest, loss)
    if outcome != "no claim":
        if len(lowest) == 1:
            shown = shown_loss(_summaries(measured[0])[baseline])
            baseline = "it" if lowest[0].name == baseline else f"{baseline} at {shown}"
        text += f". Compared with {baseline}, {_against_baseline(compared, len(lowest))}; tested at 95%{test}."
    elif all(summary.count == 1 for size in measured for summary in _summaries(size).values()):
        text += "; with one seed each, nothing can be claimed."
    else:
        text += f"; no other optimizer shares two seeds with {baseline}, so nothing can be claimed."
    return Verdict(outcome, text, _ratio_range(ratios, table))


def _against_baseline(compared: Sequence[AgainstBaseline], sizes: int) -> str:
    """Such as "a and b are significantly lower and c is not significantly different"."""
    groups: dict[Outcome, dict[str, list[str]]] = {}  # outcome -> optimizer -> sizes
    for outcome in AGAINST_BASELINE:
        for each in compared:
            if each.outcome == outcome:
                groups.setdefault(outcome, {}).setdefault(each.optimizer, []).append(each.size)
    is_short = sum(len(group) for group in groups.values()) <= MOST_NAMED
    parts: list[str] = []
    for outcome, group in groups.items():
        count = len(group)
        if is_short:
            subject = enumerated([name + _places(of_one, sizes) for name, of_one in group.items()])
        else:
            count = sum(len(of_one) for of_one in group.values())
            subject = str(count) if parts else f"{count} of {len(compared)} losses"
        parts.append(f"{subject} {'are' if count > 1 else 'is'} {AGAINST_BASELINE[outcome]}")
    return enumerated(parts)


def _places(claimed: Sequence[str], sizes: int) -> str:
    """The sizes of a claim in parentheses; empty for a study of one size."""
    if sizes == 1:
        return ""
    return f" ({all_of(sizes)} sizes)" if len(claimed) == sizes else f" (at {'; '.join(claimed)})"


def verdict_of_many(
    losses: Sequence[Mapping[str, Values]],
    ratios: Sequence[Mapping[str, Values]],
    loss: str = METRICS["loss"].label,
    table: TablePrefix = "",
) -> Verdict:
    """Write the verdict on more than two optimizers without a baseline, such as all scale exponents of an ablation.

    The lowest loss is compared with all others by the paper's test.

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
    """Find the lowest mean loss at one size with more than one measured optimizer."""
    summaries = _summaries(size)
    best = min(summaries, key=lambda name: summaries[name].mean or 0.0)
    claims = [compare(size[name], size[best], "lower").significant for name in summaries if name != best]
    most = max(summary.count for name, summary in summaries.items() if name != best)
    return _Lowest(best, summaries[best], len(claims), claims.count(True), claims.count(None), most)


def _lowest_at_one_size(lowest: _Lowest, loss: str) -> str:
    text = _who_is_lowest([lowest], loss)
    if lowest.is_tested:
        text += f": {_share(lowest.higher, lowest.others, 'other')} significantly higher at 95%{PAPERS_TEST}"
        if lowest.untested:
            text += f"; {lowest.untested} cannot be tested (one seed{' each' if lowest.untested > 1 else ''})"
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
    claims: Mapping[str, str] = {}
    if not tested:
        single = all(each.summary.count == each.seeds_of_others == 1 for each in lowest)
        end = f"; with {'one seed each' if single else 'so few seeds'}, nothing can be claimed"
    elif clear == len(lowest):
        end = f", each time significantly lower than {rivals} (at 95%{PAPERS_TEST})"
    elif clear == 0 and tested == len(lowest):
        end = f", nowhere significantly lower than {rivals} (at 95%{PAPERS_TEST})"
    else:
        names = {each.name for each in lowest}
        claims = {name: f" ({_claims([each for each in lowest if each.name == name])})" for name in names}
        end = f"; significantly: lower than {rivals} at 95%{PAPERS_TEST}"
    return f"{_who_is_lowest(lowest, loss, claims)}{end}."


def _who_is_lowest(lowest: Sequence[_Lowest], loss: str, claims: Mapping[str, str] | None = None) -> str:
    """Start a sentence: the optimizer with the lowest loss, or how often each has the lowest over several sizes.

    Args:
        lowest: of every size.
        loss: name of the loss.
        claims: text after the count of an optimizer, by its name.
    """
    if len(lowest) == 1:
        name, others, shown = lowest[0].name, lowest[0].others, shown_loss(lowest[0].summary)
        return f"Of {others + 1} optimizers, {name} has the lowest {loss}, {shown}"
    parts: list[str] = []
    for name, count in Counter(each.name for each in lowest).most_common():
        where = all_of(count) if count == len(lowest) else str(count)
        part = f"{name} in {where}" if parts else f"{name} has the lowest {loss} in {where}"
        parts.append(part + (claims or {}).get(name, ""))
    return f"Over {len(lowest)} {COMBINATIONS}, {enumerated(parts)}"


def _claims(lowest: Sequence[_Lowest]) -> str:
    """Short description of the claims about one optimizer at the sizes where it is the lowest."""
    clear, untested = sum(each.is_clear for each in lowest), sum(not each.is_tested for each in lowest)

    def in_sizes(words: str, count: int) -> str:
        return words if count == len(lowest) else f"{words} in {count}"

    parts = [in_sizes("significantly", clear)] if clear else ["not significantly"] if untested < len(lowest) else []
    return ", ".join([*parts, in_sizes("no claim", untested) + " for lack of seeds"] if untested else parts)


def _share(part: int, whole: int, noun: str) -> str:
    """Such as "all 10 others are", "3 of the 10 others are", "none of the 10 others is"."""
    if whole == 1:
        return f"the {noun} is" if part else f"the {noun} is not"
    if part == whole:
        return f"{all_of(whole)} {noun}s are"
    return f"{part or 'none'} of the {whole} {noun}s {'is' if part < 2 else 'are'}"


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
    mean = f"mean {table}embedding"
    origin = "0% means centred at the origin."
    if lowest == highest:
        return f"With every optimizer, the {mean} has {lowest} of a typical embedding's length; {origin}"
    ends = f"from {lowest} with {low} to {highest} with {high}"
    return f"The length of the {mean}, relative to a typical embedding, ranges {ends}; {origin}"
