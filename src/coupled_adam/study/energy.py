"""The GPUs a process may use and the energy they consume, from nvidia-smi."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

SAMPLES_PER_SECOND = 2
QUERY = "nvidia-smi"


def visible_gpus() -> list[str]:
    """GPU names as in CUDA_VISIBLE_DEVICES; empty without nvidia-smi or GPUs. Does not load torch."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None:
        return [name.strip() for name in wanted.split(",") if name.strip() and name.strip() != "-1"]
    try:
        found = subprocess.run(
            [QUERY, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


class GpuReader:
    """Context manager that reads numbers of GPUs several times a second, from a process of nvidia-smi.

    That process samples; a thread of this one waits for its lines and does nothing in between. Without nvidia-smi,
    nothing is read.

    Args:
        gpus: names from `visible_gpus`; if empty, nothing is read.
        fields: as in `nvidia-smi --help-query-gpu`, such as "power.draw".
        on_reading: called in the thread with the values of these fields, as text, of one GPU.
        per_second: readings of each GPU per second.
    """

    def __init__(
        self, gpus: list[str], fields: Sequence[str], on_reading: Callable[[list[str]], None], per_second: int
    ) -> None:
        self._gpus = gpus
        self._command = [
            QUERY,
            f"--query-gpu={','.join(fields)}",
            "--format=csv,noheader,nounits",
            f"--id={','.join(gpus)}",
            f"--loop-ms={1000 // per_second}",
        ]
        self._on_reading = on_reading
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._gpus:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except OSError:
                return self
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_reading([value.strip() for value in line.split(",")])


class EnergyMeter(GpuReader):
    """Context manager that integrates the power of GPUs over time.

    Args:
        gpus: names from `visible_gpus`; if empty, nothing is measured.
    """

    def __init__(self, gpus: list[str]) -> None:
        super().__init__(gpus, ("index", "power.draw"), self._add, SAMPLES_PER_SECOND)
        self._joules = 0.0
        self._last: dict[str, float] = {}  # when each GPU was last seen

    @property
    def joules(self) -> float | None:
        """Energy so far; None if nothing could be measured."""
        return self._joules if self._joules > 0 else None

    def _add(self, values: list[str]) -> None:
        now = time.monotonic()
        try:
            index, power = values
            watts = float(power)
        except ValueError:  # a message, or "[N/A]": this GPU does not report its power
            return
        self._joules += watts * (now - self._last.get(index, now))
        self._last[index] = now
