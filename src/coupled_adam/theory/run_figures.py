"""All figures of one run's theory, with their titles and captions.

What is shown of single tokens is that of the last checkpoint. Over training, other runs stand beside this one.

Letters: V rows of the table, padding included.
"""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from coupled_adam.base.captioned_figure import CaptionedFigure, captioned_figure, figure_style
from coupled_adam.base.text import short
from coupled_adam.theory import theory_plots
from coupled_adam.theory.record import RunTheory
from coupled_adam.theory.theory_folder import Counts, TokenArrays
from coupled_adam.theory.toy_figure import draw_gradients_example

CAPTIONS = {
    "gradients_example": (
        "A toy model in two dimensions",
        "Left: a hidden state h, three embeddings and their updates. The true token moves along h, the others against "
        "it. Right: the updates laid end to end along h. With SGD and Coupled Adam they come back to where they "
        "started; with Adam, whose small second moments make rare tokens move further, they do not.",
    ),
    "gradient_sums": (
        "Sums of gradients",
        "Over the vocabulary, a point for each batch, relative to the sum of the lengths. What comes through the "
        "output layer sums to zero up to rounding; what comes through the input layer does not.",
    ),
    "update_sums": (
        "Sums of updates over training",
        "How far the mean embedding would move in the next step, as a part of how far an embedding moves on average. "
        "At each checkpoint all three optimizers start from the same gradients and moments. The parts that come "
        "through the output and the input layer add up as vectors, where both have one table.",
    ),
    "prior": (
        "The unigram probability",
        "Of every token of the corpus, and sorted. {unseen}",
    ),
    "second_moment": (
        "The second moment against the unigram probability",
        "A point for each token, after {tokens} tokens; on the right in logarithms, with the median over tokens of "
        "similar p̃. The fit minimises plain squares, so the most frequent tokens decide it.",
    ),
    "second_moment_constant": (
        "The constant A over training",
        "Of the fit E[v] = A p̃ at each checkpoint.",
    ),
    "conditional_expectations": (
        "X against the unigram probability",
        "p is the probability that the model predicts. Left: how wrong it is where the token is the true one; that "
        "should not depend on how frequent the token is. Right: where it is not; that should be proportional. After "
        "{tokens} tokens.",
    ),
    "theorem": (
        "The Theorem",
        "Measured E[g²] of every row of the table against the right-hand side, both averaged over the width; p̃ is here "
        "the frequency in the measured batches. After {tokens} tokens.",
    ),
}
"""Title and caption of every figure."""


def draw_run_figures(
    run: RunTheory, arrays: TokenArrays, counts: Counts, together: Mapping[str, RunTheory]
) -> dict[str, CaptionedFigure]:
    """Every figure by its name.

    Args:
        run: what was measured; at least one checkpoint.
        arrays: of its last checkpoint.
        counts: how often each token occurs in the corpus; those of the table's first rows.
        together: the runs to show over training, by name; this one among them.
    """
    last = run.checkpoints[-1]
    fits = last.fits
    p = counts / counts.sum()
    tokens = slice(len(p))  # rows after these are padding
    words = {"tokens": short(last.tokens_seen), "unseen": _unseen(counts)}
    with figure_style():
        drawn: dict[str, Figure] = {
            "gradients_example": draw_gradients_example(),
            "gradient_sums": theory_plots.draw_gradient_sums(run),
            "update_sums": theory_plots.draw_update_sums(together),
            "prior": theory_plots.draw_prior(counts),
            "second_moment": theory_plots.draw_second_moment(p, arrays.second_moment[tokens], fits["second_moment"]),
            "second_moment_constant": theory_plots.draw_A(together),
            "conditional_expectations": theory_plots.draw_x(p, arrays.x_true[tokens], arrays.x_false[tokens], fits),
            "theorem": theory_plots.draw_theorem(arrays.squared_gradient, arrays.squared_gradient_predicted),
        }
        assert drawn.keys() == CAPTIONS.keys()
        return {
            name: captioned_figure(name, CAPTIONS[name][0], CAPTIONS[name][1].format_map(words), figure)
            for name, figure in drawn.items()
        }


def _unseen(counts: Counts) -> str:
    unseen = int(np.count_nonzero(counts == 0))
    return f"{unseen:,} of {len(counts):,} tokens never occur and are not shown." if unseen else "All tokens occur."
