"""The paper's toy example: one hidden state, three embeddings in two dimensions, and the updates of each optimizer.

Everything is computed: probabilities by the softmax, gradients by g_i = -(delta_it - p_i) h, updates by each
optimizer's formula. Adam's second moments are proportional to the unigram probability of the token, as in a real model.

Letters: V = 3 tokens, H = 2 dimensions, i a token, t the true one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coupled_adam.theory.record import Optimizer

Floats = NDArray[np.float64]

HIDDEN = np.array([1.0, 0.55])  # (H,)
EMBEDDINGS = np.array([[1.45, 1.0], [0.45, 1.55], [1.25, -0.75]])  # (V, H)
UNIGRAM = np.array([0.80, 0.05, 0.15])  # (V,): the true token is frequent, the others are rare
TRUE = 0
EPS = 1e-8
TOTAL_LENGTH = 1.9
"""Total length of the three updates of an optimizer: only their relative lengths matter here, not learning rates."""


@dataclass(frozen=True, eq=False)
class Toy:
    """The example."""

    hidden: Floats  # (H,)
    embeddings: Floats  # (V, H)
    probabilities: Floats  # (V,)
    updates: dict[Optimizer, Floats]  # (V, H) each

    def along_hidden(self, optimizer: Optimizer) -> Floats:
        """Movement of each embedding in the direction of h, (V,)."""
        return self.updates[optimizer] @ self.hidden / np.linalg.norm(self.hidden)

    def relative_sum(self, optimizer: Optimizer) -> float:
        """|sum_i u_i| / sum_i |u_i|."""
        updates = self.updates[optimizer]
        return float(np.linalg.norm(updates.sum(axis=0)) / np.linalg.norm(updates, axis=1).sum())


def toy_example() -> Toy:
    """Compute the example.

    Example:
        >>> toy = toy_example()
        >>> [f"{toy.relative_sum(name):.2f}" for name in ("sgd", "adam", "coupled")]
        ['0.00', '0.54', '0.00']
    """
    logits = EMBEDDINGS @ HIDDEN
    probabilities = np.exp(logits) / np.exp(logits).sum()
    is_true = np.arange(len(EMBEDDINGS)) == TRUE
    gradients = -(is_true - probabilities)[:, None] * HIDDEN  # (V, H)
    second_moment = np.repeat(UNIGRAM[:, None], 2, axis=1)  # (V, H); the constant A cancels, see TOTAL_LENGTH
    updates: dict[Optimizer, Floats] = {
        "sgd": -gradients,
        "adam": -gradients / (np.sqrt(second_moment) + EPS),
        "coupled": -gradients / (np.sqrt(second_moment.mean(axis=0)) + EPS),
    }
    for name, update in updates.items():
        updates[name] = update * TOTAL_LENGTH / np.linalg.norm(update, axis=1).sum()
    return Toy(HIDDEN, EMBEDDINGS, probabilities, updates)
