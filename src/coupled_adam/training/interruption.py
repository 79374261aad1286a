"""SIGINT, SIGTERM and SIGHUP: the first asks the run to save and end, a second Ctrl-C ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
"""The signals that end a run. SIGHUP comes when the terminal is closed; Windows has none."""


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
    """Turn the signals into a flag; the former handlers return at the end."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # only the main thread may set handlers
        return
    former = {number: signal.signal(number, interruption) for number in signals_to_watch()}
    try:
        yield interruption
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def signals_to_watch() -> list[signal.Signals]:
    """Those of NAMES that there are here. With nohup SIGHUP is ignored: then it stays so, and the run goes on."""
    found = [signal.Signals[name] for name in NAMES if name in signal.Signals.__members__]
    return [each for each in found if each.name != "SIGHUP" or signal.getsignal(each) != signal.SIG_IGN]


def exit_code(signal_name: str) -> int:
    """What a shell expects of a program that such a signal has ended.

    Example:
        >>> exit_code("SIGINT"), exit_code("SIGTERM")
        (130, 143)
    """
    return 128 + int(signal.Signals[signal_name])
