"""The outcome of a study in two sentences: what its runs say is put into numbers here, into words elsewhere.

A *size* is one combination of dataset size D and model; tied and untied models of one name are one.
"""

from collections.abc import Sequence
from dataclasses import replace

from coupled_adam.base.text import short
from coupled_adam.report.report_data import (
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
from coupled_adam.report.significance import Comparison, Values
from coupled_adam.report.verdict_sentences import TablePrefix, Verdict, verdict_of_many, verdict_of_pair
from coupled_adam.study.plan_sections import DEFAULT_REPORT, ReportSection
from coupled_adam.study.results import Result


def verdict(results: Sequence[Result], report: ReportSection = DEFAULT_REPORT) -> Verdict:
    """The verdict on the finished runs of a study.

    Args:
        results: the finished runs.
        report: which of the two sentences comes first, and what to say of the loss.
    """
    found = variants(results)
    if len(found) == 1:
        only = f"Only {found[0].label} has finished runs, so there is nothing to compare yet."
        return Verdict("no claim", only, "Run the others, then make the report again.")
    has_loss = any(result.metrics.get("loss") is not None for result in results)
    note = (report.loss_note or "") if has_loss else ""
    return replace(_verdict(results), lead=report.lead, loss_note=note)


def compared_pair(results: Sequence[Result]) -> tuple[Variant, Variant] | None:
    """The two optimizers that a study is about; None where it is an ablation over more, or has a single one."""
    pair = main_pair(results)
    return pair if pair is not None and _is_about(results, pair) else None


def _verdict(results: Sequence[Result]) -> Verdict:
    pair = compared_pair(results)
    if pair is not None:
        losses, ratios = (comparisons_over_sizes(results, pair, metric) for metric in ("loss", "mu_norm_ratio"))
        table = _table_of([run for run in results if run.optimizer in (pair[0].name, pair[1].name)])
        return verdict_of_pair(pair[0].label, pair[1].label, losses, ratios, loss_name(results), table)
    all_losses, all_ratios = (_samples(results, metric) for metric in ("loss", "mu_norm_ratio"))
    return verdict_of_many(all_losses, all_ratios, loss_name(results), _table_of(results))


def _is_about(results: Sequence[Result], pair: tuple[Variant, Variant]) -> bool:
    """Whether the pair is what the study is about, and not the reference of an ablation at the same sizes."""
    names = {variant.name for variant in pair}
    of_pair = {(result.tokens, result.model) for result in results if result.optimizer in names}
    of_others = {(result.tokens, result.model) for result in results if result.optimizer not in names}
    return len(of_pair) > len(of_others)


def comparisons_over_sizes(results: Sequence[Result], pair: tuple[Variant, Variant], metric: str) -> list[Comparison]:
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


def _table_of(results: Sequence[Result]) -> TablePrefix:
    """Which embeddings the measures of these runs are of."""
    return "" if all(result.settings.get("tied", True) for result in results) else "output "
