"""Stochastic rounding of first moments to bfloat16: up or down at random, and exact on average.

With beta1 = 0.9, a moment changes by less than half a bfloat16 step if the gradient is within about 4 percent of it.
Rounding to nearest would lose that change every time. With stochastic rounding, a moment x between the bfloat16
neighbours a < b becomes b with probability (x - a) / (b - a), so its expectation is x.

The random bits are a hash of seed, table, step and element. There is no generator state to save, a CUDA graph replays
with new bits, and each rank computes the bits of its own elements. All implementations compute the same bits: this
module in torch operations, `rounding_kernels` in Triton, `numba_elements` in compiled loops. Tests compare them with
`reference_rounding`.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

# Constants of a 32-bit hash in which each input bit changes half of the output bits. SPREAD multiplies the indices
# first: without it, the bits of elements whose indices differ by a power of two are slightly correlated. All constants
# are below 2^31, so that products with 32 bits fit into int64.
MULTIPLIER1, MULTIPLIER2, INCREMENT, SPREAD = 0x21F0AAAD, 0x735A2D97, 0x61C88647, 0x2545F491
MASK = 0xFFFFFFFF
# The largest finite bfloat16, which has no upper neighbour.
LARGEST = (2 - 2**-7) * 2.0**127
# Bytes of temporaries per element in `round_rows`: two int32, and the rounded moment.
BYTES_PER_ELEMENT = 3 * 4

Word = TypeVar("Word", int, Tensor)


class Rounding(NamedTuple):
    """The source of a table's random bits in all steps."""

    key: int
    """32 bits from the seed and the number of the table."""
    first: int
    """Index of this rank's first element: its row times the width of the whole table, plus its column."""
    is_large: bool
    """Whether the whole table has more than 2^32 elements."""


class StepKeys(NamedTuple):
    """The keys of one step's random bits, 32 bits each."""

    index_key: Any  # int, or an int64 scalar on the device
    middle_key: Any


def rounding_key(seed: int, table: int) -> int:
    """Derive 32 bits from the seed of a group and the number of a table.

    Example:
        >>> rounding_key(0, table=0) != rounding_key(0, table=1)
        True
    """
    key: int = absorb(absorb(absorb(0, seed & MASK), seed >> 32), table)
    return key


def mix(x: Word) -> Word:
    """Hash 32 bits, one to one; 0 stays 0."""
    x = x ^ (x >> 16)
    x = (x * MULTIPLIER1) & MASK
    x = x ^ (x >> 15)
    x = (x * MULTIPLIER2) & MASK
    return x ^ (x >> 15)


def absorb(key: Any, word: Any) -> Any:
    """Derive 32 bits that depend on all bits of both arguments."""
    return mix(((key ^ word) + INCREMENT) & MASK)


def step_keys(rounding: Rounding, t: float | Tensor) -> StepKeys:
    """Compute the keys of step t, which may be a tensor on the device."""
    index_key = absorb(rounding.key, t.to(torch.int64) if isinstance(t, Tensor) else int(t))
    return StepKeys(index_key, absorb(index_key, 0))


def random_bits(
    rows: slice, shape: torch.Size | tuple[int, int], width: int, rounding: Rounding, keys: StepKeys, device: Any
) -> Tensor:
    """Compute 16 random bits per element of some rows, as int32.

    Args:
        rows: the rows, counted in this rank's part.
        shape: shape of this rank's part, (V, H).
        width: H of the whole table.
        rounding: rounding of the table.
        keys: keys of the step.
        device: device of the result.
    """
    V, H = shape
    # Indices in the whole table, as int64.
    first, last = rows.start or 0, V if rows.stop is None else min(rows.stop, V)
    row = (torch.arange(first, last, device=device) * width + rounding.first).unsqueeze(1)  # (rows, 1)
    column = torch.arange(H, device=device)
    # From here on int32, which is four times as fast: sums and products wrap around, and a shift copies the sign.
    x: Tensor = ((row & MASK) * SPREAD).to(torch.int32) + (column * SPREAD + keys.index_key).to(torch.int32)
    middle_key = signed(keys.middle_key)
    if rounding.is_large:
        high = mix((row + column) >> 32).to(torch.int32)
        x.add_(high)
        middle_key = middle_key ^ high
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(MULTIPLIER1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(middle_key)
    # The upper half of the last product depends on all input bits.
    return x.mul_(MULTIPLIER2).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def signed(word: Any) -> Any:
    """Reinterpret 32 bits as int32."""
    if isinstance(word, Tensor):
        return word.to(torch.int32)
    return word - 2**32 if word >= 2**31 else word


def round_with_bits(moment: Tensor, bits: Tensor) -> Tensor:
    """Round float32 up or down to bfloat16, by 16 random bits.

    bfloat16 is the upper half of a float32. Adding a random number in [0, 2^16) to the lower half carries into the
    upper half with the right probability. Numbers without a finite upper neighbour are rounded to nearest.

    Example:
        >>> moment = torch.full((4,), 1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
        >>> round_with_bits(moment, torch.tensor([0, 1, 2, 3], dtype=torch.int32) << 14).tolist()
        [1.0, 1.0, 1.0, 1.0078125]
    """
    rounded = (moment.view(torch.int32) + bits).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(moment.abs() < LARGEST, rounded, moment).to(torch.bfloat16)


def round_rows(
    moment: Tensor, rows: slice, shape: torch.Size, width: int, rounding: Rounding, keys: StepKeys
) -> Tensor:
    """Round some rows of a float32 first moment stochastically to bfloat16; arguments as for `random_bits`."""
    return round_with_bits(moment, random_bits(rows, shape, width, rounding, keys, moment.device))
