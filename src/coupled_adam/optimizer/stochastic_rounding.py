"""First moments in bfloat16: rounded up or down at random, so that the rounding is right on average.

With beta1 = 0.9 a moment changes by less than half a bfloat16 step whenever the gradient is within 4 percent of it or
so, and rounding to nearest would lose that change each time. A moment x between the bfloat16 neighbours a < b becomes b
with probability (x - a) / (b - a), so its expectation is x.

The random bits are a hash of seed, table, step and element. There is no generator whose state must be saved, a CUDA
graph replays with new bits, and each rank makes those of its own elements. All implementations make the same bits:
this module in torch operations, `rounding_kernels` in Triton, `numba_elements` in compiled loops, and
`reference_rounding` is what they are compared with.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

# Multipliers of a hash of 32 bits that changes half of the bits for each bit of its input, and what indices are
# multiplied with before: without it, elements whose indices differ by a power of two have bits that are a little alike.
# All are below 2^31: products with 32 bits fit into int64.
MULTIPLIER1, MULTIPLIER2, INCREMENT, SPREAD = 0x21F0AAAD, 0x735A2D97, 0x61C88647, 0x2545F491
MASK = 0xFFFFFFFF
# The largest finite bfloat16. Beyond it there is no upper neighbour.
LARGEST = (2 - 2**-7) * 2.0**127
# Temporaries of `round_rows` for each element: two int32, and the rounded moment.
BYTES_PER_ELEMENT = 3 * 4

Word = TypeVar("Word", int, Tensor)


class Rounding(NamedTuple):
    """Where the random bits of a table come from; in each step others."""

    key: int
    """32 bits from the seed and the number of the table."""
    first: int
    """Of this rank's first element: its row times the width of the whole table, plus its column."""
    is_large: bool
    """Whether the whole table has more than 2^32 elements."""


class StepKeys(NamedTuple):
    """What the random bits of one step are made from: 32 bits each."""

    index_key: Any  # int, or an int64 scalar on the device
    middle_key: Any


def rounding_key(seed: int, table: int) -> int:
    """32 bits from the seed of a group and the number of a table.

    Example:
        >>> rounding_key(0, table=0) != rounding_key(0, table=1)
        True
    """
    key: int = absorb(absorb(absorb(0, seed & MASK), seed >> 32), table)
    return key


def mix(x: Word) -> Word:
    """A hash of 32 bits, one to one; 0 stays 0."""
    x = x ^ (x >> 16)
    x = (x * MULTIPLIER1) & MASK
    x = x ^ (x >> 15)
    x = (x * MULTIPLIER2) & MASK
    return x ^ (x >> 15)


def absorb(key: Any, word: Any) -> Any:
    """32 bits that depend on all bits of both."""
    return mix(((key ^ word) + INCREMENT) & MASK)


def step_keys(rounding: Rounding, t: float | Tensor) -> StepKeys:
    """The keys of step t, which may be a number on the device."""
    index_key = absorb(rounding.key, t.to(torch.int64) if isinstance(t, Tensor) else int(t))
    return StepKeys(index_key, absorb(index_key, 0))


def random_bits(
    rows: slice, shape: torch.Size | tuple[int, int], width: int, rounding: Rounding, keys: StepKeys, device: Any
) -> Tensor:
    """16 random bits for each element of some rows, as int32.

    Args:
        rows: the rows of this rank's part.
        shape: of this rank's part, (V, H).
        width: H of the whole table.
        rounding: of the table.
        keys: of the step.
        device: where to make them.
    """
    V, H = shape
    # Indices in the whole table, as int64.
    first, last = rows.start or 0, V if rows.stop is None else min(rows.stop, V)
    row = (torch.arange(first, last, device=device) * width + rounding.first).unsqueeze(1)  # (rows, 1)
    column = torch.arange(H, device=device)
    # Then 32 bits as int32, which is four times as fast: sums and products wrap around, and a shift copies the sign.
    x: Tensor = ((row & MASK) * SPREAD).to(torch.int32) + (column * SPREAD + keys.index_key).to(torch.int32)
    middle_key = signed(keys.middle_key)
    if rounding.is_large:
        high = mix((row + column) >> 32).to(torch.int32)
        x.add_(high)
        middle_key = middle_key ^ high
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(MULTIPLIER1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(middle_key)
    # The upper half of the last product depends on all bits that went in.
    return x.mul_(MULTIPLIER2).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def signed(word: Any) -> Any:
    """The int32 of the same 32 bits."""
    if isinstance(word, Tensor):
        return word.to(torch.int32)
    return word - 2**32 if word >= 2**31 else word


def round_with_bits(moment: Tensor, bits: Tensor) -> Tensor:
    """float32 as bfloat16, up or down by 16 random bits.

    bfloat16 is the upper half of a float32. Adding a number in [0, 2^16) to the lower half carries into the upper one
    with the probability that is wanted. What has no upper neighbour that is finite is rounded to nearest.

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
    """Some rows of a first moment in float32, rounded at random to bfloat16; arguments as for `random_bits`."""
    return round_with_bits(moment, random_bits(rows, shape, width, rounding, keys, moment.device))
