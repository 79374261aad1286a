"""The outcome of a study: this module compares the runs, verdict_sentences.py and several_optimizers.py write the two
sentences.

The primary comparisons decide what is claimed about the loss, if there is an AdamW baseline; otherwise, and for the
embeddings, the paper's test does. A *size* is one combination of dataset size D and model; tied and untied models of
one name count as one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coupled_adam.base.text import short
from coupled_adam.config.study_sections import DEFAULT_REPORT, ReportSection
from coupled_adam.report.grid import CellRuns, Grid, Size, Variant, model_labels
from coupled_adam.report.primary_comparisons import PrimaryComparison, corrected_count, primary_comparisons
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.several_optimizers import AgainstBaseline, verdict_against_baseline, verdict_of_many
from coupled_adam.report.significance import Values
from coupled_adam.report.verdict_sentences import (
    PAPERS_TEST,
    Outcome,
    SizedComparison,
    TablePrefix,
    Verdict,
    verdict_of_pair,
)
from coupled_adam.study.results import Result


def verdict(
    grid: Grid, report: ReportSection = DEFAULT_REPORT, primary: Sequence[PrimaryComparison] | None = None
) -> Verdict:
    """The verdict on the finished runs of a study.

    Args:
        grid: of the finished runs.
        report: which of the two sentences comes first, and a note on the loss.
        primary: the primary comparisons of the grid; computed by default.
    """
    found = grid.variants
    if len(found) == 1:
        only = f"Only {found[0].label} has finished runs, so there is nothing to compare yet."
        return Verdict("no claim", only, "Run the others, then write the report again.")
    has_loss = any(result.metrics.get("loss") is not None for result in grid.results)
    note = (report.loss_note or "") if has_loss else ""
    compared = primary_comparisons(grid) if primary is None else primary
    return replace(_verdict(grid, compared), lead=report.lead, loss_note=note)


def compared_pair(grid: Grid) -> tuple[Variant, Variant] | None:
    """The two optimizers that a study is about; None for an ablation over more, or a single one."""
    pair = grid.main_pair
    return pair if pair is not None and _is_about(grid, pair) else None


def _verdict(grid: Grid, compared: Sequence[PrimaryComparison]) -> Verdict:
    pair = compared_pair(grid)
    primary = [each for each in compared if each.comparison.difference is not None]
    tested = corrected_count(primary)
    corrected = f", corrected for {tested} comparisons" if tested > 1 else ""
    name = loss_name(grid.results)
    if pair is not None:
        losses, ratios = (comparisons_over_sizes(grid, pair, metric) for metric in ("loss", "mu_norm_ratio"))
        table = _table_of([run for run in grid.results if run.optimizer in (pair[0].name, pair[1].name)])
        test = PAPERS_TEST
        if any((each.baseline.variant, each.optimizer.variant) == pair for each in primary):
            losses, test = _primary_over_sizes(grid, pair, primary), corrected
        return verdict_of_pair(pair[0].label, pair[1].label, losses, ratios, name, table, test)
    all_losses, all_ratios = (_samples(grid, metric) for metric in ("loss", "mu_norm_ratio"))
    table = _table_of(grid.results)
    against_baseline = _against_best_baseline(grid, primary)
    if not against_baseline:
        return verdict_of_many(all_losses, all_ratios, name, table)
    return verdict_against_baseline(all_losses, all_ratios, against_baseline, name, table, corrected)


def _is_about(grid: Grid, pair: tuple[Variant, Variant]) -> bool:
    """Whether the pair is what the study is about, and not the reference of an ablation at the same sizes."""
    names = {variant.name for variant in pair}
    of_pair = {(result.tokens, result.model) for result in grid.results if result.optimizer in names}
    of_others = {(result.tokens, result.model) for result in grid.results if result.optimizer not in names}
    return len(of_pair) > len(of_others)


def comparisons_over_sizes(grid: Grid, pair: tuple[Variant, Variant], metric: str) -> list[SizedComparison]:
    """Compare the pair at every size where both were measured, by the paper's test."""
    found = []
    for name, own, first, second in _sizes_of_pair(grid, pair):
        comparison = own.compare(first, *pair, metric, second)
        if comparison is not None:
            found.append(SizedComparison(name, comparison, comparison.outcome))
    return found


