"""Stochastic rounding to bfloat16, one element at a time, in Python integers and floats.

This is the reference that tests compare `stochastic_rounding` with. It is slow and never used for training.
"""

import math

import torch
from torch import Tensor

WORD = 2**32
# bfloat16 has 8 bits of precision, and the exponents of float32.
PRECISION, SMALLEST_EXPONENT, LARGEST = 8, -125, (2 - 2**-7) * 2.0**127


def rounded_table(moments: Tensor, *, seed: int, table: int, step: int) -> Tensor:
    """Round the moments of a whole table, (V, H), stochastically to bfloat16; float64 in and out.

    Example:
        >>> rounded = rounded_table(torch.full((100, 100), 1 + 2**-9), seed=0, table=0, step=1)
        >>> sorted(set(rounded.flatten().tolist()))  # 1, and the next bfloat16
        [1.0, 1.0078125]
    """
    V, H = moments.shape
    key = table_key(seed, table)
    rounded = [
        rounded_number(x, random_bits(key, step, index)) for index, x in enumerate(moments.double().flatten().tolist())
    ]
    return torch.tensor(rounded, dtype=torch.float64).view(V, H)


def rounded_number(x: float, bits: int) -> float:
    """Round x to one of its two bfloat16 neighbours, each with the probability that makes the expectation x.

    Args:
        x: any float.
        bits: a random number in [0, 2^16).

    Example:
        >>> [rounded_number(-1 - 2**-9, bits) for bits in (0, 3 * 2**14 - 1, 3 * 2**14)]
        [-1.0, -1.0, -1.0078125]
    """
    if not abs(x) < LARGEST:  # also true for NaN
        return torch.tensor(x, dtype=torch.float32).bfloat16().item()
    _, exponent = math.frexp(x)
    spacing = 2.0 ** (max(exponent, SMALLEST_EXPONENT) - PRECISION)
    inner = math.floor(abs(x) / spacing)
    # The distance from the inner neighbour in units of 2^-16, as precise as float32.
    part = math.floor((abs(x) / spacing - inner) * 2**16)
    return math.copysign((inner + (part + bits >= 2**16)) * spacing, x)


def random_bits(key: int, step: int, index: int) -> int:
    """Return the 16 random bits of an element.

    Args:
        key: key of the table.
        step: t.
        index: row times width plus column.
    """
    index_key = absorb(key, step)
    high = mix(index // WORD)
    middle_key = absorb(index_key, 0) ^ high
    x = (index * 0x2545F491 + index_key + high) % WORD
    x = (x ^ (x // 2**16)) * 0x21F0AAAD % WORD
    x = (x ^ (x // 2**15) ^ middle_key) * 0x735A2D97 % WORD
    return x // 2**16


def table_key(seed: int, table: int) -> int:
    """Derive 32 bits from the seed and the number of a table."""
    return absorb(absorb(absorb(0, seed % WORD), seed // WORD), table)


def absorb(key: int, word: int) -> int:
    """Derive 32 bits from a key and another number."""
    return mix(((key ^ word) + 0x61C88647) % WORD)


def mix(x: int) -> int:
    """Hash 32 bits."""
    x = (x ^ (x // 2**16)) * 0x21F0AAAD % WORD
    x = (x ^ (x // 2**15)) * 0x735A2D97 % WORD
    return x ^ (x // 2**15)
