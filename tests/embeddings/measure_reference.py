"""A literal float64 reference of the measures: an SVD of the matrix, and all pairs of rows.

Legend: V vocabulary rows, H hidden size.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import pearsonr, spearmanr

NO_DIRECTION = 1e-7
# Word pairs, tokenizer and corpus; see .ci/run.
TEST_DATA = os.environ.get("COUPLED_ADAM_TEST_DATA")
needs_test_data = pytest.mark.skipif(TEST_DATA is None, reason="COUPLED_ADAM_TEST_DATA names no folder with word pairs")


def data_path(*parts: str) -> Path:
    assert TEST_DATA is not None
    return Path(TEST_DATA, *parts)


def reference(E: Any, counts: Any = None) -> dict[str, Any]:
    """All measures except word similarity. E is any array, (V, H)."""
    E = np.asarray(E, np.float64)
    V, H = E.shape
    norms = np.sqrt((E**2).sum(1))
    mu = E.mean(0)
    sigma = np.linalg.svd(E, compute_uv=False)
    iso, iso_both_signs = isotropies(E)
    result = {
        "shape": (V, H),
        "iso": iso,
        "iso_both_signs": iso_both_signs,
        "mu_norm": np.linalg.norm(mu),
        "mean_norm": norms.mean(),
        "mu_norm_ratio": np.linalg.norm(mu) / norms.mean(),
        "kappa": 100 * sigma.min() / sigma.max(),
        "iso_score": iso_score(E),
        "mean_cosine": mean_cosine(E),
        "singular_values": sigma,
        "norms": norms,
        "zero_rows": int((norms == 0).sum()),
    }
    if counts is not None:
        p = counts / counts.sum()
        result["rho"] = 100 * pearsonr(norms, p).statistic
        result["rho_log"] = 100 * pearsonr(norms, np.log(p + 1e-10)).statistic
        result["unseen_rows"] = int((counts == 0).sum())
    return result


def isotropies(E: np.ndarray) -> tuple[float, float]:
    """ISO with each eigenvector turned towards the mean, and over both directions."""
    eigenvectors = np.linalg.svd(E, full_matrices=len(E) < E.shape[1])[2].T  # all H of them, as columns
    log_z, log_z_opposite = logsumexp(E @ eigenvectors, 0), logsumexp(-E @ eigenvectors, 0)
    towards_mean = E.mean(0) @ eigenvectors
    turned = np.where(towards_mean > 0, log_z, log_z_opposite)
    no_direction = np.abs(towards_mean) <= NO_DIRECTION * np.sqrt((E**2).sum(1)).mean()
    turned[no_direction] = np.maximum(log_z, log_z_opposite)[no_direction]
    both = np.concatenate([log_z, log_z_opposite])
    return np.exp(turned.min() - turned.max()), np.exp(both.min() - both.max())


def iso_score(E: np.ndarray) -> float:
    """Algorithm 1 of Rudman et al. 2022, step by step."""
    n = E.shape[1]
    variances = np.linalg.svd(E - E.mean(0), compute_uv=False) ** 2
    variances = np.pad(variances, (0, n - len(variances)))
    normalised = np.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalised - 1) / np.sqrt(2 * (n - np.sqrt(n)))
    phi = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n**2
    return float((n * phi - 1) / (n - 1))


def mean_cosine(E: np.ndarray) -> float:
    """Over all pairs of different rows that are not zero."""
    E = E[np.abs(E).max(1) > 0]
    unit = E / np.linalg.norm(E, axis=1, keepdims=True)
    cosines = unit @ unit.T
    return float(cosines[~np.eye(len(E), dtype=bool)].mean())


def word_correlations(E: np.ndarray, ids: dict[str, int], pairs: list[tuple[str, str, float]]) -> tuple[float, float]:
    """Pearson and Spearman times 100 over the pairs whose words have an id."""
    cosines, scores = [], []
    for a, b, score in pairs:
        if a in ids and b in ids:
            x, y = E[ids[a]].astype(np.float64), E[ids[b]].astype(np.float64)
            cosines.append(round(x @ y / np.linalg.norm(x) / np.linalg.norm(y), 12))  # equal for (a, b) and (b, a)
            scores.append(score)
    return 100 * pearsonr(cosines, scores).statistic, 100 * spearmanr(cosines, scores).statistic


def assert_close(metrics: Any, expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Assert that every expected field agrees, to a relative tolerance."""
    for name, value in expected.items():
        assert np.asarray(getattr(metrics, name)) == pytest.approx(np.asarray(value), rel=tolerance, abs=1e-13), name
