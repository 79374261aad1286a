"""The bounds that screen out most eigenvectors: they are valid and tight, and never screen out the extremes.

Legend: V vocabulary rows, H hidden size.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from measure_matrices import MATRICES, H, normal, trained_like
from torch import Tensor

from coupled_adam.embeddings import isotropy, measure, screening
from coupled_adam.embeddings.embedding_matrix import EmbeddingMatrix, open_table
from coupled_adam.embeddings.moments import Moments, moments_of
from coupled_adam.embeddings.partition import log_partition
from coupled_adam.embeddings.spectrum import Spectrum, spectrum_of


@dataclass
class Prepared:
    """A matrix and its statistics before ISO."""

    table: EmbeddingMatrix
    moments: Moments
    spectrum: Spectrum
    first: Tensor
    second: Tensor
    longest: float
    z: Tensor
    """Z / V in float64 for every eigenvector and its opposite, (2, H)."""

    def candidates(self) -> Tensor:
        return screening.candidates(self.table, self.moments, self.spectrum, self.first[0], None)


def prepare(E: np.ndarray) -> Prepared:
    table = open_table(E, None, 512)
    moments = moments_of(table, None)
    spectrum = spectrum_of(table, moments.gram, None)
    first = spectrum.eigenvectors.T @ moments.mean
    z = log_partition(table, spectrum.eigenvectors, first, None).both().exp() / table.V
    second = spectrum.eigenvalues / table.V
    return Prepared(table, moments, spectrum, torch.stack([first, -first]), second, float(moments.norms.max()), z)


SCALED = {
    "short": 0.01 * normal(),
    "shorter than float32 resolves": 1e-9 * normal(),
    "about one long": normal() / 7,
    "long": 6 * normal(),
    "shifted": normal() / 7 + 0.1,
    "float32": trained_like().astype(np.float32),
    "zero": np.zeros((20, 8)),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_bounds_are_valid(name: str) -> None:
    known = prepare(SCALED[name])
    of_moments = screening.moment_bounds(known.first, known.second, known.longest)
    of_products = screening.float32_bounds(
        known.table, known.spectrum.eigenvectors, known.first, known.second, known.longest, None
    )
    for lower, upper in (of_moments, of_products):
        assert torch.all(lower <= known.z)
        assert torch.all(known.z <= upper)


@pytest.mark.parametrize("name", ["short", "about one long", "shifted"])
def test_the_error_of_coarse_products_is_as_small_as_derived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the entries to bfloat16 makes the errors visible; those of float32 are too small."""
    known = prepare(SCALED[name])
    coarse = EmbeddingMatrix(torch.from_numpy(SCALED[name]).bfloat16(), known.table.device, 512)
    means = screening.float32_means(coarse, known.spectrum.eigenvectors.bfloat16().double(), None)
    monkeypatch.setattr(screening, "float32_means", lambda *_: means)
    monkeypatch.setattr(screening, "ROUNDING", 0.0)  # the bounds then collapse to the estimate between them
    _, estimate = screening.float32_bounds(
        known.table, known.spectrum.eigenvectors, known.first, known.second, known.longest, None
    )
    d = 2.0**-8 * known.longest
    error = (estimate - known.z).abs()
    assert torch.all(error <= d * (known.z - 1 - known.first) + d**2 * known.z)
    assert error.max() < (means[0] - known.z).abs().max() / 10


def test_the_bounds_are_tight_for_short_rows() -> None:
    known = prepare(normal() / 7)
    lower, upper = screening.float32_bounds(
        known.table, known.spectrum.eigenvectors, known.first, known.second, known.longest, None
    )
    assert float((upper - lower).max()) < 5e-6


@pytest.mark.parametrize("name", MATRICES)
def test_the_extremes_are_never_screened_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    E = MATRICES[name]()
    screened = measure(E)
    monkeypatch.setattr(isotropy, "candidates", lambda table, *_: torch.arange(table.H))
    full = measure(E)
    assert (screened.iso, screened.iso_both_signs) == pytest.approx((full.iso, full.iso_both_signs), rel=1e-13)


@pytest.mark.parametrize(
    ("E", "most"), [(normal(4000, 256), 8), (normal(4000, 256) / 16 + 0.1, 8), (trained_like(), 6)]
)
def test_few_eigenvectors_are_left(E: np.ndarray, most: int) -> None:
    known = prepare(E)
    chosen = known.candidates()
    assert len(chosen) <= most
    log_z = known.z.log()
    assert {int(log_z.min(1).indices[0]), int(log_z.max(1).indices[0])} & set(chosen.tolist())


def test_float32_is_not_trusted_if_torch_may_round_products_further() -> None:
    known = prepare(normal())
    few = len(known.candidates())
    torch.set_float32_matmul_precision("medium")
    try:
        assert len(known.candidates()) > 4 * few
    finally:
        torch.set_float32_matmul_precision("highest")


def test_long_rows_are_not_screened() -> None:
    assert len(prepare(40 * normal()).candidates()) == H
