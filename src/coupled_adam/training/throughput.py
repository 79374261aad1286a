"""How fast a training goes, and how long it will still take.

The trainer marks the points at which it knows that a step is finished (on a GPU: where it has read a loss). The rate is
that of the marks of the last half minute. The first steps, in which kernels are compiled, count for nothing, and
neither does the time that is spent on other things (validation, saving); the time left does expect more of the latter.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

# In these torch.compile compiles, CUDA graphs are captured and the allocator grows.
WARM_UP_STEPS = 3
WINDOW_SECONDS = 30.0


class Mark(NamedTuple):
    """A finished step and what the clock of the training said, which stands still in pauses."""

    step: int
    seconds: float


class Throughput:
    """Tokens per second, model FLOP utilisation and time left, over the last seconds.

    Args:
        tokens_per_step: of all ranks together.
        flops_per_token: of the model, forward and backward.
        peak_flops: of all devices together, per second; None where the device is not known.
        start_step: steps that were finished before.
        window_seconds: the rate is taken over this time, but always over two marks at least.
        clock: seconds that only increase.

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
        self._paused = 0.0  # seconds, since the first mark that counts
        self._first: Mark | None = None
        self._marks: deque[Mark] = deque()

    def mark(self, step: int) -> None:
        """Say that `step` steps are finished now."""
        if step < self._first_step or (self._marks and step <= self._marks[-1].step):
            return
        now = Mark(step, self._clock() - self._paused)
        self._first = self._first or now
        self._marks.append(now)
        while len(self._marks) > 2 and self._marks[1].seconds <= now.seconds - self._window_seconds:
            self._marks.popleft()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: it does not lower the rate."""
        start = self._clock()
        try:
            yield
        finally:
            if self._first is not None:
                self._paused += self._clock() - start

    @property
    def seconds_per_step(self) -> float | None:
        """Without pauses; None before there are two marks."""
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last.seconds - first.seconds) / (last.step - first.step)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        seconds = self.seconds_per_step
        return self._tokens_per_step / seconds if seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation, from 0 to 1: the FLOPs that the model needs over those the devices could do."""
        if self.tokens_per_second is None or self._flops_per_token is None or self._peak_flops is None:
            return None
        return self.tokens_per_second * self._flops_per_token / self._peak_flops

    def seconds_left(self, total_steps: int) -> float | None:
        """For the steps after the last mark, with pauses as long and as frequent as they have been so far."""
        if self.seconds_per_step is None or self._first is None:
            return None
        last = self._marks[-1]
        with_pauses = 1 + self._paused / max(last.seconds - self._first.seconds, 1e-9)
        return (total_steps - last.step) * self.seconds_per_step * with_pauses
