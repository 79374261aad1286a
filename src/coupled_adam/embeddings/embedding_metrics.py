"""The record that `measure` returns: every measure of one embedding matrix, with its equation.

Legend: V vocabulary rows, H hidden size, E (V, H) the matrix, e_i its rows, mu their mean, sigma its singular values,
p_i the share of token i in the text, corr Pearson's correlation.

Display names and the better direction of each number are in `coupled_adam.metrics`.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.embeddings.word_similarity import WordSimilarity


@dataclass(frozen=True, eq=False)
class EmbeddingMetrics:
    """Measures of one embedding matrix; None if a measure is not available.

    All V rows count, including zero rows, padding and tokens that never occur, unless a field says otherwise.
    """

    shape: tuple[int, int]
    """(V, H)."""
    iso: float
    """ISO = min_c Z(c) / max_c Z(c), Z(c) = sum_i exp(c^T e_i), over the eigenvectors c of E^T E (Eq. isotropy).

    The sign of an eigenvector is arbitrary and Z(c) != Z(-c), so the sign with c^T mu >= 0 is chosen. If |c^T mu| is
    below 1e-7 of the mean length, the direction with the larger Z is chosen. In [0, 1]; 1 is isotropic.
    """
    iso_both_signs: float
    """The same with minimum and maximum over c and -c of all eigenvectors: never larger than `iso`."""
    mu_norm: float
    """|mu|, mu = 1/V sum_i e_i (Eq. mu)."""
    mean_norm: float
    """1/V sum_i |e_i|."""
    mu_norm_ratio: float | None
    """|mu| / (1/V sum_i |e_i|), in [0, 1]. None if all rows are zero."""
    kappa: float | None
    """100 min(sigma) / max(sigma), in percent (Eq. kappa).

    0 for a rank-deficient matrix, None if all rows are zero.
    """
    rho: float | None
    """100 corr(|e_i|, p_i) over all rows (Eq. rho). None without `unigram`, or if one of the two is constant."""
    rho_log: float | None
    """100 corr(|e_i|, log(p_i + 1e-10)) over all rows, as in the published tables. None as for `rho`."""
    r_cos: float | None
    """Mean over SimLex-999, MEN, WordSim-353 and RW of 100 corr(cos(e_a, e_b), human score of the words a, b).

    None if one of the four is missing or has fewer than three usable pairs.
    """
    r_cos_5: float | None
    """Mean over MEN, RW, SimLex-999, WordSim-353 similarity and WordSim-353 relatedness, as in the authors' code."""
    spearman: float | None
    """Like `r_cos`, with Spearman's rank correlation."""
    word_similarity: dict[str, WordSimilarity]
    """Result of each benchmark in `word_pairs`, with the number of usable pairs."""
    iso_score: float | None
    """IsoScore (Rudman et al. 2022) = ((tr S)^2 / |S|_F^2 - 1) / (H - 1), S = sum_i (e_i - mu)(e_i - mu)^T.

    Their steps (reorientation, normalised variances, defect, rescaling) reduce to this. From 0 (all variance in one
    direction) to 1 (equal in all). None for H = 1, or if all rows are equal.
    """
    mean_cosine: float | None
    """Mean cosine of two different rows, over all pairs: (|sum_i e_i / |e_i||^2 - n) / (n (n - 1)).

    Over the n rows that are not zero. None for n < 2.
    """
    singular_values: npt.NDArray[np.float64]
    """sigma, largest first, (min(V, H),). Those below H * 2^-52 of the largest are 0."""
    norms: npt.NDArray[np.float64]
    """|e_i|, (V,)."""
    zero_rows: int
    """Number of rows that are zero in all entries."""
    unseen_rows: int | None
    """Number of rows with count 0 in `unigram`: tokens that never occur, and padding. None without `unigram`."""

    def to_dict(self, *, arrays: bool = False) -> dict[str, Any]:
        """Convert all fields to JSON values; with arrays=True also `singular_values` and `norms`, as lists."""
        record: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                if arrays:
                    record[field.name] = value.tolist()
            elif field.name == "word_similarity":
                record[field.name] = {name: asdict(result) for name, result in value.items()}
            else:
                record[field.name] = list(value) if isinstance(value, tuple) else value
        return record
