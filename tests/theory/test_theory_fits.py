"""Fits through the origin, mutual information and summaries, compared with numpy, scipy and known values."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from coupled_adam.theory import fits
from coupled_adam.theory.fits import fit_through_origin, spread, summarise, theorem_fit

RANDOM = np.random.default_rng(5)
P = RANDOM.dirichlet(np.full(300, 0.3))
Y = 0.7 * P + 0.002 * RANDOM.random(300)


def test_slope_equals_least_squares_without_intercept():
    by_lstsq = np.linalg.lstsq(P[:, None], Y, rcond=None)[0][0]
    by_scipy = scipy.optimize.curve_fit(lambda p, A: A * p, P, Y)[0][0]
    slope = fit_through_origin(Y, P).A
    assert slope == pytest.approx(by_lstsq, rel=1e-12)
    assert slope == pytest.approx(by_scipy, rel=1e-6)


def test_r2_is_uncentred_and_the_centred_one_is_also_given():
    fit = fit_through_origin(Y, P)
    residual = sum((y - fit.A * p) ** 2 for y, p in zip(Y, P, strict=True))
    assert fit.r2 == pytest.approx(1 - residual / sum(y**2 for y in Y), rel=1e-12)
    assert fit.r2_centred == pytest.approx(1 - residual / sum((y - sum(Y) / len(Y)) ** 2 for y in Y), rel=1e-9)


def test_a_constant_has_an_uncentred_r2_near_zero_like_the_papers_x_true():
    # 0.003 in the paper: (sum p)^2 / (V sum p^2) of a long-tailed p.
    fit = fit_through_origin(np.full(300, 0.9), P)
    assert fit.r2 == pytest.approx(1 / (300 * np.square(P).sum()), rel=1e-9)
    assert fit.r2_centred is None


def test_tokens_never_seen_are_left_out():
    holes = Y.copy()
    holes[::3] = np.nan
    seen = np.isfinite(holes)
    assert fit_through_origin(holes, P) == fit_through_origin(Y[seen], P[seen])
    assert fit_through_origin(holes, P).count == 200


def test_nothing_to_fit_gives_none_and_no_nan():
    fit = fit_through_origin(np.full(10, np.nan), P[:10])
    assert (fit.A, fit.r2, fit.r2_centred, fit.mutual_information, fit.count) == (None, None, None, None, 0)
    assert fit_through_origin(np.zeros(10), P[:10]).r2 is None


def test_mutual_information_of_gaussians_matches_the_known_value():
    pytest.importorskip("sklearn")
    correlation = 0.9
    x, noise = RANDOM.standard_normal((2, 3000))
    y = correlation * x + math.sqrt(1 - correlation**2) * noise
    # Adam's second moments are as small as 1e-9: the estimate must not depend on the units.
    found = fits.mutual_information(1e-9 * y, x)
    assert found == pytest.approx(-math.log(1 - correlation**2) / 2, abs=0.06)
    assert fits.mutual_information(noise, x) < 0.05


def test_mutual_information_is_none_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(fits, "has_scikit_learn", lambda: False)
    fit = fit_through_origin(Y, P)
    assert fit.mutual_information is None
    assert fit.r2 is not None


def test_theorem_fit_against_scipy():
    measured = np.exp(RANDOM.normal(-20, 3, 200))
    predicted = measured * np.exp(RANDOM.normal(0, 0.2, 200))
    measured[3] = 0.0  # a probability too small for float32: it has no logarithm but counts in the fit
    found = theorem_fit(measured, predicted)
    slope = (measured * predicted).sum() / (predicted**2).sum()
    assert found.slope == pytest.approx(slope, rel=1e-12)
    assert found.r2 == pytest.approx(1 - ((measured - slope * predicted) ** 2).sum() / (measured**2).sum(), rel=1e-12)
    kept = measured > 0
    logs = np.log(measured[kept]), np.log(predicted[kept])
    assert found.log_correlation == pytest.approx(scipy.stats.pearsonr(*logs).statistic, rel=1e-9)
    assert found.median_ratio == pytest.approx(np.median(predicted[kept] / measured[kept]), rel=1e-12)


def test_a_summary_has_mean_and_sample_deviation():
    values = [0.8, 0.9, 1.0, 0.7]
    assert spread(values).mean == pytest.approx(np.mean(values))
    assert spread(values).std == pytest.approx(np.std(values, ddof=1))
    assert spread([0.5]).std is None
    assert summarise([]) == {}
