"""All figures of a study, with their titles and captions, as files and as parts of a page."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import CaptionedFigure, captioned_figure, figure_style, write_captioned_figures
from coupled_adam.metrics import METRICS
from coupled_adam.report.figures import (
    ablations,
    clouds,
    differences,
    embedding_figures,
    experiments,
    forest,
    frequency_figures,
    quantised_figures,
    ranking_figures,
    theory_figures,
    training_curves,
)
from coupled_adam.report.figures.frequency_figures import FORMS, form_of
from coupled_adam.report.grid import Grid, size_labels
from coupled_adam.report.primary_comparisons import PrimaryComparison, primary_comparisons
from coupled_adam.report.run_files import is_thinned
from coupled_adam.theory.run_figures import CAPTIONS as THEORY_CAPTIONS

Draw = Callable[..., Figure | None]
MAIN_PICTURE = "embedding_cloud"
BESIDE_TABLES = {"primary": "primary_differences", "quantised": "quantised_costs"}
"""Figures that the page shows below a table, by the name of the table."""


@dataclass(frozen=True)
class _Entry:
    name: str
    title: str
    caption: str
    draw: Draw
    curves: str = ""
    """For curves over training, the kind of the logged rows; otherwise empty."""
    of_primary: bool = False
    """Whether it is drawn from the primary comparisons too."""


AVERAGED = "Neighbouring steps are averaged, because there are more than can be drawn."
_BAND = "Lines are means over seeds; the band covers all seeds."

_TABLES = (
    _Entry(
        MAIN_PICTURE,
        "The embeddings around the origin",
        "Side view, same scale: a healthy cloud is centred at the origin (+), and its mean (x) stays there. {largest}",
        clouds.draw_clouds,
    ),
    _Entry(
        "norm_frequency",
        "Length and frequency",
        "Length of an embedding against the frequency of its token; each point is a token. {largest}",
        embedding_figures.draw_norm_and_frequency,
    ),
    _Entry(
        "singular_values",
        "Singular values",
        "Divided by the largest. If the first value is far above the others, one direction dominates. " + _BAND,
        embedding_figures.draw_spectra,
    ),
)

ENTRIES = (
    _TABLES[0],
    _Entry(
        BESIDE_TABLES["primary"],
        "Difference in loss from the standard optimizer",
        "Mean over runs with the same seed, and its 95% interval as a line. Filled: significant after Holm's "
        "correction for all comparisons; hollow: not significant. Without a line, only one seed is common and there "
        "is no test.",
        forest.draw_primary_differences,
        of_primary=True,
    ),
    _Entry(
        "results",
        "Difference over dataset size",
        "{pairs}. Bars: one-sided 95% threshold; a filled marker is significant, a hollow one is not.",
        differences.draw_differences,
    ),
    _Entry(
        "ranking",
        "Loss against the quality of the embeddings",
        "Each point is an optimizer, numbered by loss: mean over seeds, with the standard deviation as bars. "
        "{qualities} are better. {beyond}{ranked}",
        ranking_figures.draw_ranking,
    ),
    _Entry(
        "learning_rates",
        "Loss over the learning rate",
        "Mean over seeds with its standard deviation. A flat line means low sensitivity to the learning rate.",
        ranking_figures.draw_learning_rates,
    ),
    _Entry(
        "downstream",
        "Difference in accuracy, task by task",
        "{pairs}, at the largest dataset of each model. Bars: one-sided 95% threshold; a filled marker "
        "is significant, a hollow one is not.",
        differences.draw_task_differences,
    ),
    _Entry(
        "loss_by_frequency",
        "Loss and calibration by token frequency",
        "Bin 1 has the most frequent tokens, which make up half of the training text. Each further bin covers half of "
        "the rest, bin 10 everything left. {form}{binned}",
        frequency_figures.draw_by_frequency,
    ),
    _Entry(
        BESIDE_TABLES["quantised"],
        "What it costs to round the table",
        "Increase of the loss when the vocabulary table is rounded to int8 or int4, with one scale per row or per 32 "
        "columns: mean over seeds, with the standard deviation as bars. {rounded}",
        quantised_figures.draw_costs_of_rounding,
    ),
    _Entry(
        "ablation_scale",
        "Loss against the scale exponent n",
        "Difference from n = 0, which is Coupled Adam itself. Bars: one-sided 95% threshold; filled: significant.",
        ablations.draw_scale_loss,
    ),
    _Entry(
        "ablation_scale_complete",
        "Every metric against n",
        "Difference from n = 0, which is Coupled Adam itself. ↓: lower is better, ↑: higher is better. "
        "Bars: one-sided 95% threshold; filled: significant.",
        ablations.draw_scale_complete,
    ),
    _Entry(
        "ablation_sgd",
        "Loss against SGD's factor f",
        "SGD trains the embeddings with f times the learning rate. Mean over seeds with its standard deviation.",
        ablations.draw_sgd_loss,
    ),
    _Entry(
        "mean_ratio_over_training",
        "Mean-embedding ratio over training",
        "Length of the mean embedding divided by the mean length; 0 is centred at the origin. " + _BAND,
        training_curves.draw_mean_ratio,
        "embeddings",
    ),
    _Entry(
        "iso_over_training",
        "Isotropy over training",
        "ISO: 1 if no direction stands out, near 0 if one does. " + _BAND,
        training_curves.draw_isotropy,
        "embeddings",
    ),
    _Entry("training_loss", "Training loss", _BAND, training_curves.draw_training_loss, "train"),
    _Entry(
        "validation_loss",
        "Validation loss",
        "On held-out text. " + _BAND,
        training_curves.draw_validation_loss,
        "val",
    ),
    _Entry(
        "validation_difference",
        "Difference in validation loss over training",
        "From {first}, between runs with the same seed; below zero is better. The first fifth of the training is left "
        "out. " + _BAND,
        training_curves.draw_validation_difference,
        "val",
    ),
    *_TABLES[1:],
    *(
        _Entry(f"{entry.name}_input", f"{entry.title}: input table", entry.caption, partial(entry.draw, table="input_"))
        for entry in _TABLES
    ),
    _Entry(
        "mean_ratio_over_training_input",
        "Mean-embedding ratio over training: input table",
        "Length of the mean embedding divided by the mean length; 0 is centred at the origin. " + _BAND,
        partial(training_curves.draw_mean_ratio, table="input_"),
        "embeddings",
    ),
    _Entry(
        "theory_second_moment",
        THEORY_CAPTIONS["second_moment"][0],
        "E[v] of a token, reconstructed at the last checkpoint of one run, against the frequency of the token; each "
        "point is a token. The line A p̃ is a plain least-squares fit, so the most frequent tokens dominate it. Right: "
        "the same on logarithmic axes.",
        theory_figures.draw_second_moments,
    ),
    _Entry("theory_constant", *THEORY_CAPTIONS["second_moment_constant"], theory_figures.draw_constants),
    _Entry("theory_update_sums", *THEORY_CAPTIONS["update_sums"], theory_figures.draw_sums),
    _Entry(
        "experiments",
        "Dataset and model sizes",
        "One marker per size with finished runs; the line N = D/20 is approximately compute-optimal.",
        experiments.draw_experiments,
    ),
)


OVER_TRAINING = tuple(entry.name for entry in ENTRIES if entry.curves)
"""Figures of curves over training, which the page also draws interactively."""


def draw_figures(
    grid: Grid, primary: Sequence[PrimaryComparison] | None = None, *, only: Collection[str] | None = None
) -> list[CaptionedFigure]:
    """Draw every figure that the results have data for, in the order of the report.

    Args:
        grid: of the finished runs.
        primary: the primary comparisons of the grid; computed by default.
        only: names of the figures to draw; None for all.
    """
    primary = primary_comparisons(grid) if primary is None else primary
    words = _caption_words(grid)
    figures = []
    with figure_style():
        for entry in ENTRIES if only is None else [entry for entry in ENTRIES if entry.name in only]:
            figure = entry.draw(grid, primary) if entry.of_primary else entry.draw(grid)
            if figure is not None:
                caption = entry.caption.format_map(words)
                if entry.curves and is_thinned(grid.results, entry.curves):
                    caption += f" {AVERAGED}"
                figures.append(captioned_figure(entry.name, entry.title, caption, figure))
    return figures


def write_figures(figures: Sequence[CaptionedFigure], folder: Path) -> None:
    """Write NAME.svg and NAME.pdf of every figure, and remove figures of an earlier report that are no longer drawn.

    Args:
        figures: from `draw_figures`.
        folder: created if missing.
    """
    write_captioned_figures(figures, folder, [entry.name for entry in ENTRIES])


def _caption_words(grid: Grid) -> dict[str, str]:
    pairs = [f"{second.label} minus {first.label}" for first, second in grid.difference_pairs]
    what = pairs[0][:1].upper() + pairs[0][1:] if len(pairs) == 1 else "One optimizer minus another, named in the title"
    largest = (
        f"Shown: {size_labels(grid.sizes)[grid.largest_size]}, one run each."
        if len(grid.sizes) > 1
        else "One run each."
    )
    binned = frequency_figures.shown_cells(grid)
    rounded = quantised_figures.shown_cells(grid)
    ranked = ranking_figures.shown_place(grid)
    qualities = [f"higher {METRICS[key].symbol}" for key in ranking_figures.drawn_qualities(grid)]
    return {
        "pairs": what,
        "first": grid.variants[0].label,
        "qualities": " and ".join([", ".join(["Lower loss", *qualities[:-1]]), *qualities[-1:]]),
        "largest": largest,
        "beyond": "An arrow at the upper edge: a loss above the axis. "
        if ranking_figures.has_losses_beyond(grid)
        else "",
        "ranked": f"Shown: {ranked[0].size.label}." if ranked and len(grid.finished.places) > 1 else "",
        "rounded": f"Shown: {rounded[0].size.label}." if rounded and len(grid.finished.places) > 1 else "",
        "form": FORMS[form_of(binned)].format(baseline=binned[0].variant.label) if binned else "",
        "binned": f" Shown: {binned[0].size.label}." if binned and len(grid.finished.places) > 1 else "",
    }
