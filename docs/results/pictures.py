"""Draw the pictures of docs/results.md and docs/results-further.md from the stored runs:

    python docs/results/pictures.py

A picture is a figure of the report of one or more stored studies. One is not: the gain from beta2 by the time between
two occurrences of a token. Not drawn here: the overview (overview.py), and the pictures of single embeddings, whose
arrays are too large to store.

Legend: k steps between two occurrences of a token.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coupled_adam.base.captioned_figure import (
    FAINT,
    MARKERS,
    SERIES_COLOURS,
    captioned_figure,
    figure_style,
    legend_above,
    panels,
    standalone_svg,
)
from coupled_adam.base.files import write_whole
from coupled_adam.base.text import setting
from coupled_adam.metrics import BIN_LOSS, BIN_TARGETS, BIN_TOKENS, FREQUENCY_BINS, NATS, Metric, bin_key
from coupled_adam.report.figures.figure_list import draw_figures
from coupled_adam.report.grid import gather_grid
from coupled_adam.study.results import Result, merge_results, read_results

STORED = Path(__file__).parent
IMAGES = STORED.parent / "images"


@dataclass(frozen=True)
class Picture:
    """A figure of a report."""

    figure: str
    studies: tuple[str, ...]


PARTIAL = ("single-gpu", "partially-coupled")
PICTURES: Mapping[str, Picture] = {
    "validation-loss": Picture("validation_loss", ("single-gpu",)),
    "partial-validation-difference": Picture("validation_difference", PARTIAL),
    "learning-rates": Picture("learning_rates", ("learning-rates",)),
    "best-ranking": Picture("ranking", ("best-learning-rates",)),
    "loss-by-frequency": Picture("loss_by_frequency", ("best-learning-rates",)),
    "muon-validation-difference": Picture("validation_difference", ("muon",)),
    "muon-loss-by-frequency": Picture("loss_by_frequency", ("muon",)),
    "rivals-ranking": Picture("ranking", ("rivals", "table-beta2-30m")),
    "rivals-loss-by-frequency": Picture("loss_by_frequency", ("rivals", "table-beta2-30m")),
    "rivals-quantised": Picture("quantised_costs", ("rivals",)),
    "table-beta2": Picture("primary_differences", ("table-beta2",)),
    "table-beta2-30m": Picture("ranking", ("table-beta2-30m",)),
    "beta2-batch": Picture("primary_differences", ("table-beta2-batch",)),
    "momentum-batch": Picture("primary_differences", ("table-momentum-batch",)),
    "untied-momentum": Picture("primary_differences", ("untied-momentum-tuned",)),
    "input-momentum": Picture("primary_differences", ("input-momentum",)),
    "two-tables": Picture("primary_differences", ("two-tables-rate-3",)),
    "momentum-length": Picture("validation_difference", ("table-momentum-length",)),
    "beta2-muon": Picture("primary_differences", ("table-beta2-muon",)),
    "unigram-bias": Picture("ranking", (*PARTIAL, "unigram-bias")),
    "few-steps": Picture("ranking", ("few-steps",)),
    "125m-validation-difference": Picture("validation_difference", ("single-gpu-125m",)),
    "262m-validation-difference": Picture("validation_difference", ("single-gpu-beta2",)),
    "125m-ranking": Picture("ranking", ("single-gpu-125m",)),
    "untied-heads": Picture("mean_ratio_over_training", ("untied-heads",)),
    "scale-exponent": Picture("ablation_scale", ("single-gpu", "single-gpu-scaled")),
}
"""By file name, without the prefix `results-`."""


BINS = range(1, FREQUENCY_BINS + 1)
LONGER = "standard b2=0.99"
TICKS = (0.1, 1, 10, 100)


@dataclass(frozen=True)
class Batches:
    """AdamW with both values of beta2, trained with one batch size."""

    label: str
    study: str
    model: str
    tokens: int
    """Tokens in a batch."""


BATCHES = (
    Batches("tiny, 256 tokens per step", "table-beta2-batch", "batch-2", 2 * 128),
    Batches("tiny, 1,024", "table-beta2-batch", "batch-8", 8 * 128),
    Batches("tiny, 4,096", "table-beta2-batch", "batch-32", 32 * 128),
    Batches("30M, 16,384", "rivals", "30M", 16 * 1024),
)


def gain_by_occurrence(batches: Batches) -> list[tuple[float, float]]:
    """k, and the mean change of the loss from beta2 = 0.95 to 0.99 over seeds, for every bin of token frequency."""
    runs: dict[str, dict[int, Result]] = {"standard": {}, LONGER: {}}
    for run in read_results(STORED / batches.study):
        if run.model == batches.model and run.optimizer in runs and not run.is_candidate:
            runs[run.optimizer][run.seed] = run
    seeds = sorted(runs["standard"].keys() & runs[LONGER].keys())

    def by_bin(optimizer: str, metric: Metric) -> np.ndarray:
        return np.array([[runs[optimizer][seed].metrics[bin_key(metric, i)] for i in BINS] for seed in seeds])

    change = (by_bin(LONGER, BIN_LOSS) - by_bin("standard", BIN_LOSS)).mean(axis=0)
    targets, kinds = by_bin("standard", BIN_TARGETS)[0], by_bin("standard", BIN_TOKENS)[0]
    k = kinds / (targets / targets.sum() * batches.tokens)
    return [(float(steps), float(gain)) for steps, gain in zip(k, change, strict=True)]


def draw_gain_by_occurrence() -> str:
    """The change of the loss from beta2 = 0.95 to 0.99 against k, one line per batch size; the text of an SVG file."""
    with figure_style():
        figure, [[axes]] = panels(1, 1, 3.0)
        axes.axhline(0, color=FAINT, linewidth=1.2)
        for number, batches in enumerate(BATCHES):
            k, change = zip(*gain_by_occurrence(batches), strict=True)
            axes.plot(
                k,
                change,
                color=SERIES_COLOURS[number],
                marker=MARKERS[number],
                markersize=4.5,
                linewidth=1.2,
                label=batches.label,
            )
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [setting(tick) for tick in TICKS])
        axes.minorticks_off()
        axes.set(xlabel="steps between two occurrences of a token", ylabel=f"change of the loss\n({NATS})")
        legend_above(figure, [axes])
        return standalone_svg(captioned_figure("results-beta2-batch-bins", "", "", figure).svg)


def draw_pictures() -> dict[str, str]:
    """The text of every SVG file, by file name."""
    drawn: dict[tuple[str, ...], dict[str, str]] = {}
    for studies in {picture.studies for picture in PICTURES.values()}:
        results = merge_results([STORED / study for study in studies])
        grid = gather_grid([result for result in results if not result.is_candidate])
        names = {picture.figure for picture in PICTURES.values() if picture.studies == studies}
        drawn[studies] = {figure.name: standalone_svg(figure.svg) for figure in draw_figures(grid, only=names)}
    svgs = {name: drawn[picture.studies][picture.figure] for name, picture in PICTURES.items()}
    svgs["beta2-batch-bins"] = draw_gain_by_occurrence()
    return {f"results-{name}.svg": svg for name, svg in svgs.items()}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/results.md from the stored runs.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder to write to (default: %(default)s)")
    arguments = parser.parse_args()
    for name, svg in draw_pictures().items():
        write_whole(arguments.out / name, svg)


if __name__ == "__main__":
    main()
