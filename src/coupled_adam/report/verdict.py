"""The outcome of a study: this module compares the runs, verdict_sentences.py writes the two sentences.

A *size* is one combination of dataset size D and model; tied and untied models of one name count as one.
"""

from collections.abc import Sequence
from dataclasses import replace

from coupled_adam.base.text import short
from coupled_adam.config.study_sections import DEFAULT_REPORT, ReportSection
from coupled_adam.report.grid import Grid, Variant
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.significance import Comparison, Values
from coupled_adam.report.verdict_sentences import TablePrefix, Verdict, verdict_of_many, verdict_of_pair
from coupled_adam.study.results import Result


def verdict(grid: Grid, report: ReportSection = DEFAULT_REPORT) -> Verdict:
    """The verdict on the finished runs of a study.

    Args:
        grid: of the finished runs.
        report: which of the two sentences comes first, and a note on the loss.
    """
    found = grid.variants
    if len(found) == 1:
        only = f"Only {found[0].label} has finished runs, so there is nothing to compare yet."
        return Verdict("no claim", only, "Run the others, then write the report again.")
    has_loss = any(result.metrics.get("loss") is not None for result in grid.results)
    note = (report.loss_note or "") if has_loss else ""
    return replace(_verdict(grid), lead=report.lead, loss_note=note)


def compared_pair(grid: Grid) -> tuple[Variant, Variant] | None:
    """The two optimizers that a study is about; None for an ablation over more, or a single one."""
    pair = grid.main_pair
    return pair if pair is not None and _is_about(grid, pair) else None


def _verdict(grid: Grid) -> Verdict:
    pair = compared_pair(grid)
    if pair is not None:
        losses, ratios = (comparisons_over_sizes(grid, pair, metric) for metric in ("loss", "mu_norm_ratio"))
        table = _table_of([run for run in grid.results if run.optimizer in (pair[0].name, pair[1].name)])
        return verdict_of_pair(pair[0].label, pair[1].label, losses, ratios, loss_name(grid.results), table)
    all_losses, all_ratios = (_samples(grid, metric) for metric in ("loss", "mu_norm_ratio"))
    return verdict_of_many(all_losses, all_ratios, loss_name(grid.results), _table_of(grid.results))


def _is_about(grid: Grid, pair: tuple[Variant, Variant]) -> bool:
    """Whether the pair is what the study is about, and not the reference of an ablation at the same sizes."""
    names = {variant.name for variant in pair}
    of_pair = {(result.tokens, result.model) for result in grid.results if result.optimizer in names}
    of_others = {(result.tokens, result.model) for result in grid.results if result.optimizer not in names}
    return len(of_pair) > len(of_others)


def comparisons_over_sizes(grid: Grid, pair: tuple[Variant, Variant], metric: str) -> list[Comparison]:
    """Compare the pair at every size where both were measured."""
    found = []
    for own in grid.finished.places:
        of_pair = [own.sizes_of(variant) for variant in pair]
        shared = [size for size in of_pair[0] if size in of_pair[1]]
        if shared:
            found += [own.compare(size, *pair, metric) for size in shared]
        elif all(len(of_one) == 1 for of_one in of_pair):  # one is tied, the other is not
            found.append(own.compare(of_pair[0][0], *pair, metric, of_pair[1][0]))
    return [comparison for comparison in found if comparison is not None]


def _samples(grid: Grid, metric: str) -> list[dict[str, Values]]:
    """For every D and model, the values of each optimizer."""
    found = []
    for own in grid.finished.places:
        samples: dict[str, Values] = {}
        for variant in own.variants:
            of_variant = own.sizes_of(variant)
            for size in of_variant:
                name = variant.label if len(of_variant) == 1 else f"{variant.label} ({short(size.parameters)})"
                samples[name] = own.values_of(size, variant, metric)
        found.append(samples)
    return found


def _table_of(results: Sequence[Result]) -> TablePrefix:
    """Prefix of the embeddings that these runs measure."""
    return "" if all(result.settings.get("tied", True) for result in results) else "output "
