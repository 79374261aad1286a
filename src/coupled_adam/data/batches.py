"""Batches of token windows, as a pure function of (seed, step, sample).

There is no state between steps: every position comes from hashing the seed and a counter. Any number of ranks and any
micro-batch size therefore see the same global batches, and a resumed run continues exactly where it stopped.

Legend: B samples of a global batch, T context, N tokens of the split, n requested samples, W windows of an epoch.
"""

import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.data.tokens import Int64, Tokens

Order = Literal["random", "epochs"]
UInt64 = npt.NDArray[np.uint64]

LOW_64_BITS = 2**64 - 1
# Rounds of the Feistel network, four for each half; three already shuffle well without an adversary.
ROUNDS = 8


class Batches:
    """Training batches of one split.

    Args:
        tokens: the split.
        context: T; a sample has T + 1 tokens, inputs `[:, :-1]` and targets `[:, 1:]`.
        batch_size: B, samples of the global batch of one step.
        seed: decides the order.
        order: "random": windows start at uniformly random positions, as in nanoGPT. "epochs": the split is cut into
            windows that share one token with the next, and each epoch sees every window once, in a new order; tokens
            left over at the end of the split are not used.
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int, order: Order = "random") -> None:
        if context < 1 or batch_size < 1:
            raise UserError(f"context is {context} and batch_size {batch_size}, expected 1 or more")
        if order not in get_args(Order):
            raise UserError(f"order is {order!r}, expected one of {', '.join(get_args(Order))}")
        if len(tokens) < context + 1:
            raise UserError(
                f"{tokens.name}: has {len(tokens)} tokens, but one window of context {context} needs {context + 1}; "
                "use a shorter context, or prepare more text"
            )
        self.tokens = tokens
        self.context = context
        self.batch_size = batch_size
        self.order = order
        self.windows_per_epoch = (len(tokens) - 1) // context
        self._key = mix(as_uint64(seed))  # (1,)

    def samples(self, step: int, start: int, stop: int) -> Tensor:
        """Samples start .. stop - 1 of the global batch of `step`.

        Args:
            step: counts from 0.
            start: index of the first sample in the global batch.
            stop: index after the last sample, at most B.

        Returns:
            (stop - start, T + 1) int64.
        """
        if step < 0 or not 0 <= start <= stop <= self.batch_size:
            raise UserError(
                f"samples {start} to {stop} of step {step} were requested, expected step >= 0 and 0 <= start <= stop "
                f"<= batch_size = {self.batch_size}"
            )
        starts = self._random_starts(step, start, stop) if self.order == "random" else self._next(step, start, stop)
        return torch.from_numpy(self.tokens.windows(starts, self.context + 1))

    def _random_starts(self, step: int, start: int, stop: int) -> Int64:  # (n,)
        sample = np.arange(start, stop, dtype=np.uint64)
        numbers = mix(mix(self._key + as_uint64(step)) + sample)
        # The remainder favours the first positions by one part in 2^64 / N, which is not measurable.
        return (numbers % np.uint64(len(self.tokens) - self.context)).astype(np.int64)

    def _next(self, step: int, start: int, stop: int) -> Int64:  # (n,)
        # Exact for any step: a 64-bit count of samples never overflows.
        count = np.arange(step * self.batch_size + start, step * self.batch_size + stop, dtype=np.uint64)
        epoch, place = np.divmod(count, np.uint64(self.windows_per_epoch))
        window = permuted(place, self.windows_per_epoch, mix(~self._key + epoch))
        return window.astype(np.int64) * self.context


def permuted(place: UInt64, size: int, key: UInt64) -> UInt64:
    """Compute where a shuffle of 0 .. size - 1 puts each place, without materializing the shuffle.

    A Feistel network permutes the cells of a rectangle of rows x columns >= size. A place that lands at `size` or
    beyond is permuted again until it lands below; because the network is a permutation, no two places collide.

    Args:
        place: (n,) numbers below `size`.
        size: W.
        key: (n,) selects the shuffle; equal keys give the same shuffle.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    landed = _cell_permuted(place, rows, columns, key)
    while (outside := landed >= size).any():
        landed[outside] = _cell_permuted(landed[outside], rows, columns, key[outside])
    return landed


def _cell_permuted(cell: UInt64, rows: int, columns: int, key: UInt64) -> UInt64:
    row, column = np.divmod(cell, np.uint64(columns))
    for number in range(0, ROUNDS, 2):
        # Each line adds a function of one half to the other. That is invertible, so no two cells collide.
        row = (row + mix(mix(key + as_uint64(number)) + column) % np.uint64(rows)) % np.uint64(rows)
        column = (column + mix(mix(key + as_uint64(number + 1)) + row) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column


def mix(number: UInt64) -> UInt64:
    """Output of SplitMix64 for this state: a bijection that maps neighbouring numbers to unrelated ones.

    Example:
        >>> hex(int(mix(as_uint64(0))[0]))
        '0xe220a8397b1dcdaf'
    """
    number = number + np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def as_uint64(number: int) -> UInt64:  # (1,): numpy wraps around silently in arrays, but warns for scalars
    return np.array([number & LOW_64_BITS], np.uint64)
