"""docs/mathematics.md, "What beta2 remembers": the table of weights is what the optimizers do."""

import math
import random
import re
from collections.abc import Sequence

import pytest
import torch
from page_text import cells_of, words

from coupled_adam import CoupledAdamW

PAGE = "docs/mathematics.md"


def rows_of_the_page() -> dict[tuple[float, float], dict[int, str]]:
    """The shown weights by (row exponent, beta2) and k. The row without beta2 is tested with 0.95."""
    header, _, *rows = cells_of("push weights", PAGE)
    found = {}
    for label, *cells in rows:
        y = float(re.findall(r"y = ([\d.]+)", label)[0])
        beta2 = float((re.findall(r"beta_2 = ([\d.]+)", label) or ["0.95"])[0])
        found[y, beta2] = {int(k): cell for k, cell in zip(header[1:], cells, strict=True)}
    return found


def measured_weight(k: int, y: float, beta2: float, *, adamw: bool = False) -> float:
    """Pushes of one row over its pull, in the updates of a real optimizer, relative to the same ratio of the gradients.

    k rows are pulled in turn, one per step, so that the means over the table are constant.
    """
    table = torch.nn.Parameter(torch.zeros(k, 1, dtype=torch.float64))
    if adamw:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([table], lr=1.0, betas=(0.0, beta2), eps=0, weight_decay=0)
    else:
        group = {"params": [table], "coupled": True, "row_exponent": y}
        optimizer = CoupledAdamW([group], lr=1.0, betas=(0.0, beta2), eps=0, weight_decay=0)
    steps = round(6 / (1 - beta2) / k + 2) * k  # until the second moments repeat, with the last k measured
    pushes, pull = 0.0, 0.0
    for step in range(steps):
        gradient = torch.full((k, 1), 1 / (k - 1), dtype=torch.float64)
        gradient[step % k] = -1.0
        table.grad = gradient
        before = table[0].item()
        optimizer.step()
        if step >= steps - k:
            moved = before - table[0].item()
            pushes += max(moved, 0.0)
            pull += max(-moved, 0.0)
    return pushes / pull


def test_weights_of_pushes_are_those_of_the_page() -> None:
    for (y, beta2), weights in rows_of_the_page().items():
        assert f"{measured_weight(59, y, beta2):.2f}" == weights[59], (y, beta2)


def test_adamw_weighs_pushes_as_row_exponent_1() -> None:
    assert measured_weight(24, 1.0, 0.95, adamw=True) == pytest.approx(measured_weight(24, 1.0, 0.95), rel=1e-6)


def calculated_weight(gaps: Sequence[int], y: float, beta2: float) -> float:
    """The weight by the recursion of the second moment, for a token that occurs after these numbers of steps."""
    push = 1 / (sum(gaps) / len(gaps) - 1)  # as many pushes as pulls, in sum
    moment, before, pushes = 0.0, 1.0, 0.0
    for gap in gaps:
        moment = before = beta2 * moment + (1 - beta2)
        for _ in range(gap - 1):
            moment = beta2 * moment + (1 - beta2) * push**2
            pushes += push * (before / moment) ** (y / 2)
    return pushes / len(gaps)


def test_every_weight_of_the_page_follows_from_the_second_moment() -> None:
    for (y, beta2), weights in rows_of_the_page().items():
        for k, shown in weights.items():
            # A steady state: the first periods, whose second moments still grow, hardly count.
            weight = calculated_weight([k] * round(3e5 / k), y, beta2)
            assert weight == pytest.approx(float(shown), abs=0.0051), (y, beta2, k)


def test_the_formula_leaves_the_pushes_out_and_random_gaps_weigh_more() -> None:
    a = 206 / 2 * math.log(1 / 0.95)
    largest = rows_of_the_page()[1.0, 0.95][206]
    assert f"limits $w$ ({largest} instead of {math.expm1(a) / a:.0f})" in words(PAGE)
    draws = random.Random(0)
    gaps = [max(1, round(draws.expovariate(1 / 59))) for _ in range(5000)]
    mean = round(sum(gaps) / len(gaps))
    assert calculated_weight(gaps, 1.0, 0.95) > 1.2 * calculated_weight([mean] * 5000, 1.0, 0.95)
