"""SIGINT and SIGTERM: the first asks the run to save and end, a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether somebody asked the run to end, and how."""

    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


@contextmanager
def watching_signals() -> Iterator[Interruption]:
    """Turn SIGINT and SIGTERM into a flag; the former handlers return at the end."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may set handlers
        return
    former = {number: signal.signal(number, interruption) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruption
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
