"""Matrices that are difficult to measure, each in its own way.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Callable

import numpy as np

Matrix = np.ndarray
V, H = 1500, 48


def normal(V: int = V, H: int = H, seed: int = 0) -> Matrix:
    return np.random.default_rng(seed).standard_normal((V, H))


def zipf_counts(V: int = V) -> Matrix:
    counts = (1e6 / np.arange(1, V + 1)).astype(np.int64)
    counts[-V // 10 :] = 0
    return np.random.default_rng(1).permutation(counts)


def trained_like() -> Matrix:
    """A common shift, a decaying spectrum, and lengths that follow the frequency."""
    spread = normal() * np.linspace(0.3, 0.003, H)
    return 0.2 + spread * (1 + 0.2 * np.log1p(zipf_counts()))[:, None]


MATRICES: dict[str, Callable[[], Matrix]] = {
    "random": normal,
    "random float32": lambda: normal().astype(np.float32),
    "shifted": lambda: normal() + 3 * normal(1, H, seed=2),
    "strongly shifted": lambda: 1e-3 * normal() + normal(1, H, seed=2),
    "centred": lambda: normal() - normal().mean(0),
    "trained like": trained_like,
    "nearly low rank": lambda: normal(V, 5) @ normal(5, H, seed=3) + 1e-3 * normal(),
    "low rank in float32": lambda: (normal(V, 5) @ normal(5, H, seed=3)).astype(np.float32),
    "one long row": lambda: np.concatenate([normal(), 30 * normal(1, H, seed=4)]),
    "long rows": lambda: 40 * normal(),
    "wide": lambda: normal(30, H),
    "two columns": lambda: normal(V, 2),
}
