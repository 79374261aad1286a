"""Power and clock of a GPU while something runs on it, for the benchmarks.

The power that nvidia-smi shows is the mean of the last second, so the first second after a beginning is left out.
"""

import statistics
import time
from dataclasses import dataclass

from coupled_adam.study.energy import GpuReader

FIELDS = "power.draw", "clocks.sm"
PER_SECOND = 5
SETTLING_SECONDS = 1.0
# Shorter stretches have too few readings for a mean.
SHORTEST_SECONDS = 3.0


@dataclass(frozen=True)
class GpuLoad:
    """Means over a stretch of time."""

    watts: float | None
    """None where the GPU does not tell."""
    sm_megahertz: float | None
    readings: int


def number(text: str) -> float | None:
    """A value of nvidia-smi, or None for what it does not tell: "[N/A]", "[Not Supported]", "[Unknown Error]".

    Example:
        >>> number("693.21"), number("[N/A]")
        (693.21, None)
    """
    try:
        return float(text)
    except ValueError:
        return None


class LoadMeter(GpuReader):
    """Context manager that records power and SM clock of one GPU.

    Args:
        gpus: at most one name from `visible_gpus`; if empty, nothing is recorded.
    """

    def __init__(self, gpus: list[str]) -> None:
        assert len(gpus) <= 1
        super().__init__(gpus, FIELDS, self._record, PER_SECOND)
        self.readings: list[tuple[float, float | None, float | None]] = []  # time, watts, MHz

    def _record(self, values: list[str]) -> None:
        if len(values) == len(FIELDS):  # other lines are messages
            self.readings.append((time.monotonic(), number(values[0]), number(values[1])))

    def mean(self, begin: float, end: float) -> GpuLoad | None:
        """The means from one moment of `time.monotonic` to another; None without a reading."""
        found = [reading for reading in self.readings if begin + SETTLING_SECONDS <= reading[0] <= end]
        if not found:
            return None
        _, watts, megahertz = ([value for value in column if value is not None] for column in zip(*found, strict=True))
        return GpuLoad(
            watts=statistics.fmean(watts) if watts else None,
            sm_megahertz=statistics.fmean(megahertz) if megahertz else None,
            readings=len(found),
        )
