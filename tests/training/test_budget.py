"""A share of the time: what is allowed stays within it, on a clock that the tests move."""

import contextlib

import pytest

from coupled_adam.training.budget import Budget


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cost", [0.01, 1.0, 30.0])
def test_what_is_allowed_stays_within_the_share(cost: float) -> None:
    clock = Clock()
    budget = Budget(share=0.01, clock=clock)
    for _ in range(10_000):
        clock.now += 5  # of training
        if budget.allows():
            with budget.spending():
                clock.now += cost
    elapsed = clock.now - 1000
    assert budget.spent == pytest.approx(budget.times * cost)
    assert budget.times + budget.refused == 10_000
    assert budget.spent <= 0.01 * elapsed
    # Nor is it stingy: it was done whenever it fitted, as far as the steps of 5 s allow.
    assert budget.times == 10_000 or budget.spent >= 0.01 * elapsed - cost - 0.05


def test_the_first_time_is_always_allowed() -> None:
    assert Budget(share=0.01, clock=Clock()).allows()


def test_what_became_more_expensive_waits_longer() -> None:
    clock = Clock()
    budget = Budget(share=0.1, clock=clock)
    for cost in (1.0, 4.0):
        with budget.spending():
            clock.now += cost
    clock.now = 1000 + 89.0  # 5 s are spent and 4 s more expected: 9 s are a tenth of 90 s
    assert not budget.allows()
    clock.now += 2
    assert budget.allows()


def test_time_that_ends_with_an_exception_was_spent_too() -> None:
    clock = Clock()
    budget = Budget(clock=clock)
    with contextlib.suppress(RuntimeError), budget.spending():
        clock.now += 7
        raise RuntimeError
    assert (budget.spent, budget.times) == (7, 1)


def test_the_answer_is_the_one_that_all_ranks_agree_on() -> None:
    first = Budget(clock=Clock())
    asked: list[bool] = []

    def answer_of_rank_0(own: bool) -> bool:
        asked.append(own)
        return False

    second = Budget(agree=answer_of_rank_0, clock=Clock())
    assert first.allows()
    assert not second.allows()
    assert asked == [True]
    assert second.refused == 1


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"Invalid share value: .*above 0, up to 1"):
        Budget(share=share)
