"""A share of the time for what a training could do without."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """Lets something be done only as often as it takes no more than a share of the time.

    What it takes is known from the last time; the first time is always allowed. Clocks differ between ranks: where what
    is done is collective, `agree` has to give every rank the same answer, or they would wait for each other.

    Args:
        share: of the time since the budget was made.
        agree: turns the answer of each rank into one for all, for example that of rank 0.
        clock: seconds that only increase.

    Example:
        >>> budget = Budget(share=0.01, clock=iter([0.0, 100.0, 102.0, 150.0, 401.0]).__next__)
        >>> with budget.spending():  # from 100 to 102
        ...     pass
        >>> budget.allows()  # at 150: 2 s spent and 2 s more are over 1%
        False
        >>> budget.allows()  # at 401
        True
    """

    def __init__(
        self,
        share: float = 0.01,
        *,
        agree: Callable[[bool], bool] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"Invalid share value: {share}. Use a part of the time above 0, up to 1")
        self._share = share
        self._agree = agree
        self._clock = clock
        self._start = clock()
        self._last_cost = 0.0
        self.spent = 0.0
        """Seconds."""
        self.times = 0
        """How often it was done."""
        self.refused = 0
        """How often it was not allowed."""

    def allows(self) -> bool:
        """Whether doing it now would keep within the share. On every rank, where `agree` is collective."""
        fits = self.spent + self._last_cost <= self._share * (self._clock() - self._start)
        allowed = self._agree(fits)
        self.refused += not allowed
        return allowed

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around what is done."""
        start = self._clock()
        try:
            yield
        finally:
            self._last_cost = self._clock() - start
            self.spent += self._last_cost
            self.times += 1
