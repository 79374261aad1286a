"""Handle SIGINT, SIGTERM and SIGHUP: the first signal stops the run after a save, a second Ctrl-C immediately."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
"""The signals that stop a run. SIGHUP is sent when the terminal is closed; Windows does not have it."""


class Interruption:
    """Flag that is true once a signal has asked the run to stop."""

    signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


@contextmanager
def watching_signals() -> Iterator[Interruption]:
    """Set a flag on these signals; restore the previous handlers at the end."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread can set handlers
        return
    former = {number: signal.signal(number, interruption) for number in signals_to_watch()}
    try:
        yield interruption
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def signals_to_watch() -> list[signal.Signals]:
    """The signals in NAMES that exist on this system; under nohup, SIGHUP stays ignored."""
    found = [signal.Signals[name] for name in NAMES if name in signal.Signals.__members__]
    return [each for each in found if each.name != "SIGHUP" or signal.getsignal(each) != signal.SIG_IGN]


def exit_code(signal_name: str) -> int:
    """The conventional exit code of a program ended by a signal.

    Example:
        >>> exit_code("SIGINT"), exit_code("SIGTERM")
        (130, 143)
    """
    return 128 + int(signal.Signals[signal_name])
