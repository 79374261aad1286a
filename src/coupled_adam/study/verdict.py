"""The outcome of a study in two sentences: the first about the loss, the second about the embeddings.

They say what the paper's test allows and no more: with one seed nothing is claimed, and where Coupled Adam is worse
they say so. A *size* is one combination of dataset size D and model; tied and untied models of one name are one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coupled_adam.inspection.measures import CENTRED_BELOW
from coupled_adam.study.metrics import METRICS
from coupled_adam.study.notation import shorthand
from coupled_adam.study.report_data import (
    Variant,
    compare_variants,
    loss_name,
    main_pair,
    places,
    runs_of,
    size_of,
    values_of,
    variants,
)
from coupled_adam.study.results import Result
from coupled_adam.study.statistics import Comparison, Summary, Values, as_list, compare, summarise
from coupled_adam.training.amounts import short

Outcome = Literal["better", "worse", "open", "mixed", "no claim"]
LEVEL = "significant at 95%"
COMBINATIONS = "combinations of data and model size"


@dataclass(frozen=True)
class Verdict:
    """What a study says."""

    outcome: Outcome
    """Of the loss: significantly better or worse everywhere, undecided everywhere, different from size to size, or no
    claim because there are too few seeds."""
    loss: str
    """The first sentence."""
    embeddings: str
    """The second."""


def verdict(results: Sequence[Result]) -> Verdict:
    """The verdict on the finished runs of a study."""
    found = variants(results)
    if len(found) == 1:
        only = f"Only {found[0].label} has finished runs, so there is nothing to compare yet."
        return Verdict("no claim", only, "Run the others, then make the report again.")
    pair = main_pair(results)
    if pair is not None and _is_about(results, pair):
        losses, ratios = (_comparisons(results, pair, metric) for metric in ("loss", "mu_norm_ratio"))
        return verdict_of_pair(pair[0].label, pair[1].label, losses, ratios, loss_name(results))
    all_losses, all_ratios = (_samples(results, metric) for metric in ("loss", "mu_norm_ratio"))
    return verdict_of_many(all_losses, all_ratios, loss_name(results))


def verdict_of_pair(
    first: str, second: str, losses: Sequence[Comparison], ratios: Sequence[Comparison], loss: str = "test loss"
) -> Verdict:
    """The verdict on one optimizer against another.

    Args:
        first: name of the one compared with, such as "standard Adam".
        second: name of the one in question.
        losses: a comparison for each size.
        ratios: the mean-embedding ratios.
        loss: what to call the loss.
    """
    outcomes = [outcome_of(comparison) for comparison in losses]
    outcome: Outcome = "no claim" if not outcomes else outcomes[0] if len(set(outcomes)) == 1 else "mixed"
    sentence = _loss_sentence(first, second, losses, outcomes, loss)
    return Verdict(outcome, sentence, _ratio_sentence(first, second, ratios))


def verdict_of_many(
    losses: Sequence[Mapping[str, Values]], ratios: Sequence[Mapping[str, Values]], loss: str = "test loss"
) -> Verdict:
    """The verdict on more than two optimizers, such as all scale exponents of an ablation.

    Args:
        losses: for each size the losses of every optimizer, by its name.
        ratios: the mean-embedding ratios, likewise.
        loss: what to call the loss.
    """
    measured = [summaries for size in losses if len(summaries := _summaries(size)) > 1]
    if not measured:
        return Verdict("no claim", f"The {loss} was not measured.", _ratio_range(ratios))
    by_size = [size for size in losses if len(_summaries(size)) > 1]
    beaten = [_beaten_by_the_best(size) for size in by_size]
    single = all(summary.count == 1 for summaries in measured for summary in summaries.values())
    names = [best for best, _, _ in beaten]
    if len(beaten) == 1:
        best, worse, others = beaten[0]
        shown = _shown(measured[0][best], "loss")
        text = f"Of {others + 1} optimizers, {best} has the lowest {loss}, {shown}"
        text += (
            "; with one seed each, nothing can be claimed."
            if single
            else f": {_share(worse, others, 'other')} significantly higher at 95%."
        )
        return Verdict("no claim" if single else "better" if worse == others else "open", text, _ratio_range(ratios))
    counts = Counter(names).most_common()
    wins = ", ".join(
        f"{name} has the lowest {loss} in {count}" if place == 0 else f"{name} in {count}"
        for place, (name, count) in enumerate(counts)
    )
    clear = sum(worse == others for _, worse, others in beaten)
    text = f"Over {len(beaten)} {COMBINATIONS}, {wins}"
    text += "; with one seed each, nothing can be claimed." if single else f"; {_clear_wins(clear, len(beaten))}."
    same = clear == len(beaten) and len(counts) == 1
    return Verdict("no claim" if single else "better" if same else "mixed", text, _ratio_range(ratios))


def outcome_of(comparison: Comparison) -> Outcome:
    """What the paper's test says of one comparison."""
    if comparison.significant is None:
        return "no claim"
    if comparison.significant:
        return "better"
    return "worse" if comparison.significantly_worse else "open"


