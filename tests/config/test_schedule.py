"""The learning rate: values computed by hand, torch's own schedulers, and invariants of every schedule."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coupled_adam.config.run_config import load_config
from coupled_adam.config.schedule import learning_rate

PAPER: dict[str, Any] = {"lr": 6e-4, "total_steps": 50_862, "warmup_steps": 100}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),  # from zero
        (1, 6e-6),
        (50, 3e-4),
        (99, 5.94e-4),
        (100, 6e-4),  # to the maximum
        (100 + 50_762 // 2, (6e-4 + 6e-5) / 2),  # half way
        (50_862, 6e-5),  # to 10%
        (60_000, 6e-5),
    ],
)
def test_cosine_follows_the_papers_description(step: int, expected: float) -> None:
    assert learning_rate(step, **PAPER) == pytest.approx(expected, rel=1e-6)


def test_a_quarter_of_the_cosine_is_45_degrees() -> None:
    # 0.1 + 0.9 * (1 + 0.70710678) / 2
    assert learning_rate(300, lr=1.0, total_steps=900, warmup_steps=100) == pytest.approx(0.86819805, rel=1e-8)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.0), (5, 0.5), (10, 1.0), (80, 1.0), (81, 0.96), (90, 0.6), (99, 0.24), (100, 0.2)]
)
def test_wsd_is_constant_then_falls_linearly(step: int, expected: float) -> None:
    settings: dict[str, Any] = {"warmup_steps": 10, "decay_steps": 20, "final_fraction": 0.2}
    assert learning_rate(step, lr=1.0, total_steps=100, kind="wsd", **settings) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (2, 0.5), (4, 1.0), (50, 1.0), (100, 1.0), (200, 1.0)])
def test_constant_stays_at_the_maximum(step: int, expected: float) -> None:
    assert learning_rate(step, lr=1.0, total_steps=100, warmup_steps=4, kind="constant") == expected


def test_cosine_equals_torchs_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80, eta_min=0.05)
    for step in range(20, 101):
        ours = learning_rate(step, lr=0.5, total_steps=100, warmup_steps=20)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_warmup_equals_torchs_scheduler() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 20)
    for step in range(20):
        ours = learning_rate(step, lr=0.5, total_steps=100, warmup_steps=20)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


@given(
    kind=st.sampled_from(["cosine", "constant", "wsd"]),
    total=st.integers(1, 10_000),
    lr=st.floats(1e-6, 1.0),
    final_fraction=st.floats(0, 1),
    data=st.data(),
)
def test_a_schedule_rises_falls_and_never_leaves_its_bounds(
    kind: str, total: int, lr: float, final_fraction: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    settings: dict[str, Any] = {
        "lr": lr,
        "total_steps": total,
        "warmup_steps": warmup,
        "kind": kind,
        "final_fraction": final_fraction,
        "decay_steps": data.draw(st.integers(1, total - warmup)),
    }
    step = data.draw(st.integers(0, total))
    here, after = learning_rate(step, **settings), learning_rate(step + 1, **settings)
    slack = 1e-12
    assert -slack <= here <= lr * (1 + slack)
    if step < warmup:
        assert after >= here
    else:
        assert after <= here * (1 + slack)
        assert after >= lr * final_fraction * (1 - slack)
    end = lr if kind == "constant" else lr * final_fraction
    assert math.isclose(learning_rate(total, **settings), end, rel_tol=1e-9, abs_tol=1e-15)


def test_a_step_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step -1: .*0"):
        learning_rate(-1, lr=1.0, total_steps=10)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'linear'.*cosine"):
        learning_rate(1, lr=1.0, total_steps=10, kind="linear")


def test_a_config_passes_its_numbers_to_the_schedule() -> None:
    overrides = ["schedule.kind=wsd", "schedule.decay=10%", "schedule.final_fraction=0.5", "schedule.warmup=5%"]
    config = load_config("tiny", overrides)  # 300 steps, lr 3e-3: 15 steps up, 30 down
    assert (config.warmup_steps, config.decay_steps) == (15, 30)
    rates = [config.learning_rate(step) for step in (0, 5, 15, 270, 285, 300)]
    assert rates == pytest.approx([0, 1e-3, 3e-3, 3e-3, 2.25e-3, 1.5e-3])
