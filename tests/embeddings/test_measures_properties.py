"""Changes that must not affect a measure: the order of the rows, a rotation, a scale.

Legend: V vocabulary rows, H hidden size.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coupled_adam.embeddings import EmbeddingMetrics, measure

SCALARS = ("iso", "iso_both_signs", "mu_norm", "mean_norm", "mu_norm_ratio", "kappa", "iso_score", "mean_cosine")
seeds = st.integers(0, 2**32 - 1)


def matrix(seed: int) -> np.ndarray:
    """Random size, shift and spread per column."""
    random = np.random.default_rng(seed)
    V, H = int(random.integers(20, 300)), int(random.integers(2, 20))
    spread = 10 ** random.uniform(-2, 0.5, H)
    return random.standard_normal((V, H)) * spread + random.standard_normal(H) * random.choice([0.1, 1, 5])


def assert_same(a: EmbeddingMetrics, b: EmbeddingMetrics, names: tuple[str, ...] = SCALARS) -> None:
    for name in names:
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-6, abs=1e-12), name


@settings(max_examples=30)
@given(seeds)
def test_the_order_of_the_rows_does_not_matter(seed: int) -> None:
    E = matrix(seed)
    order = np.random.default_rng(seed).permutation(len(E))
    counts = np.arange(1, len(E) + 1)
    metrics, permuted = measure(E, unigram=counts), measure(E[order], unigram=counts[order])
    assert_same(metrics, permuted, (*SCALARS, "rho", "rho_log"))
    assert permuted.norms == pytest.approx(metrics.norms[order])


@settings(max_examples=30)
@given(seeds)
def test_a_rotation_changes_nothing(seed: int) -> None:
    E = matrix(seed)
    H = E.shape[1]
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((H, H)))[0]
    metrics, rotated = measure(E), measure(E @ rotation)
    assert_same(metrics, rotated)
    assert rotated.norms == pytest.approx(metrics.norms)
    assert rotated.singular_values == pytest.approx(metrics.singular_values)


@settings(max_examples=30)
@given(seeds, st.floats(1e-3, 1e3))
def test_a_scale_changes_lengths_but_no_ratio(seed: int, scale: float) -> None:
    E = matrix(seed)
    metrics, scaled = measure(E), measure(scale * E)
    assert_same(metrics, scaled, ("mu_norm_ratio", "kappa", "iso_score", "mean_cosine"))
    assert scaled.norms == pytest.approx(scale * metrics.norms)
    assert scaled.mu_norm == pytest.approx(scale * metrics.mu_norm)
    assert scaled.singular_values == pytest.approx(scale * metrics.singular_values)


@settings(max_examples=30)
@given(seeds)
def test_measures_stay_in_their_ranges(seed: int) -> None:
    metrics = measure(matrix(seed))
    assert 0 <= metrics.iso_both_signs <= metrics.iso <= 1
    assert metrics.mu_norm_ratio is not None
    assert 0 <= metrics.mu_norm_ratio <= 1
    assert metrics.kappa is not None
    assert 0 <= metrics.kappa <= 100
    assert metrics.iso_score is not None
    assert 0 <= metrics.iso_score <= 1
    assert metrics.mean_cosine is not None
    assert -1 <= metrics.mean_cosine <= 1


@settings(max_examples=30)
@given(seeds)
def test_iso_score_does_not_depend_on_the_mean(seed: int) -> None:
    E = matrix(seed)
    centred = measure(E - E.mean(0))
    assert centred.mu_norm < 1e-12 * centred.mean_norm + 1e-300
    assert centred.iso_score == pytest.approx(measure(E).iso_score, rel=1e-6)
