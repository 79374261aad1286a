"""Invalid matrices and counts: each error names the problem, its place and the remedy."""

from typing import Any

import numpy as np
import pytest
import torch

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings import WordPairs, measure

E = np.random.default_rng(0).standard_normal((50, 4))


@pytest.mark.parametrize(
    ("matrix", "named"),
    [
        ([[1.0]], "list.*numpy.*torch"),
        (np.ones(5), r"E\b.*shape \(5,\).*\(V, H\)"),
        (torch.ones(2, 3, 4), r"E\b.*shape \(2, 3, 4\).*\(V, H\)"),
        (np.ones((0, 4)), r"E\b.*shape \(0, 4\)"),
        (torch.ones(4, 0), r"E\b.*shape \(4, 0\)"),
        (np.ones((5, 4), np.int64), r"E\b.*dtype int64.*E\.astype\('float32'\)"),
        (torch.ones(5, 4, dtype=torch.int8), r"E\b.*dtype torch\.int8.*E\.float\(\)"),
        (np.ones((5, 4), np.complex64), r"E\b.*dtype complex64.*E\.astype\('float32'\)"),
        (torch.ones(5, 4, device="meta"), r"E\b.*\bmeta device\b"),
        (torch.eye(4).to_sparse(), r"E\b.*torch\.sparse_coo.*E\.to_dense\(\)"),
        (1e301 * np.ones((5, 4)), r"E\b.*1e301.*float64"),
    ],
)
def test_matrices_that_cannot_be_measured_are_refused(matrix: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        measure(matrix)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_row_with_a_non_finite_entry_is_named(value: float, dtype: type) -> None:
    broken = E.astype(dtype)
    broken[40, 2] = broken[41, 0] = value
    for block_rows in (7, 50):
        with pytest.raises(UserError, match=rf"row 40\b.* {value}\b.*column 2\b"):
            measure(broken, block_rows=block_rows)
    with pytest.raises(ValueError, match=r"row 40\b"):
        measure(torch.from_numpy(broken))


def test_the_largest_entries_of_half_precision_are_measured() -> None:
    assert measure(torch.full((5, 4), 65504.0, dtype=torch.float16)).mean_norm == pytest.approx(2 * 65504)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        (np.ones(49, np.int64), r"unigram\b.*\(49,\).*\(50,\)"),
        (np.ones((50, 1), np.int64), r"unigram\b.*\(50, 1\).*\(50,\)"),
        (np.ones(50), r"unigram\b.*dtype float64"),
        (np.arange(50) - 1, r"unigram\b.*token 0\b.* -1\b"),
        (np.zeros(50, np.int64), r"unigram\b.*\bzero\b"),
        (torch.ones(49, dtype=torch.int64), r"unigram\b.*\(49,\).*\(50,\)"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        measure(E, unigram=counts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_rows": 0}, r"block_rows\b.*\b0\b"),
        ({"device": "abacus"}, "device.*'abacus'.*'cpu'.*'cuda'"),
        ({"device": "meta"}, "device.*'meta'.*'cpu'.*'cuda'"),
        ({"device": "mps"}, "device.*'mps'.*float64.*'cpu'"),
        ({"word_pairs": {"MEN": WordPairs("MEN", (("a", "b"),), (1.0,))}}, r"word_pairs\b.*open_tokenizer\("),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        measure(E, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"device.*'cuda'.*CUDA.*'cpu'"):
        measure(E, device="cuda")
