"""Draw the overview of the stored results, and print the same numbers as a Markdown table:

    python docs/results/overview.py

Every block is one setting in which Coupled Adam and partially coupled Adam were compared with AdamW, in some blocks
also a table without momentum and AdamW with other betas for the table. All comparisons of the table are one family
for Holm's correction. results-overview.svg shows all blocks; results-loss-and-similarity.svg shows loss and embeddings
of those with most optimizers, for the README.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import (
    FAINT,
    MARKERS,
    captioned_figure,
    figure_style,
    legend_above,
    panels,
    standalone_svg,
)
from coupled_adam.base.files import write_whole
from coupled_adam.base.notation import MINUS, to_markdown
from coupled_adam.base.text import shorthand
from coupled_adam.metrics import METRICS, NATS
from coupled_adam.report.figures.forest import ForestGroup, ForestRow, draw_forest
from coupled_adam.report.figures.style import COLOURS
from coupled_adam.report.grid import CellRuns, Grid, gather_grid
from coupled_adam.report.primary_comparisons import LOSS, PrimaryComparison, as_one_family, primary_comparisons
from coupled_adam.report.run_files import curve_of
from coupled_adam.report.significance import summarise
from coupled_adam.study.results import merge_results

STORED = Path(__file__).parent
IMAGES = STORED.parent / "images"
BASELINE = "standard"
OPTIMIZERS = {
    "coupled": ("Coupled Adam", COLOURS["coupled"][0]),
    "partial y=0.25 mean-free": ("partially coupled Adam", COLOURS["family"][0]),
    "y=1 mean-free": ("row exponent 1, mean-free", COLOURS["family"][0]),
    "standard": ("AdamW", COLOURS["standard"][0]),
    "standard b2=0.99": ("AdamW, β₂ = 0.99 for the table", COLOURS["standard"][1]),
    "standard b1=0 b2=0.99": ("AdamW, β₁ = 0, β₂ = 0.99 for the table", COLOURS["standard"][2]),
    "factored mean-free b1=0 b2=0.99": ("factored without momentum", COLOURS["family"][1]),
}
"""Label and colour by the name in the study, without the learning rate."""
COLUMNS = (
    "coupled",
    "partial y=0.25 mean-free",
    "factored mean-free b1=0 b2=0.99",
    "standard b2=0.99",
    "standard b1=0 b2=0.99",
)
COUPLED, PARTIAL, FACTORED, LONGER_MEMORY, BOTH_BETAS = COLUMNS
DRAWN = {name: OPTIMIZERS[name] for name in (BASELINE, LONGER_MEMORY, BOTH_BETAS, COUPLED, PARTIAL, FACTORED)}
"""The optimizers of the picture of loss and embeddings, in the order of its legend."""
NOT_MEASURED = "\N{EN DASH}"
LIMITS = (-0.3, 0.42)
WIDTH = 8.2  # inches
SIMILARITY = METRICS["r_cos"]


@dataclass(frozen=True)
class Block:
    """One setting: stored studies, the dataset size, and the optimizer of each column, None if it was not measured."""

    heading: str
    folders: tuple[str, ...]
    tokens: int
    optimizers: tuple[str | None, ...] = (COUPLED, PARTIAL, None, None, None)


MOST_OPTIMIZERS = {
    "30M, 82M tokens, best table lr each": "82M tokens",
    "30M, 82M tokens, Muon for the matrices, best table lr each": "82M tokens, Muon",
    "30M, 262M tokens, lr 1e-3": "262M tokens",
}
"""The blocks of the picture of loss and embeddings, and the titles of their panels, from left to right."""


@dataclass(frozen=True)
class BlockResult:
    """A block with its numbers."""

    block: Block
    steps: int
    baseline: CellRuns
    comparisons: tuple[PrimaryComparison | None, ...]
    """One for each column of the table."""


AT_ONE_RATE = ("single-gpu", "partially-coupled", "single-gpu-beta2")
BLOCKS = (
    Block("125M GPT-2, 500 steps", ("few-steps",), 49_152_000, (COUPLED, "y=1 mean-free", FACTORED, None, BOTH_BETAS)),
    Block("30M, 41M tokens, best lr each", ("learning-rates",), 41_000_000),
    Block("30M, 82M tokens, lr 1e-3", AT_ONE_RATE, 82_000_000),
    Block("30M, 82M tokens, best lr each", ("best-learning-rates",), 82_000_000),
    Block("30M, 82M tokens, best table lr each", ("rivals", "table-beta2-30m"), 82_000_000, COLUMNS),
    Block("30M, 262M tokens, lr 1e-3", AT_ONE_RATE, 262_000_000, (*COLUMNS[:4], None)),
    Block("30M, 82M tokens, Muon for the matrices, best table lr each", ("muon",), 82_000_000, (*COLUMNS[:4], None)),
    Block("125M, 250M tokens", ("single-gpu-125m",), 250_000_000, (COUPLED, PARTIAL, FACTORED, None, None)),
)


def read_block(block: Block) -> BlockResult:
    """Compare the best run of each optimizer with the best run of AdamW, all with the block's dataset size."""
    results = merge_results([STORED / folder for folder in block.folders])
    grid = gather_grid([result for result in results if not result.is_candidate])
    baseline = best_cell(grid, block.tokens, BASELINE)
    compared = {(each.baseline.name, each.optimizer.name): each for each in primary_comparisons(grid)}
    cells = [None if name is None else best_cell(grid, block.tokens, name) for name in block.optimizers]
    measured = [baseline, *(cell for cell in cells if cell is not None)]
    steps = {max(curve_of(run.run_folder, "val", "loss")) for cell in measured for run in cell.runs.values()}
    if len(steps) > 1:
        raise ValueError(f"{block.heading}: the runs end at steps {sorted(steps)}, so they cannot be compared")
    comparisons = tuple(None if cell is None else compared[baseline.name, cell.name] for cell in cells)
    return BlockResult(block, steps.pop(), baseline, comparisons)


