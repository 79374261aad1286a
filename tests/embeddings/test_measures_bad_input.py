"""What a user can get wrong about the matrix and the counts, each an error that says what, where and what to do."""

from typing import Any

import numpy as np
import pytest
import torch

from coupled_adam.embeddings import WordPairs, measure

E = np.random.default_rng(0).standard_normal((50, 4))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0]], "E is a list; pass a numpy array or a torch tensor"),
        (np.ones(5), r"E has shape \(5,\), expected \(V, H\)"),
        (torch.ones(2, 3, 4), r"E has shape \(2, 3, 4\)"),
        (np.ones((0, 4)), r"shape \(0, 4\): there is nothing to measure"),
        (torch.ones(4, 0), r"shape \(4, 0\): there is nothing to measure"),
        (np.ones((5, 4), np.int64), r"E has dtype int64, expected .* floating-point .* E.astype\('float32'\)"),
        (torch.ones(5, 4, dtype=torch.int8), r"E has dtype torch.int8, expected .* E.float\(\)"),
        (np.ones((5, 4), np.complex64), "E has dtype complex64"),
        (torch.ones(5, 4, device="meta"), "E is on the meta device, .* load its weights"),
        (torch.eye(4).to_sparse(), r"E has layout torch.sparse_coo, expected a dense matrix.* E.to_dense\(\)"),
        (1e301 * np.ones((5, 4)), "entry of size 1e\\+301: its squares leave float64"),
    ],
)
def test_matrices_that_cannot_be_measured_are_refused(matrix: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(matrix)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_row_with_a_non_finite_entry_is_named(value: float, dtype: type) -> None:
    broken = E.astype(dtype)
    broken[40, 2] = broken[41, 0] = value
    for block_rows in (7, 50):
        with pytest.raises(ValueError, match=f"row 40 has the non-finite entry {value} in column 2"):
            measure(broken, block_rows=block_rows)
    with pytest.raises(ValueError, match="row 40"):
        measure(torch.from_numpy(broken))


def test_the_largest_entries_of_half_precision_are_measured() -> None:
    assert measure(torch.full((5, 4), 65504.0, dtype=torch.float16)).mean_norm == pytest.approx(2 * 65504)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones(49, np.int64), r"unigram has shape \(49,\), expected \(50,\)"),
        (np.ones((50, 1), np.int64), r"unigram has shape \(50, 1\)"),
        (np.ones(50), "unigram has dtype float64, expected whole numbers"),
        (np.arange(50) - 1, "unigram: token 0 has the count -1"),
        (np.zeros(50, np.int64), "unigram: all counts are zero"),
        (torch.ones(49, dtype=torch.int64), r"unigram has shape \(49,\)"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(E, unigram=counts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_rows": 0}, "Invalid block_rows value: 0"),
        ({"device": "abacus"}, "Invalid device value: 'abacus'"),
        ({"device": "meta"}, "Invalid device value: 'meta'. Nothing is computed there"),
        ({"device": "mps"}, "Invalid device value: 'mps'. It has no float64"),
        ({"word_pairs": {"MEN": WordPairs("MEN", (("a", "b"),), (1.0,))}}, "word_pairs needs a tokenizer"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(E, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device here"):
        measure(E, device="cuda")