def percent(ratio: float) -> str:
    """A ratio in percent, with the digits that matter.

    Example:
        >>> percent(0.853), percent(0.0213), percent(0.0042), percent(9e-9)
        ('85%', '2%', '0.4%', '0%')
    """
    return f"{100 * ratio:.0f}%" if ratio >= 0.0095 or ratio < 5e-5 else f"{100 * ratio:.1g}%"


def _is_about(results: Sequence[Result], pair: tuple[Variant, Variant]) -> bool:
    """Whether the pair is what the study is about, and not the reference of an ablation at the same sizes."""
    names = {variant.name for variant in pair}
    of_pair = {(result.tokens, result.model) for result in results if result.optimizer in names}
    of_others = {(result.tokens, result.model) for result in results if result.optimizer not in names}
    return len(of_pair) > len(of_others)


def _comparisons(results: Sequence[Result], pair: tuple[Variant, Variant], metric: str) -> list[Comparison]:
    """Of the pair, at every size where both were measured."""
    found = []
    for own in places(results):
        of_pair = [{size_of(run) for run in own if run.optimizer == variant.name} for variant in pair]
        shared = sorted(of_pair[0] & of_pair[1])
        if shared:
            found += [compare_variants(own, size, *pair, metric) for size in shared]
        elif all(len(of_one) == 1 for of_one in of_pair):  # one is tied, the other is not
            found.append(compare_variants(own, min(of_pair[0]), *pair, metric, min(of_pair[1])))
    return [comparison for comparison in found if comparison is not None]


def _samples(results: Sequence[Result], metric: str) -> list[dict[str, Values]]:
    """For every D and model, what was measured of each optimizer."""
    found = []
    for own in places(results):
        samples: dict[str, Values] = {}
        for variant in variants(own):
            of_variant = sorted({size_of(run) for run in own if run.optimizer == variant.name})
            for size in of_variant:
                name = variant.label if len(of_variant) == 1 else f"{variant.label} ({short(size.parameters)})"
                samples[name] = values_of(runs_of(own, size, variant), metric)
        found.append(samples)
    return found


def _summaries(size: Mapping[str, Values]) -> dict[str, Summary]:
    """Of the optimizers that were measured at this size."""
    summaries = {name: summarise(as_list(values)) for name, values in size.items()}
    return {name: summary for name, summary in summaries.items() if summary.mean is not None}


def _beaten_by_the_best(size: Mapping[str, Values]) -> tuple[str, int, int]:
    """The optimizer with the lowest mean, how many others are significantly higher, and how many others there are."""
    summaries = _summaries(size)
    best = min(summaries, key=lambda name: summaries[name].mean or 0.0)
    others = [name for name in summaries if name != best]
    return best, sum(bool(compare(size[name], size[best], "lower").significant) for name in others), len(others)


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
    match outcomes[0]:
        case "better":
            text = f"{second} reaches a lower {name} than {first}: {new} against {old}, {LEVEL} over {seeds}."
        case "worse":
            text = f"{second} is worse in {name} than {first}: {new} against {old}, {LEVEL} over {seeds}."
        case "open":
            text = (
                f"The {name}es of {second} ({new}) and {first} ({old}) do not differ significantly at 95% over {seeds}."
            )
        case _:
            text = f"With {seeds} nothing can be claimed about the {name}: {new} with {second}, {old} with {first}."
    return _sentence(text)


def _loss_over_sizes(
    first: str, second: str, losses: Sequence[Comparison], outcomes: Sequence[Outcome], name: str
) -> str:
    total = len(losses)
    if set(outcomes) == {"no claim"}:
        lower = sum((loss.difference or 0.0) < 0 for loss in losses)
        return _sentence(
            f"With {_seeds(losses[0])} nothing can be claimed; the {name} of {second} is below that of {first} in "
            f"{lower} of {total} {COMBINATIONS}."
        )
    counts = Counter(outcomes)
    words: dict[Outcome, str] = {
        "better": "significantly lower than that of {first}",
        "worse": "significantly higher",
        "open": "not significantly different",
        "no claim": "without a claim for want of seeds",
    }
    parts = []
    for outcome, text in words.items():
        if counts[outcome]:
            where = f"in all {total} {COMBINATIONS}" if counts[outcome] == total else f"in {counts[outcome]}"
            parts.append(f"{text.format(first=first)} {where}")
    if len(parts) > 1:
        parts[0] = f"{parts[0]} of {total} {COMBINATIONS}"
    # "than that of" goes with the first part only, whichever it is.
    head = (
        parts[0]
        if counts["better"]
        else parts[0]
        .replace("higher", f"higher than that of {first}")
        .replace("different", f"different from that of {first}")
    )
    return _sentence(f"the {name} of {second} is {_enumerated([head, *parts[1:]])} (at 95%).")