def in_one_family(results: Sequence[BlockResult]) -> list[BlockResult]:
    """Correct the p-values of all blocks together."""
    corrected = iter(as_one_family([each for found in results for each in found.comparisons if each is not None]))
    return [
        replace(found, comparisons=tuple(None if each is None else next(corrected) for each in found.comparisons))
        for found in results
    ]


def best_cell(grid: Grid, tokens: int, optimizer: str) -> CellRuns:
    """The cell of an optimizer with the lowest mean test loss: one of several if the study varies the learning rate."""
    cells = [cell for cell in grid.finished.cells if cell.size.tokens == tokens]
    own = [cell for cell in cells if re.sub(r" lr=\S+$", "", cell.variant.name) == optimizer]
    losses = [(summarise(cell.values(LOSS.key).values()).mean, cell) for cell in own]
    return min(((mean, cell) for mean, cell in losses if mean is not None), key=lambda each: each[0])[1]


def difference_text(found: BlockResult, each: PrimaryComparison) -> str:
    """Difference and 95% interval, and the number of common seeds if AdamW has more. No interval for one seed."""
    assert each.difference is not None
    text = signed(each.difference)
    if each.comparison.paired_interval is not None:
        low, high = each.comparison.paired_interval
        text += f" ({signed(low)} to {signed(high)})"
    seeds = each.comparison.pairs
    return text if seeds == len(found.baseline.runs) else f"{text}, {seeds_text(seeds)}"


def seeds_text(count: int) -> str:
    """A number of seeds in words."""
    return "one seed" if count == 1 else f"{count} seeds"


def signed(value: float) -> str:
    """A difference with its sign and three decimals."""
    return f"{value:+.3f}"


