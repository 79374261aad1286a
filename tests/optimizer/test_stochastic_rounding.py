"""Stochastic rounding to bfloat16: unbiased, to a neighbour, with random-looking bits that are reproducible on every
device."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coupled_adam.optimizer import reference_rounding, stochastic_rounding
from coupled_adam.optimizer.stochastic_rounding import Rounding, random_bits, rounding_key, step_keys

ALL_BITS = torch.arange(2**16, dtype=torch.int32)
SMALLEST_BFLOAT16 = 2.0**-133
NUMBERS = st.floats(width=32, min_value=-stochastic_rounding.LARGEST, max_value=stochastic_rounding.LARGEST).filter(
    lambda x: abs(x) < stochastic_rounding.LARGEST
)


def rounded(x: float, bits: Tensor) -> Tensor:
    """A float32 number rounded once with each of the given random bits."""
    return stochastic_rounding.round_with_bits(torch.full(bits.shape, x, dtype=torch.float32), bits)


def neighbours(x: float) -> tuple[float, float]:
    """The bfloat16 numbers on both sides of x, found from the nearest one."""
    nearest = torch.tensor(x, dtype=torch.float32).bfloat16()
    if nearest.item() == x:
        return x, x
    other = torch.tensor(math.copysign(math.inf, x - nearest.item())).bfloat16()
    beyond = torch.nextafter(nearest, other).item()
    return min(nearest.item(), beyond), max(nearest.item(), beyond)


def bits_of(shape: tuple[int, int], *, seed: int = 0, table: int = 0, step: int = 1, first: int = 0) -> Tensor:
    rounding = Rounding(rounding_key(seed, table), first, is_large=first + shape[0] * shape[1] > 2**32)
    return random_bits(slice(None), shape, shape[1], rounding, step_keys(rounding, step), "cpu")


@given(x=NUMBERS)
@settings(max_examples=150)
def test_the_mean_over_all_random_bits_is_the_number_itself(x: float) -> None:
    low, high = neighbours(x)
    values = rounded(x, ALL_BITS).double()
    assert set(values.tolist()) <= {low, high}
    # Both terms of the mean are multiples of 2^-16 of the distance; float64 adds them exactly.
    assert low + (high - low) * float((values == high).double().mean()) == pytest.approx(x, rel=0, abs=0)


@given(x=NUMBERS, bits=st.integers(0, 2**16 - 1))
@settings(max_examples=300)
def test_every_rounding_matches_the_literal_one(x: float, bits: int) -> None:
    value = rounded(x, torch.tensor([bits], dtype=torch.int32)).item()
    assert value == reference_rounding.rounded_number(x, bits)
    assert math.copysign(1, value) == math.copysign(1, x)


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.5, 2.0**-126, SMALLEST_BFLOAT16, -(2.0**127), math.inf, -math.inf])
def test_bfloat16_numbers_are_unchanged(x: float) -> None:
    values = rounded(x, ALL_BITS)
    assert bool((values.view(torch.int16) == torch.tensor(x).bfloat16().view(torch.int16)).all())


def test_nan_stays_nan_with_any_bits() -> None:
    for pattern in (0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -(2**31) + 0x7F800001):
        nan = torch.full((2**16,), pattern, dtype=torch.int64).to(torch.int32).view(torch.float32)
        assert bool(nan.isnan().all())
        assert bool(stochastic_rounding.round_with_bits(nan, ALL_BITS).isnan().all())


def test_numbers_beyond_the_largest_bfloat16_are_rounded_to_nearest() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert largest == stochastic_rounding.LARGEST
    assert set(rounded(largest, ALL_BITS).tolist()) == {largest}
    assert set(rounded(3.39e38, ALL_BITS).tolist()) == {largest}
    assert set(rounded(-3.4e38, ALL_BITS).tolist()) == {-math.inf}


@pytest.mark.parametrize("x", [2.0**-149, 2.0**-134, -3 * 2.0**-135, 1.7 * 2.0**-127])
def test_denormal_numbers_are_rounded_without_bias(x: float) -> None:
    x = torch.tensor(x, dtype=torch.float32).item()
    values = rounded(x, ALL_BITS).double()
    assert values.mean().item() == x
    assert float(values.abs().max()) <= abs(x) + SMALLEST_BFLOAT16


@pytest.mark.parametrize(
    ("seed", "table", "step", "first"),
    [(0, 0, 1, 0), (7, 3, 100_000, 12_345), (2**40 + 1, 2**16, 2, 2**32 - 40), (2**64 - 1, 0, 3, 5 * 2**32 + 17)],
)
def test_bits_match_the_literal_hash(seed: int, table: int, step: int, first: int) -> None:
    key = reference_rounding.table_key(seed, table)
    expected = [reference_rounding.random_bits(key, step, first + i) for i in range(15 * 7)]
    assert bits_of((15, 7), seed=seed, table=table, step=step, first=first).flatten().tolist() == expected


def test_bits_are_the_same_for_a_step_count_on_the_device_and_on_the_host() -> None:
    rounding = Rounding(rounding_key(3, 1), first=5, is_large=False)
    on_host, on_device = step_keys(rounding, 17.0), step_keys(rounding, torch.tensor(17.0))
    bits = [random_bits(slice(None), (9, 4), 4, rounding, keys, "cpu") for keys in (on_host, on_device)]
    assert torch.equal(*bits)


def test_blocks_of_rows_have_the_bits_of_the_whole() -> None:
    rounding = Rounding(rounding_key(0, 0), first=0, is_large=False)
    keys = step_keys(rounding, 1)
    whole = random_bits(slice(None), (10, 6), 6, rounding, keys, "cpu")
    blocks = [random_bits(slice(i, i + 4), (10, 6), 6, rounding, keys, "cpu") for i in (0, 4, 8)]
    assert torch.equal(torch.cat(blocks), whole)


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"table": 1}, {"step": 2}, *({"first": lag} for lag in (1, 768, 1024, 4096, 8192, 2**32))],
    ids=str,
)
def test_bits_of_another_seed_table_step_or_element_are_not_related(other: dict[str, Any]) -> None:
    shape = (1024, 1024)
    a, b = bits_of(shape), bits_of(shape, **other)
    n = a.numel()
    # Within five standard deviations of independent bits: in total, and for each of the 16.
    assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])) < 5 / n**0.5
    for bit in range(16):
        agreement = float((((a ^ b) >> bit) & 1).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / n**0.5


@pytest.mark.parametrize("shape", [(1024, 1024), (2**20, 1), (1, 2**20), (4096, 256)])
def test_bits_are_uniform_in_every_table_row_and_column(shape: tuple[int, int]) -> None:
    bits = bits_of(shape, seed=5, step=3)
    n = bits.numel()
    counts = torch.bincount(bits.flatten() >> 6, minlength=1024).double()
    chi_square = float(((counts - n / 1024) ** 2 / (n / 1024)).sum())
    assert abs(chi_square - 1023) < 5 * (2 * 1023) ** 0.5
    deviation = (2**32 / 12) ** 0.5
    for dim in (0, 1):
        means = bits.double().mean(dim=dim) - (2**16 - 1) / 2
        assert float(means.abs().max()) < 6 * deviation / shape[dim] ** 0.5


def test_one_element_gets_uniform_bits_over_the_steps() -> None:
    rounding = Rounding(rounding_key(0, 0), first=0, is_large=False)
    steps = torch.arange(1, 20_001, dtype=torch.float64)
    keys = step_keys(rounding, steps.unsqueeze(1))
    # The key of each row stands for a step: with width 0, all rows are the same element.
    bits = random_bits(slice(None), (len(steps), 1), 0, rounding, keys, "cpu").double().flatten()
    assert abs(float(bits.mean()) - (2**16 - 1) / 2) < 5 * (2**32 / 12) ** 0.5 / len(steps) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([bits[1:], bits[:-1]]))[0, 1])) < 5 / len(steps) ** 0.5


def test_hash_is_one_to_one_and_keeps_zero() -> None:
    words = torch.arange(2**20, dtype=torch.int64) * 4093
    assert stochastic_rounding.mix(0) == 0
    assert len(torch.unique(stochastic_rounding.mix(words))) == len(words)
    assert stochastic_rounding.mix(words)[77].item() == reference_rounding.mix(77 * 4093)
