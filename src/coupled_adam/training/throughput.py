"""Training speed and remaining time.

The trainer calls `mark` when a step is known to be finished (on a GPU, after reading a loss). The rate covers the marks
of the last half minute. It excludes the first steps, in which kernels are compiled, and pauses such as validation and
saving. The remaining time includes the expected pauses.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

# During these steps, torch.compile compiles, CUDA graphs are captured and the allocator grows.
WARM_UP_STEPS = 3
WINDOW_SECONDS = 30.0


class Mark(NamedTuple):
    """A finished step and its time on a clock that excludes pauses."""

    step: int
    seconds: float


class Throughput:
    """Tokens per second, model FLOP utilisation and remaining time, over a recent window.

    Args:
        tokens_per_step: over all ranks.
        flops_per_token: of the model, forward and backward.
        peak_flops: FLOP per second of all devices together; None if unknown.
        start_step: number of steps finished before.
        window_seconds: length of the window; it always covers at least two marks.
        clock: monotonic clock in seconds.

    Example:
        >>> throughput = Throughput(tokens_per_step=1000, clock=iter([0.0, 2.0]).__next__)
        >>> throughput.mark(10)
        >>> throughput.mark(20)
        >>> throughput.tokens_per_second, throughput.seconds_left(total_steps=100)
        (5000.0, 16.0)
    """

    def __init__(
        self,
        tokens_per_step: int,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        start_step: int = 0,
        window_seconds: float = WINDOW_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._first_step = start_step + WARM_UP_STEPS
        self._window_seconds = window_seconds
        self._clock = clock
        self._paused = 0.0  # seconds since the first mark after the warm-up
        self._first: Mark | None = None
        self._marks: deque[Mark] = deque()

    def mark(self, step: int) -> None:
        """Record that `step` steps are finished now."""
        if step < self._first_step or (self._marks and step <= self._marks[-1].step):
            return
        now = Mark(step, self._clock() - self._paused)
        self._first = self._first or now
        self._marks.append(now)
        while len(self._marks) > 2 and self._marks[1].seconds <= now.seconds - self._window_seconds:
            self._marks.popleft()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside this context from the rate."""
        start = self._clock()
        try:
            yield
        finally:
            if self._first is not None:
                self._paused += self._clock() - start

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per step without pauses; None before there are two marks."""
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last.seconds - first.seconds) / (last.step - first.step)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all ranks; None before there are two marks."""
        seconds = self.seconds_per_step
        return self._tokens_per_step / seconds if seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, from 0 to 1: the FLOPs of the model divided by the peak of the devices."""
        if self.tokens_per_second is None or self._flops_per_token is None or self._peak_flops is None:
            return None
        return self.tokens_per_second * self._flops_per_token / self._peak_flops

    def seconds_left(self, total_steps: int) -> float | None:
        """Estimated time for the remaining steps, assuming pauses as frequent as so far."""
        if self.seconds_per_step is None or self._first is None:
            return None
        last = self._marks[-1]
        with_pauses = 1 + self._paused / max(last.seconds - self._first.seconds, 1e-9)
        return (total_steps - last.step) * self.seconds_per_step * with_pauses