def markdown_table(results: Sequence[BlockResult]) -> str:
    """One row per block; significant differences are bold."""
    labels = [OPTIMIZERS[optimizer][0].removesuffix(" for the table") for optimizer in COLUMNS]
    lines = [
        f"| setting | steps | seeds | AdamW loss | {' | '.join(labels)} |",
        f"| --- | ---: | ---: | ---: |{' ---: |' * len(COLUMNS)}",
    ]
    for found in results:
        loss = summarise(found.baseline.values(LOSS.key).values())
        assert loss.mean is not None
        cells = [found.block.heading, f"{found.steps:,}", str(len(found.baseline.runs))]
        cells.append(shorthand(loss.mean, loss.std, LOSS.decimals_of(loss.count)))
        for optimizer, usual, each in zip(found.block.optimizers, COLUMNS, found.comparisons, strict=True):
            if optimizer is None or each is None:
                cells.append(NOT_MEASURED)
                continue
            other = "" if optimizer == usual else f" ({OPTIMIZERS[optimizer][0]})"
            cells.append(to_markdown(difference_text(found, each), bold=each.is_significant) + other)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def forest_group(found: BlockResult) -> ForestGroup:
    """The rows of one block."""
    rows = []
    for optimizer, each in zip(found.block.optimizers, found.comparisons, strict=True):
        if optimizer is None or each is None:
            continue
        assert each.difference is not None
        label, colour = OPTIMIZERS[optimizer]
        interval, numbers = each.comparison.paired_interval, difference_text(found, each).replace("-", MINUS)
        rows.append(ForestRow(label, each.difference, interval, each.is_significant, colour, numbers))
    return ForestGroup(found.block.heading, rows, f"{found.steps:,} steps, {seeds_text(len(found.baseline.runs))}")


def overview_svg(results: Sequence[BlockResult]) -> str:
    """The picture of all blocks as the text of an SVG file."""
    with figure_style():
        figure = draw_forest(
            [forest_group(found) for found in results],
            "test loss minus AdamW's (nats per token)",
            hints=("← better", "worse than AdamW →"),
            numbers_title="difference (95% interval)",
            width=WIDTH,
            limits=LIMITS,
        )
        return standalone_svg(captioned_figure("results-overview", "", "", figure).svg)


def draw_loss_and_similarity(results: Sequence[BlockResult]) -> Figure:
    """Test loss against r_cos in the blocks with most optimizers; hollow points are single seeds."""
    by_heading = {found.block.heading: found for found in results}
    shown = [by_heading[heading] for heading in MOST_OPTIMIZERS]
    figure, [row] = panels(1, len(shown), 2.7)
    figure.set_figwidth(WIDTH)
    for axes, found in zip(row, shown, strict=True):
        cells = {BASELINE: found.baseline}
        cells |= {
            name: each.optimizer
            for name, each in zip(found.block.optimizers, found.comparisons, strict=True)
            if name is not None and each is not None
        }
        for number, (name, (label, colour)) in enumerate(DRAWN.items()):
            if name not in cells:
                continue
            similarity, loss = (summarise(cells[name].values(key).values()) for key in (SIMILARITY.key, LOSS.key))
            assert similarity.mean is not None
            assert loss.mean is not None
            axes.errorbar(
                similarity.mean,
                loss.mean,
                xerr=similarity.std,
                yerr=loss.std,
                marker=MARKERS[number % len(MARKERS)],
                color=colour,
                markerfacecolor="none" if loss.count == 1 else colour,
                markersize=7,
                elinewidth=1,
                capsize=2.5,
                linestyle="none",
                label=label,
            )
        axes.set(title=MOST_OPTIMIZERS[found.block.heading], xlabel=SIMILARITY.heading)
    row[0].set(ylabel=f"{LOSS.label} (↓), {NATS}")
    row[-1].plot([], [], "o", color=FAINT, markerfacecolor="none", markersize=7, label="hollow: one seed")
    legend_above(figure, row)
    return figure


def main() -> None:
    """Write the pictures and print the table."""
    parser = argparse.ArgumentParser(description="Draw the overview of the stored results, and print it as a table.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder to write to (default: %(default)s)")
    arguments = parser.parse_args()
    results = in_one_family([read_block(block) for block in BLOCKS])
    write_whole(arguments.out / "results-overview.svg", overview_svg(results))
    with figure_style():
        figure = captioned_figure("results-loss-and-similarity", "", "", draw_loss_and_similarity(results))
    write_whole(arguments.out / "results-loss-and-similarity.svg", standalone_svg(figure.svg))
    print(markdown_table(results))


if __name__ == "__main__":
    main()
