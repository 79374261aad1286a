"""Power and clock of a GPU in the benchmark of training: a false nvidia-smi, and what it is asked."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def gpu_load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_load

    return gpu_load


def false_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> Path:
    """A program that writes its arguments to a file, then these lines, then nothing until it is killed."""
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable} -S\nimport sys, time\n"
        f"open({str(folder / 'arguments')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n"
        f"print({chr(10).join(lines)!r}, flush=True)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder / "arguments"


def test_means_are_of_the_numbers_that_are_told(gpu_load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_load, "SETTLING_SECONDS", 0.0)
    lines = ["690.50, 1700", "[N/A], 1800", "No devices were found", "699.50, [Unknown Error]"]
    arguments = false_nvidia_smi(tmp_path, monkeypatch, lines)
    begin = time.monotonic()
    with gpu_load.LoadMeter(["GPU-12"]) as meter:
        while len(meter.readings) < 3:
            assert time.monotonic() - begin < 30
            time.sleep(0.01)
        load = meter.mean(begin, time.monotonic())
    assert load == gpu_load.GpuLoad(watts=695.0, sm_megahertz=1750.0, readings=3)
    assert set(arguments.read_text().split("\n")) == {
        "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "--id=GPU-12", "--loop-ms=200",
    }  # fmt: skip


def test_the_first_second_is_left_out_and_so_is_what_comes_later(gpu_load: Any) -> None:
    meter = gpu_load.LoadMeter([])
    meter.readings = [
        (t, watts, 1500.0) for t, watts in ((9.9, 1.0), (10.5, 2.0), (11.5, 3.0), (12.5, 5.0), (13.5, 9.0))
    ]
    load = meter.mean(10.0, 13.0)
    assert (load.watts, load.sm_megahertz, load.readings) == (4.0, 1500.0, 2)
    assert meter.mean(13.0, 14.0) is None


def test_a_gpu_that_tells_nothing_has_no_means(gpu_load: Any) -> None:
    meter = gpu_load.LoadMeter([])
    meter.readings = [(2.0, None, None)]
    assert meter.mean(0.0, 3.0) == gpu_load.GpuLoad(watts=None, sm_megahertz=None, readings=1)


def test_without_nvidia_smi_nothing_is_read(gpu_load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpu_load.LoadMeter(["0"]) as meter:
        assert meter.mean(0.0, time.monotonic()) is None