def _primary_over_sizes(
    grid: Grid, pair: tuple[Variant, Variant], primary: Sequence[PrimaryComparison]
) -> list[SizedComparison]:
    """Compare the losses of the pair at every size where both were measured, by the primary comparisons."""
    found = []
    for name, own, first, second in _sizes_of_pair(grid, pair):
        comparison = own.compare(first, *pair, "loss", second)
        if comparison is not None:
            compared = [(first, pair[0]), (second, pair[1])]
            outcomes: set[Outcome] = {
                each.outcome
                for each in primary
                if [(cell.size, cell.variant) for cell in (each.baseline, each.optimizer)] == compared
            }
            # Merged studies can have several cells of one size and optimizer: claim only what all of them show.
            outcome = outcomes.pop() if len(outcomes) == 1 else "open" if outcomes else "no claim"
            found.append(SizedComparison(name, comparison, outcome, is_paired=True))
    return found


def _sizes_of_pair(grid: Grid, pair: tuple[Variant, Variant]) -> Iterator[tuple[str, Grid, Size, Size]]:
    """Every size where both have runs: its name, its place, and the sizes of both."""
    models = model_labels(grid.finished.cells)
    for own in grid.finished.places:
        of_pair = [own.sizes_of(variant) for variant in pair]
        shared = [size for size in of_pair[0] if size in of_pair[1]]
        for size in shared:
            yield _size_name(size, models[size] if len(shared) > 1 else size.model), own, size, size
        if not shared and all(len(of_one) == 1 for of_one in of_pair):  # one is tied, the other is not
            (first,), (second,) = of_pair
            yield _size_name(first, first.model), own, first, second


def _size_name(size: Size, model: str) -> str:
    return f"{short(size.tokens)} tokens, {model}"


def _against_best_baseline(grid: Grid, primary: Sequence[PrimaryComparison]) -> list[AgainstBaseline]:
    """Compare every optimizer with the standard one of its D and model that has the lowest mean loss, of those with
    enough seeds for a test."""
    found = []
    for place in grid.finished.places:
        names = _optimizer_names(place.cells)
        own = [each for each in primary if each.baseline.name in names]
        if own:
            tested = [each for each in own if each.outcome != "no claim"]
            best = min(tested or own, key=lambda each: each.comparison.mean0 or 0.0).baseline.name
            size = place.cells[0].size
            found += [
                AgainstBaseline(_size_name(size, size.model), names[best], names[each.optimizer.name], each.outcome)
                for each in own
                if each.baseline.name == best
            ]
    return found


def _samples(grid: Grid, metric: str) -> list[dict[str, Values]]:
    """For every D and model, the values of each optimizer."""
    return [
        {name: cell.values(metric) for cell, name in zip(own.cells, _optimizer_names(own.cells).values(), strict=True)}
        for own in grid.finished.places
    ]


def _optimizer_names(cells: Sequence[CellRuns]) -> dict[str, str]:
    """The optimizer of every cell of one D and model in words, by the name of the cell; with the model's parameters, or
    the cell's name, if two would have the same name."""
    labels = Counter(cell.variant.label for cell in cells)
    sized = {cell.name: f"{cell.variant.label} ({short(cell.size.parameters)})" for cell in cells}
    with_size = Counter(sized.values())
    return {
        cell.name: cell.variant.label
        if labels[cell.variant.label] == 1
        else sized[cell.name]
        if with_size[sized[cell.name]] == 1
        else f"{cell.variant.label} ({cell.name})"
        for cell in cells
    }


def _table_of(results: Sequence[Result]) -> TablePrefix:
    """Prefix of the embeddings that these runs measure."""
    return "" if all(result.settings.get("tied", True) for result in results) else "output "
