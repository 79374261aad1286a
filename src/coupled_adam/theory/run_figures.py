"""All figures of one run's theory, with their titles and captions.

Figures of single tokens show the last checkpoint. Figures over training can include other runs.

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
        "it. Right: the updates end to end along h. With SGD and Coupled Adam they return to the start; with Adam, "
        "whose small second moments make rare tokens move further, they do not.",
    ),
    "gradient_sums": (
        "Sums of gradients",
        "Over the vocabulary, one point per batch, relative to the sum of the lengths. Gradients from the output layer "
        "sum to zero up to rounding; gradients from the input layer do not.",
    ),
    "update_sums": (
        "Sums of updates over training",
        "Movement of the mean embedding in the next step, relative to the average movement of an embedding. At each "
        "checkpoint, all three optimizers start from the same gradients and moments. If the layers share a table, "
        "their parts add up as vectors.",
    ),
    "prior": (
        "The unigram probability",
        "Left: by token. Right: sorted. {unseen}",
    ),
    "second_moment": (
        "The second moment against the unigram probability",
        "One point per token, after {tokens} training tokens. Right: on logarithmic axes, with the median over tokens "
        "of similar p̃. The plain least-squares fit is dominated by the most frequent tokens.",
    ),
    "second_moment_constant": (
        "The constant A over training",
        "A of the fit E[v] = A p̃ at each checkpoint.",
    ),
    "conditional_expectations": (
        "X against the unigram probability",
        "p is the probability that the model predicts. Left: the error where the token is the true one, which should "
        "not depend on the token's frequency. Right: the error where it is not, which should be proportional to the "
        "frequency. After {tokens} training tokens.",
    ),
    "theorem": (
        "The Theorem",
        "Measured E[g²] of every row of the table against the right-hand side, both averaged over the width; here p̃ is "
        "the frequency in the measured batches. After {tokens} training tokens.",
    ),
}
"""Title and caption of every figure."""


def draw_run_figures(
    run: RunTheory, arrays: TokenArrays, counts: Counts, together: Mapping[str, RunTheory]
) -> dict[str, CaptionedFigure]:
    """Draw all figures, by name.

    Args:
        run: with at least one checkpoint.
        arrays: of its last checkpoint.
        counts: token counts of the corpus, for the first rows of the table.
        together: the runs to show over training, by name, including this one.
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
