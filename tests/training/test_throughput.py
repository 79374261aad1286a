"""Tokens per second, model FLOP utilisation and time left, on a clock that the tests move."""

import pytest

from coupled_adam.training.throughput import Throughput


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_follows_from_the_steps_and_their_time() -> None:
    clock = Clock()
    throughput = Throughput(98_304, flops_per_token=0.8e9, peak_flops=989e12, clock=clock)
    for step in range(10, 101, 10):
        clock.now += 1.6
        throughput.mark(step)
    assert throughput.seconds_per_step == pytest.approx(0.16)
    assert throughput.tokens_per_second == pytest.approx(98_304 / 0.16)
    assert throughput.mfu == pytest.approx(98_304 / 0.16 * 0.8e9 / 989e12)
    assert throughput.seconds_left(1100) == pytest.approx(160)


@pytest.mark.parametrize("start_step", [0, 5000])
def test_the_first_steps_do_not_count(start_step: int) -> None:
    clock = Clock()
    throughput = Throughput(1, start_step=start_step, clock=clock)
    for step in range(1, 11):
        clock.now += {1: 60.0, 2: 20.0, 3: 5.0}.get(step, 0.5)  # compiling
        throughput.mark(start_step + step)
    assert throughput.seconds_per_step == pytest.approx(0.5)


def test_nothing_is_known_before_two_marks() -> None:
    clock = Clock()
    throughput = Throughput(1, flops_per_token=1, peak_flops=1, clock=clock)
    for step in (1, 2, 3):
        clock.now += 1
        throughput.mark(step)
    assert (throughput.tokens_per_second, throughput.mfu, throughput.seconds_left(100)) == (None, None, None)
    throughput.mark(3)  # the same step again
    assert throughput.tokens_per_second is None
    throughput.mark(4)  # a clock that has not moved
    assert throughput.tokens_per_second is None


def test_mfu_is_unknown_if_the_device_is() -> None:
    clock = Clock()
    throughput = Throughput(1, flops_per_token=1e9, clock=clock)
    for step in (10, 20):
        clock.now += 1
        throughput.mark(step)
    assert throughput.tokens_per_second == 10
    assert throughput.mfu is None


def test_the_rate_follows_the_last_half_minute() -> None:
    clock = Clock()
    throughput = Throughput(1, window_seconds=30, clock=clock)
    for step in range(10, 1001, 10):
        clock.now += 1
        throughput.mark(step)
    for step in range(1010, 1201, 10):
        clock.now += 2
        throughput.mark(step)
    assert throughput.tokens_per_second == pytest.approx(5)


def test_steps_longer_than_the_window_have_a_rate() -> None:
    clock = Clock()
    throughput = Throughput(1, window_seconds=30, clock=clock)
    for step in range(3, 8):
        clock.now += 100
        throughput.mark(step)
    assert throughput.seconds_per_step == pytest.approx(100)


def test_pauses_do_not_lower_the_rate_but_count_for_the_time_left() -> None:
    clock = Clock()
    throughput = Throughput(1, clock=clock)
    with throughput.paused():  # before the training starts: it happens only once
        clock.now += 500
    for step in range(10, 411, 10):
        clock.now += 1
        throughput.mark(step)
        if step in (110, 210, 310, 410):
            with throughput.paused():
                clock.now += 5
    assert throughput.tokens_per_second == pytest.approx(10)
    # 40 s of training and 20 s of pauses for 400 steps
    assert throughput.seconds_left(1410) == pytest.approx(1000 * 0.1 * 1.5)
