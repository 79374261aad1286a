"""Loss and calibration of a model by token frequency in the training text, in ten bins.

Tokens are ordered by their count in the training split. Bin 1 has the most frequent ones, which make up half of the
training tokens; each further bin covers half of the rest, and bin 10 everything left, including tokens that never
occur:

    tail_i = sum of the counts of all tokens that occur at most as often as i, over the sum of all counts
    bin_i  = min(10, 1 + floor(-log2(tail_i)))

So the bins depend only on the counts, and tokens with the same count are in the same bin. For bin b, over the N
evaluated positions n with target y_n:

    loss_b        = mean of -log p_n(y_n) over the positions with y_n in b
    calibration_b = log( mean_n sum_{i in b} p_n(i)  /  share of positions with y_n in b )

Letters: V tokens, R rows of the head (V plus padding), K bins, B windows of a batch, T context, N positions, W windows
of the split.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coupled_adam.metrics import FREQUENCY_BINS

K = FREQUENCY_BINS
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FrequencyBin:
    """Predictions of a model for the tokens of one bin."""

    tokens: int
    """Number of tokens of the vocabulary."""
    lowest_count: int | None
    """Count of the rarest token in the training split; None for a bin without tokens."""
    highest_count: int | None
    """Count of the most frequent token."""
    targets: int
    """Number of evaluated positions whose target is in the bin."""
    loss: float | None
    """Mean over these positions, in nats; None without targets."""
    standard_error: float | None
    """Of the mean, from the variation between windows; None if fewer than two windows have targets."""
    probability: float
    """Total probability of the bin's tokens under the model, mean over all positions."""
    calibration: float | None
    """log(probability / share of the targets); below 0 the bin is underestimated. None without targets, or if the
    probability is 0."""


def frequency_bins(counts: Counts) -> npt.NDArray[np.int64]:
    """Assign every token to a bin, from 0 for the most frequent to 9.

    Args:
        counts: (V,) token counts of the training split, at least one positive.

    Returns:
        (V,).

    Example:
        >>> frequency_bins(np.array([50, 0, 25, 12, 12, 1]))
        array([0, 9, 1, 2, 2, 6])
    """
    values, place, repeats = np.unique(counts, return_inverse=True, return_counts=True)
    tail = np.cumsum(values * repeats)  # training tokens with this count or a smaller one
    halvings = 2 ** np.arange(1, K, dtype=np.int64)
    # In integers, so that rounding cannot move a token across an edge.
    bins = (tail[:, None] * halvings <= tail[-1]).sum(axis=1)  # for each distinct count
    return np.asarray(bins[place.reshape(-1)], np.int64)


def losses_and_probabilities(chunks: Iterable[Tensor], targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Compute the loss of every position, and the probability of every row of the head, summed over the positions.

    Args:
        chunks: the logits of the positions, (n, R) at a time.
        targets: (N,) int64.
        ignored: the target of positions to skip.

    Returns:
        Losses (N,), 0 for ignored targets, at least float32; and sums of probabilities (R,), float64.
    """
    losses: list[Tensor] = []
    total: Tensor | None = None
    first = 0
    for logits in chunks:
        wanted = targets[first : first + len(logits)]
        first += len(logits)
        kept = wanted != ignored
        log_p = torch.log_softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
        losses.append(-log_p.gather(1, wanted.where(kept, 0).unsqueeze(1)).squeeze(1).where(kept, 0))
        # A sum, because autocast and TF32 would round a matrix product.
        probabilities = log_p.exp_().mul_(kept.unsqueeze(1)).sum(dim=0).double()
        total = probabilities if total is None else total.add_(probabilities)
    assert total is not None, "no positions"
    return torch.cat(losses), total


class FrequencyTally:
    """Accumulates sums over the batches of a split; `bins` computes the numbers of every bin."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.bin_of_token = torch.from_numpy(frequency_bins(counts))  # (V,)
        self.losses: list[Tensor] = []  # (B, K) each: sums of a window, float64 on the device
        self.targets: list[Tensor] = []  # (B, K) each: targets of a window, likewise
        self.probabilities: Tensor | None = None  # (R,) float64

    def add(self, losses: Tensor, targets: Tensor, probabilities: Tensor, ignored: int) -> None:
        """Add a batch.

        Args:
            losses: (B, T), 0 for ignored targets.
            targets: (B, T) int64.
            probabilities: (R,) float64, summed over the positions that are not ignored.
            ignored: the target of positions to skip.
        """
        self.bin_of_token = self.bin_of_token.to(targets.device)
        kept = targets != ignored
        bins = self.bin_of_token[targets.where(kept, 0)]  # (B, T)
        empty = torch.zeros(len(targets), K, dtype=torch.float64, device=targets.device)
        self.losses.append(empty.scatter_add(1, bins, losses.double()))
        self.targets.append(empty.scatter_add(1, bins, kept.double()))
        self.probabilities = probabilities if self.probabilities is None else self.probabilities + probabilities

    def bins(self) -> tuple[FrequencyBin, ...]:
        """The numbers of every bin, most frequent tokens first."""
        assert self.probabilities is not None, "no batch was added"
        losses, targets = torch.cat(self.losses).cpu(), torch.cat(self.targets).cpu()  # (W, K)
        bin_of_token = self.bin_of_token.cpu()
        # Padding rows of the head are in no bin, so their probability is missing from the sum over bins.
        rows = self.probabilities.cpu()[: len(bin_of_token)]
        given = torch.zeros(K, dtype=torch.float64).index_add(0, bin_of_token[: len(rows)], rows)
        positions = float(targets.sum())
        found = []
        for number in range(K):
            counts = self.counts[bin_of_token.numpy() == number]
            loss, error = mean_over_windows(losses[:, number], targets[:, number])
            probability, share = float(given[number]) / positions, float(targets[:, number].sum()) / positions
            found.append(
                FrequencyBin(
                    tokens=len(counts),
                    lowest_count=int(counts.min()) if len(counts) else None,
                    highest_count=int(counts.max()) if len(counts) else None,
                    targets=round(share * positions),
                    loss=loss,
                    standard_error=error,
                    probability=probability,
                    calibration=math.log(probability / share) if probability > 0 and share > 0 else None,
                )
            )
        return tuple(found)


def mean_over_windows(sums: Tensor, counts: Tensor) -> tuple[float | None, float | None]:
    """Mean over tokens, and its standard error from the variation between windows: the tokens of a window are not
    independent.

    Args:
        sums: (W,) float64, sum of each window.
        counts: (W,) float64, tokens of each window.

    Returns:
        None and None without tokens; no error if only one window has tokens.
    """
    total, W = float(counts.sum()), int((counts > 0).sum())
    if total == 0:
        return None, None
    mean = float(sums.sum()) / total
    if W < 2:
        return mean, None
    # Error of a ratio of two sums, because windows have different numbers of tokens.
    deviations = sums - mean * counts
    return mean, math.sqrt(float(deviations.square().sum()) * W / (W - 1)) / total
