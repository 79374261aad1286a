"""Draw the pictures of docs/results.md from the stored runs:

    python docs/results/pictures.py

A picture is a figure of the report of one or more stored studies. Not drawn here: the overview (overview.py), and the
pictures of single embeddings, whose arrays are too large to store.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.captioned_figure import standalone_svg
from coupled_adam.base.files import write_whole
from coupled_adam.report.figures.figure_list import draw_figures
from coupled_adam.report.grid import gather_grid
from coupled_adam.study.results import merge_results

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
    "partial-validation-loss": Picture("validation_loss", PARTIAL),
    "learning-rates": Picture("learning_rates", ("learning-rates",)),
    "best-ranking": Picture("ranking", ("best-learning-rates",)),
    "loss-by-frequency": Picture("loss_by_frequency", ("best-learning-rates",)),
    "muon-validation-loss": Picture("validation_loss", ("muon",)),
    "muon-loss-by-frequency": Picture("loss_by_frequency", ("muon",)),
    "rivals-ranking": Picture("ranking", ("rivals",)),
    "rivals-loss-by-frequency": Picture("loss_by_frequency", ("rivals",)),
    "rivals-quantised": Picture("quantised_costs", ("rivals",)),
    "table-beta2": Picture("primary_differences", ("table-beta2",)),
    "unigram-bias": Picture("ranking", (*PARTIAL, "unigram-bias")),
    "few-steps": Picture("ranking", ("few-steps",)),
    "125m-validation-loss": Picture("validation_loss", ("single-gpu-125m",)),
    "untied-heads": Picture("mean_ratio_over_training", ("untied-heads",)),
    "scale-exponent": Picture("ablation_scale", ("single-gpu", "single-gpu-scaled")),
}
"""By file name, without the prefix `results-`."""


def draw_pictures() -> dict[str, str]:
    """The text of every SVG file, by file name."""
    drawn: dict[tuple[str, ...], dict[str, str]] = {}
    for studies in {picture.studies for picture in PICTURES.values()}:
        results = merge_results([STORED / study for study in studies])
        grid = gather_grid([result for result in results if not result.is_candidate])
        names = {picture.figure for picture in PICTURES.values() if picture.studies == studies}
        drawn[studies] = {figure.name: standalone_svg(figure.svg) for figure in draw_figures(grid, only=names)}
    return {f"results-{name}.svg": drawn[picture.studies][picture.figure] for name, picture in PICTURES.items()}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/results.md from the stored runs.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder to write to (default: %(default)s)")
    arguments = parser.parse_args()
    for name, svg in draw_pictures().items():
        write_whole(arguments.out / name, svg)


if __name__ == "__main__":
    main()
