"""Fig. gradients_example: one hidden state, three embeddings, and the updates of each optimizer.

Left: as in the paper, in two dimensions. Right: all updates are parallel to h, so they are drawn end to end along it.
If the chain returns to zero, the sum of updates vanishes and the mean embedding does not move.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import INK, WIDTH
from coupled_adam.base.text import percent
from coupled_adam.theory.record import OPTIMIZERS, Optimizer
from coupled_adam.theory.theory_plots import COLOURS, NAMES
from coupled_adam.theory.toy import TRUE, Floats, Toy, toy_example

HIDDEN, EMBEDDING = "#3d87c9", "#c8453b"
DARK, LIGHT = "#6b737d", "#b4bac2"  # SGD and Adam, in the paper's greys; visible on white and black
CHAIN_GAP = 0.2
LABEL_PLACES = ((-4, 9), (-2, 10), (-24, 5))  # points from the tip of each embedding


def draw_gradients_example() -> Figure:
    """Draw the toy example."""
    toy = toy_example()
    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    vectors, chains = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_vectors(vectors, toy)
    _draw_chains(chains, toy)
    return figure


def _draw_vectors(axes: Axes, toy: Toy) -> None:
    _arrow(axes, np.zeros(2), toy.hidden, HIDDEN, width=2.2)
    axes.annotate("h", _place(toy.hidden), xytext=(2, -11), textcoords="offset points", color=HIDDEN)
    across = 0.05 * np.array([-toy.hidden[1], toy.hidden[0]]) / np.linalg.norm(toy.hidden)
    for number, embedding in enumerate(toy.embeddings):
        _arrow(axes, np.zeros(2), embedding, EMBEDDING, width=1.6)
        # Side by side, because both are on the same line.
        _arrow(axes, embedding + across, toy.updates["sgd"][number], DARK, width=2.4)
        _arrow(axes, embedding - across, toy.updates["adam"][number], LIGHT, width=2.4)
        label = f"e{'₁₂₃'[number]}" + (", true" if number == TRUE else "")
        beside = LABEL_PLACES[number]
        axes.annotate(label, _place(embedding), xytext=beside, textcoords="offset points", color=EMBEDDING, ha="right")
    for label, colour in (("SGD's update", DARK), ("Adam's update", LIGHT)):
        axes.plot([], [], color=colour, linewidth=2.4, label=label)
    axes.plot([0], [0], "+", color=INK, markersize=9)
    axes.set(aspect="equal", xlim=(-0.85, 2.5), ylim=(-1.5, 1.95), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.legend(loc="lower left", fontsize=8.5, handlelength=1.3, borderaxespad=0)


def _draw_chains(axes: Axes, toy: Toy) -> None:
    for place, optimizer in enumerate(OPTIMIZERS):
        _draw_chain(axes, -float(place), toy.along_hidden(optimizer), optimizer, toy.relative_sum(optimizer))
    axes.set(xlim=(-1.3, 1.3), ylim=(-2.75, 0.7), xticks=[], yticks=[], xlabel="along h, end to end")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _draw_chain(axes: Axes, height: float, moves: Floats, optimizer: Optimizer, relative_sum: float) -> None:
    """Draw the moves (V,) end to end, each a little lower, and mark the end."""
    here = 0.0
    axes.plot([0, 0], [height + 0.1, height - 0.5], color=INK, linewidth=0.8)
    for number, move in enumerate(moves):
        level = height - number * CHAIN_GAP
        _arrow(axes, np.array([here, level]), np.array([move, 0.0]), COLOURS[optimizer], width=1.8)
        here += float(move)
        bottom = level - (CHAIN_GAP if number + 1 < len(moves) else 0)
        axes.plot([here, here], [level, bottom], color=COLOURS[optimizer], linewidth=0.6)
    axes.plot([here], [height - (len(moves) - 1) * CHAIN_GAP], "o", color=COLOURS[optimizer], markersize=5)
    axes.text(-1.3, height + 0.2, NAMES[optimizer], fontsize=9, color=COLOURS[optimizer], fontweight="bold")
    sums = "sum 0" if relative_sum < 1e-9 else f"sum {percent(relative_sum)} of the lengths"
    axes.text(1.3, height + 0.2, sums, fontsize=8.5, ha="right")


def _arrow(axes: Axes, start: Floats, step: Floats, colour: str, width: float) -> None:
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", _place(start + step), _place(start), arrowprops={**arrow, "mutation_scale": 10})


def _place(vector: Floats) -> tuple[float, float]:
    return float(vector[0]), float(vector[1])