def _ratio_sentence(first: str, second: str, ratios: Sequence[Comparison]) -> str:
    if not ratios:
        return "The embeddings were not measured."
    new = _range([ratio.mean1 for ratio in ratios])
    old = _range([ratio.mean0 for ratio in ratios])
    centred = all((ratio.mean1 or 0.0) < CENTRED_BELOW for ratio in ratios)
    lengths = f"its mean embedding has {new} of a typical embedding's length, against {old} with {first}"
    better = sum(bool(ratio.significant) for ratio in ratios)
    worse = sum(bool(ratio.significantly_worse) for ratio in ratios)
    claims = sum(ratio.significant is not None for ratio in ratios)
    if better == len(ratios):
        where = "stay centred at the origin" if centred else "lie closer to the origin"
        certain = f"{LEVEL}" if len(ratios) == 1 else f"{LEVEL} in all {len(ratios)}"
        return _sentence(f"the embeddings of {second} {where}: {lengths}, {certain}.")
    if worse == len(ratios):
        return _sentence(f"the embeddings of {second} lie farther from the origin: {lengths}, {LEVEL}.")
    if claims == 0:
        text = f"with {second} the mean embedding has {new} of a typical embedding's length, against {old} with {first}"
        return _sentence(f"{text}; with so few seeds this is no claim.")
    if better == worse == 0:
        return _sentence(f"the embeddings of {second} lie no closer to the origin at 95%: {lengths}.")
    farther = f", significantly farther in {worse}" if worse else ""
    return _sentence(
        f"the embeddings of {second} lie significantly closer to the origin in {better} of {len(ratios)}{farther}: "
        f"{lengths}."
    )


def _ratio_range(ratios: Sequence[Mapping[str, Values]]) -> str:
    """Where the mean-embedding ratio is lowest and where highest, of the optimizers' means over all sizes."""
    means: dict[str, list[float]] = {}
    for size in ratios:
        for name, summary in _summaries(size).items():
            means.setdefault(name, []).append(summary.mean or 0.0)
    if not means:
        return "The embeddings were not measured."
    over_sizes = {name: sum(values) / len(values) for name, values in means.items()}
    low, high = min(over_sizes, key=lambda name: over_sizes[name]), max(over_sizes, key=lambda name: over_sizes[name])
    if percent(over_sizes[low]) == percent(over_sizes[high]):
        return (
            f"With each of them the mean embedding has {percent(over_sizes[low])} of a typical embedding's length; "
            "0 is centred at the origin."
        )
    return (
        f"The mean embedding has from {percent(over_sizes[low])} ({low}) to {percent(over_sizes[high])} ({high}) of a "
        "typical embedding's length; 0 is centred at the origin."
    )


def _range(ratios: Sequence[float | None]) -> str:
    values = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def _shown(summary: Summary, metric: str) -> str:
    assert summary.mean is not None
    return shorthand(summary.mean, summary.std, METRICS[metric].decimals_of(summary.count))


def _seeds(comparison: Comparison) -> str:
    first, second = comparison.first.count, comparison.second.count
    if first != second:
        return f"{first} and {second} seeds"
    return "one seed each" if first == 1 else f"{first} seeds each"


def _share(part: int, whole: int, noun: str) -> str:
    """Such as "all 10 others are", "3 of the 10 others are", "none of the 10 others is"."""
    nouns = f"{noun}s" if whole > 1 else noun
    if part == whole:
        return f"all {whole} {nouns} are" if whole > 1 else f"the {noun} is"
    return (
        f"none of the {whole} {nouns} is"
        if part == 0
        else f"{part} of the {whole} {nouns} {'is' if part == 1 else 'are'}"
    )


def _clear_wins(clear: int, total: int) -> str:
    """In how many sizes the lowest loss is lower than every other one."""
    if clear == 0:
        return "in none of them is it significantly lower than all others"
    return f"it is significantly lower than all others in {'all of them' if clear == total else clear}"


def _enumerated(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(text: str) -> str:
    """With a capital letter at the beginning; the names of optimizers may have none."""
    return text[:1].upper() + text[1:]
