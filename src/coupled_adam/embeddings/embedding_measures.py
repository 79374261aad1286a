"""`measure`: all measures of one embedding matrix, in three passes over blocks of its rows.

First pass: the largest entry, so that nothing can overflow. Second: lengths, mean and the H x H Gram matrix. Third:
the partition function of the Gram matrix's eigenvectors. Only an ill-conditioned matrix is read a fourth time.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings.correlation import pearson
from coupled_adam.embeddings.embedding_matrix import Array, EmbeddingMatrix, Report, open_table, part, scaled
from coupled_adam.embeddings.embedding_metrics import EmbeddingMetrics
from coupled_adam.embeddings.isotropy import isotropy
from coupled_adam.embeddings.moments import Moments, moments_of
from coupled_adam.embeddings.spectrum import spectrum_of
from coupled_adam.embeddings.unigram import check_counts
from coupled_adam.embeddings.word_pairs import WordPairs
from coupled_adam.embeddings.word_similarity import R_COS, R_COS_5, WordSimilarity, percent, similarity_of
from coupled_adam.tokenizer import SingleTokens

# Added to the unigram probability, as in the authors' code, so that unseen tokens have a logarithm.
LOG_OFFSET = 1e-10


@torch.no_grad()
def measure(
    E: Array | Tensor,
    *,
    unigram: Array | Tensor | None = None,
    tokenizer: SingleTokens | None = None,
    word_pairs: Mapping[str, WordPairs] | None = None,
    device: str | torch.device | None = None,
    block_rows: int | None = None,
    progress: Report | None = None,
) -> EmbeddingMetrics:
    """Measure an embedding matrix.

    Args:
        E: (V, H), one row per token: a numpy array, also memory-mapped, or a torch tensor, of any float type.
        unigram: token counts of a text, (V,) integers, for `rho` and `rho_log`.
        tokenizer: maps words to tokens (`open_tokenizer`); required with `word_pairs`.
        word_pairs: benchmarks by name (`load_word_pairs`, `fetch_word_pairs`), for `r_cos`.
        device: to compute on; None for the device of E.
        block_rows: rows per block; None for blocks of about 16 MiB on the CPU and 256 MiB on a GPU.
        progress: called with the progress in [0, 1].

    Returns:
        One record; fields that need a missing argument are None.

    Example:
        >>> import numpy as np
        >>> metrics = measure(np.random.default_rng(0).standard_normal((1000, 16)) + 2.0)
        >>> metrics.shape, round(metrics.mu_norm_ratio, 2)
        ((1000, 16), 0.9)
    """
    table = open_table(E, device, block_rows)
    counts = None if unigram is None else check_counts(unigram, table.V)
    if word_pairs and tokenizer is None:
        raise UserError("word_pairs requires a tokenizer that maps words to rows; pass tokenizer=open_tokenizer(...)")
    table = scaled(table, part(progress, 0.0, 0.05))
    moments = moments_of(table, part(progress, 0.05, 0.45))
    spectrum = spectrum_of(table, moments.gram, part(progress, 0.45, 0.6))
    iso, iso_both_signs = isotropy(table, moments, spectrum, part(progress, 0.6, 0.95))
    words = similarity_of(table, tokenizer, word_pairs) if word_pairs and tokenizer is not None else {}
    norms = moments.norms.cpu().numpy() * table.scale
    mu_norm = float(torch.linalg.vector_norm(moments.mean)) * table.scale
    mean_norm = float(norms.mean())
    sigma = spectrum.singular_values.cpu().numpy() * table.scale
    rho, rho_log = frequency_correlations(norms, counts)
    metrics = EmbeddingMetrics(
        shape=(table.V, table.H),
        iso=iso,
        iso_both_signs=iso_both_signs,
        mu_norm=mu_norm,
        mean_norm=mean_norm,
        mu_norm_ratio=mu_norm / mean_norm if mean_norm > 0 else None,
        kappa=float(100 * sigma[-1] / sigma[0]) if sigma[0] > 0 else None,
        rho=rho,
        rho_log=rho_log,
        r_cos=mean_correlation(words, R_COS, "pearson"),
        r_cos_5=mean_correlation(words, R_COS_5, "pearson"),
        spearman=mean_correlation(words, R_COS, "spearman"),
        word_similarity=words,
        iso_score=iso_score(moments, table),
        mean_cosine=mean_cosine(moments),
        singular_values=sigma,
        norms=norms,
        zero_rows=int((norms == 0).sum()),
        unseen_rows=None if counts is None else int((counts == 0).sum()),
    )
    if progress is not None:
        progress(1.0)
    return metrics


def frequency_correlations(
    norms: npt.NDArray[np.float64], counts: npt.NDArray[np.int64] | None
) -> tuple[float | None, float | None]:
    """100 times the correlation of the lengths with p and with log(p + 1e-10)."""
    if counts is None:
        return None, None
    p = counts / counts.sum(dtype=np.float64)
    return percent(pearson(norms, p)), percent(pearson(norms, np.log(p + LOG_OFFSET)))


def mean_correlation(words: dict[str, WordSimilarity], benchmarks: tuple[str, ...], kind: str) -> float | None:
    """Mean over the benchmarks, or None if one is missing."""
    values = [getattr(words[name], kind) for name in benchmarks if name in words]
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(benchmarks) else None


def iso_score(moments: Moments, table: EmbeddingMatrix) -> float | None:
    """((tr S)^2 / |S|_F^2 - 1) / (H - 1)."""
    # If all rows are equal, S is only rounding.
    rounding = 64 * torch.finfo(torch.float64).eps * float(moments.norms.max())
    if table.H == 1 or moments.covariance_trace <= table.V * rounding**2:
        return None
    dimensions = (moments.covariance_trace / moments.covariance_norm) ** 2
    return min(1.0, max(0.0, (dimensions - 1) / (table.H - 1)))


def mean_cosine(moments: Moments) -> float | None:
    """(|sum of unit rows|^2 - n) / (n (n - 1)) over the n rows that are not zero."""
    n = int((moments.norms > 0).sum())
    if n < 2:
        return None
    return (float(moments.unit_sum @ moments.unit_sum) - n) / (n * (n - 1))
