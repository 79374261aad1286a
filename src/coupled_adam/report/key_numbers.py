"""Key numbers on the first screen of a report: a few metrics of two optimizers, with every seed as a dot."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from coupled_adam.config.study_sections import ReportSection
from coupled_adam.metrics import METRICS, Lead
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import Grid, Size, Variant, size_labels
from coupled_adam.report.page_tables import cell_html, label_and_meaning, p_of_claim
from coupled_adam.report.pair_tables import claim_text, summary_cell
from coupled_adam.report.significance import Comparison, is_number
from coupled_adam.report.table_model import TableCell
from coupled_adam.report.verdict import compared_pair, comparisons_over_sizes
from coupled_adam.study.results import Result

MOST = 5
# The first of these that were measured are shown; if the embeddings lead, the loss comes last.
LARGE = ("loss", "mu_norm_ratio", "iso", "acc", "r_cos", "kappa", "rho_log")


@dataclass(frozen=True)
class KeyNumber:
    """One metric of two optimizers."""

    label: str
    meaning: str
    first: Markup
    second: Markup
    claim: str
    """Verdict of the test on the second against the first."""
    p_value: str
    over_sizes: str
    """The verdicts at all sizes; empty for a single size."""
    bars: tuple[float, float] | None
    """Lengths of both bars, in percent of the longer one; None if a bar that starts at zero would be meaningless."""
    strip: Markup
    """Every seed as a dot."""


@dataclass(frozen=True)
class KeyNumbers:
    """The key numbers of the first screen."""

    names: tuple[str, str]
    colours: tuple[str, str]
    place: str
    """Their size; empty if there is only one."""
    numbers: Sequence[KeyNumber]


def key_numbers(grid: Grid, report: ReportSection) -> KeyNumbers | None:
    """The key numbers of the study's main pair at its largest size; None without such a pair."""
    pair = compared_pair(grid)
    if pair is None:
        return None
    found = _largest_place(grid, pair)
    if found is None:
        return None
    sizes, place = found
    colours = {name: look.colour for name, look in looks(grid.variants).items()}
    numbers = []
    for key in _chosen(place.results, report.lead):
        comparison = place.compare(sizes[0], *pair, key, sizes[1])
        if comparison is not None:
            values = {
                variant.name: list(place.values_of(size, variant, key).values())
                for variant, size in zip(pair, sizes, strict=True)
            }
            numbers.append(
                KeyNumber(
                    *label_and_meaning(METRICS[key], place.results),
                    *_shown(key, comparison),
                    claim_text(comparison),
                    "" if comparison.p_value is None else p_of_claim(comparison.p_value),
                    _over_sizes([each.comparison for each in comparisons_over_sizes(grid, pair, key)]),
                    _bars(key, comparison),
                    strip(values, colours),
                )
            )
    if not numbers:
        return None
    count = len(grid.finished.places)
    where = f"The largest of {count} sizes: {size_labels(grid.sizes)[sizes[0]]}" if count > 1 else ""
    return KeyNumbers(
        (pair[0].label, pair[1].label), (colours[pair[0].name], colours[pair[1].name]), where, numbers[:MOST]
    )


def strip(values: Mapping[str, Sequence[float | None]], colours: Mapping[str, str]) -> Markup:
    """Draw every seed as a dot on a line from the smallest to the largest value, as SVG; empty without two values.

    Args:
        values: of the seeds, by optimizer.
        colours: of the optimizers.
    """
    known = {name: [value for value in seeds if is_number(value)] for name, seeds in values.items()}
    everything = [value for seeds in known.values() for value in seeds if value is not None]
    if len(everything) < 2:
        return Markup("")
    low, high = min(everything), max(everything)
    # In percent of the width, so that dots stay round at any width.
    dots = Markup("").join(
        Markup('<circle cx="{:.1f}%" cy="50%" r="4.5" fill="{}"/>').format(
            100 * (value - low) / (high - low) if high > low else 50.0, colours[name]
        )
        for name, seeds in known.items()
        for value in seeds
        if value is not None
    )
    line = Markup('<line x1="0" x2="100%" y1="50%" y2="50%"/>')
    return Markup('<svg class="strip" aria-hidden="true">{}{}</svg>').format(line, dots)


def _largest_place(grid: Grid, pair: tuple[Variant, Variant]) -> tuple[tuple[Size, Size], Grid] | None:
    """The largest D and model where both have runs: their sizes, which differ between tied and untied models, and the
    grid there."""
    for own in reversed(grid.finished.places):
        first, second = (own.sizes_of(variant) for variant in pair)
        if first and second:
            shared = [size for size in first if size in second]
            return (shared[-1], shared[-1]) if shared else (first[-1], second[-1]), own
    return None


def _chosen(runs: Sequence[Result], lead: Lead) -> list[str]:
    """The metrics to show, in their order."""
    found = [key for key in LARGE if any(run.metrics.get(key) is not None for run in runs)]
    if lead == "loss":
        return found
    embeddings = [key for key in found if METRICS[key].of_table]
    others = [key for key in found if key not in embeddings]
    return [*embeddings[: MOST - 1], *others[:1]] if others else embeddings


def _shown(key: str, comparison: Comparison) -> tuple[Markup, Markup]:
    """Both means, with a significantly better one in bold."""
    wins = (comparison.significantly_worse, comparison.significant)
    first, second = (
        cell_html(TableCell(summary_cell(METRICS[key], summary).text, bold=bool(is_better)))
        for is_better, summary in zip(wins, (comparison.first, comparison.second), strict=True)
    )
    return first, second


def _over_sizes(comparisons: Sequence[Comparison]) -> str:
    """Such as "better in 1, worse in 1 of 2 sizes"."""
    if len(comparisons) < 2:
        return ""
    counts = Counter(claim_text(comparison) for comparison in comparisons)
    return f"{', '.join(f'{claim} in {count}' for claim, count in counts.items())} of {len(comparisons)} sizes"


def _bars(key: str, comparison: Comparison) -> tuple[float, float] | None:
    """Bar lengths. Zero is a natural start for measures of a table, but not for a loss."""
    first, second = comparison.mean0, comparison.mean1
    if first is None or second is None or not METRICS[key].of_table:
        return None
    if min(first, second) < 0 or max(first, second) <= 0:
        return None
    return round(100 * first / max(first, second), 1), round(100 * second / max(first, second), 1)
