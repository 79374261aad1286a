"""The GPUs a process may use and the energy they consume, from nvidia-smi."""

import os
import subprocess
import threading
import time
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


class EnergyMeter:
    """Context manager that integrates the power of GPUs over time.

    Args:
        gpus: names from `visible_gpus`; if empty, nothing is measured.
    """

    def __init__(self, gpus: list[str]) -> None:
        self._gpus = gpus
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._joules = 0.0
        self._last: dict[str, float] = {}  # when each GPU was last seen

    def __enter__(self) -> Self:
        if self._gpus:
            command = [
                QUERY,
                "--query-gpu=index,power.draw",
                "--format=csv,noheader,nounits",
                f"--id={','.join(self._gpus)}",
                f"--loop-ms={1000 // SAMPLES_PER_SECOND}",
            ]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
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

    @property
    def joules(self) -> float | None:
        """Energy so far; None if nothing could be measured."""
        return self._joules if self._joules > 0 else None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            index, _, power = line.partition(",")
            now = time.monotonic()
            try:
                watts = float(power)
            except ValueError:  # "[N/A]": this GPU does not report its power
                continue
            self._joules += watts * (now - self._last.get(index, now))
            self._last[index] = now
