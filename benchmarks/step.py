"""Time and memory of one optimizer step on one vocabulary table, compared with torch.optim.AdamW in the same run.

    python benchmarks/step.py                 on CUDA if available, else on the CPU
    python benchmarks/step.py --device cpu --shapes 50304x768
    python benchmarks/step.py --dtype bfloat16
    python benchmarks/step.py --state-dtype bfloat16   also CoupledAdamW with first moments in bfloat16
    python benchmarks/step.py --device cpu --busy 1    while this many other processes are busy
    python benchmarks/step.py --json OUT.json
    python benchmarks/step.py --back-to-back  step after step, with launch times and a warm cache

Each peer has its own tensors. Rounds alternate between the peers, so that a slow moment of the machine affects all of
them, and the median over rounds is reported. On CUDA, events time every step separately, with a cold cache and a full
queue, as after the backward pass in training. The time that the host needs to launch a step is reported separately. On
the CPU, CoupledAdamW is timed with numba's compiled loops, if installed, and with torch operations.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import blockwise

Timer = Callable[[Callable[[], object], int, str], float]
SHAPES = {
    "cuda": ["50304x768", "50304x2560", "128256x4096", "262144x2304"],
    "cpu": ["50304x768"],
}


@dataclass
class Measurement:
    """One peer at one shape."""

    shape: str
    dtype: str
    peer: str
    milliseconds: float
    host_microseconds: float
    """Time until `step` returns while the device is still busy; hidden in training. On the CPU: the whole step."""
    passes: int
    """How often the algorithm must read or write V x H elements."""
    bytes_per_number: int
    """Bytes that these passes move per number of the table."""
    gigabytes_per_second: float
    state_bytes: int
    temporary_bytes: int
    """Peak memory during a step, minus the memory allocated before it."""


@dataclass
class Peer:
    """An optimizer with its own table."""

    name: str
    passes: int
    build: Callable[..., torch.optim.Optimizer]
    """Takes the table and, for CoupledAdamW, `betas` and `state_dtype`."""
    moment_passes: int = 2
    """Number of passes over the first moment."""
    state_dtype: torch.dtype | None = None
    clip_outside: bool = False
    numba: bool = True

    def prepare(self, V: int, H: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.table = nn.Parameter(torch.randn(V, H, device=device, generator=generator).to(dtype))
        self.table.grad = (torch.randn(V, H, device=device, generator=generator) * 1e-3).to(dtype)
        options = {} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        self.optimizer = self.build(self.table, **options)

    def step(self) -> None:
        if self.clip_outside:
            nn.utils.clip_grad_norm_([self.table], 1.0)
        if self.numba:
            self.optimizer.step()
            return
        with mock.patch.object(blockwise, "NUMBA_ELEMENTS", sys.maxsize):
            self.optimizer.step()

    def bytes_per_number(self) -> int:
        moment_bytes = (self.state_dtype or self.table.dtype).itemsize
        return (self.passes - self.moment_passes) * self.table.itemsize + self.moment_passes * moment_bytes

    def state_bytes(self) -> int:
        return sum(t.numel() * t.itemsize for t in self.optimizer.state[self.table].values())


def coupled_group(table: nn.Parameter, **options: object) -> list[dict[str, object]]:
    return [{"params": [table], "coupled": True, "weight_decay": 0.0, **options}]


def partially_coupled_group(table: nn.Parameter) -> list[dict[str, object]]:
    return coupled_group(table, row_exponent=0.25, mean_free=True)


def peers(device: str, state_dtype: torch.dtype | None) -> list[Peer]:
    numba = device == "cpu" and blockwise._numba_kernels() is not None
    everywhere = [
        Peer("AdamW fused", 7, lambda table: torch.optim.AdamW([table], fused=True, weight_decay=0.0)),
        Peer("AdamW foreach", 7, lambda table: torch.optim.AdamW([table], foreach=True, weight_decay=0.0)),
        Peer("CoupledAdamW", 6, lambda table, **state: CoupledAdamW(coupled_group(table), fused=True, **state)),
        Peer(
            "clip_grad_norm_ + AdamW fused",
            10,
            lambda table: torch.optim.AdamW([table], fused=True, weight_decay=0.0),
            clip_outside=True,
        ),
        Peer(
            "CoupledAdamW(max_grad_norm)",
            6,
            lambda table, **state: CoupledAdamW(coupled_group(table), fused=True, max_grad_norm=1.0, **state),
        ),
        Peer(
            "CoupledAdamW, partially coupled",
            6,
            lambda table, **state: CoupledAdamW(partially_coupled_group(table), fused=True, **state),
            moment_passes=3,
        ),
        Peer(
            "CoupledAdamW(max_grad_norm), partially coupled",
            7,
            lambda table, **state: CoupledAdamW(partially_coupled_group(table), fused=True, max_grad_norm=1.0, **state),
            moment_passes=3,
        ),
    ]
    everywhere += [
        replace(
            peer,
            name=f"{peer.name}, beta1 = 0",
            passes=passes,
            build=functools.partial(peer.build, betas=(0.0, 0.99)),
            moment_passes=0,
        )
        for peer, passes in zip(of_coupled(everywhere), (4, 4, 4, 5), strict=True)
    ]
    if state_dtype is not None:
        everywhere += [
            replace(peer, name=f"{peer.name}, {name_of(state_dtype)} state", state_dtype=state_dtype)
            for peer in of_coupled(everywhere)
            if peer.moment_passes
        ]
    if not numba:
        return everywhere
    without = [replace(peer, name=f"{peer.name}, torch operations", numba=False) for peer in of_coupled(everywhere)]
    return everywhere + without


def of_coupled(every: list[Peer]) -> list[Peer]:
    return [peer for peer in every if peer.name.startswith("CoupledAdamW")]


def seconds_of(function: Callable[[], object], repeats: int, device: str) -> float:
    """Median seconds per call."""
    if device == "cpu":
        return host_seconds_of(function, repeats)
    flush = torch.empty(2**28, dtype=torch.uint8, device=device)  # several times the L2 cache
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)  # about 20 ms for the host to fill the queue
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def back_to_back_seconds_of(function: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds per call, including launches that nothing hides."""
    if device == "cpu":
        return host_seconds_of(function, repeats)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def host_seconds_of(function: Callable[[], object], repeats: int) -> float:
    """Seconds per call on the host."""
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def temporary_bytes(function: Callable[[], object], device: str) -> int:
    """Peak memory during a call, minus the memory allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    peak = allocated = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` other processes busy, each with one thread, while the block runs."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=never_rest, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def never_rest() -> None:
    while True:
        pass


def measure_shape(
    shape: str,
    dtype: torch.dtype,
    state_dtype: torch.dtype | None,
    device: str,
    rounds: int,
    repeats: int,
    timer: Timer,
) -> list[Measurement]:
    V, H = (int(number) for number in shape.split("x"))
    contestants = peers(device, state_dtype)
    for peer in contestants:
        peer.prepare(V, H, dtype, device)
        for _ in range(3):
            peer.step()
    times: dict[str, list[float]] = {peer.name: [] for peer in contestants}
    for _ in range(rounds):
        for peer in contestants:
            times[peer.name].append(timer(peer.step, repeats, device))
    measurements = []
    for peer in contestants:
        seconds = statistics.median(times[peer.name])
        host = host_seconds_of(peer.step, repeats)
        measurements.append(
            Measurement(
                shape=shape,
                dtype=name_of(dtype),
                peer=peer.name,
                milliseconds=seconds * 1e3,
                host_microseconds=host * 1e6,
                passes=peer.passes,
                bytes_per_number=peer.bytes_per_number(),
                gigabytes_per_second=peer.bytes_per_number() * V * H / seconds / 1e9,
                state_bytes=peer.state_bytes(),
                temporary_bytes=temporary_bytes(peer.step, device),
            )
        )
    return measurements


def copy_bandwidth(device: str) -> float:
    """Bandwidth of a plain copy, read plus written, in GB/s: the upper limit on CUDA.

    0 on the CPU, where a copy is slower than a kernel that writes to the memory it has just read.
    """
    if device == "cpu":
        return 0.0
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    seconds_of(copy, 3, device)
    seconds = statistics.median(seconds_of(copy, 3, device) for _ in range(7))
    return 2 * source.numel() * 4 / seconds / 1e9


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show(measurements: list[Measurement], ceiling: float, console: Console) -> None:
    copy = f" (copy bandwidth {ceiling:,.0f} GB/s)" if ceiling else ""
    table = Table(title=f"one step of one table, {measurements[0].dtype}{copy}")
    table.add_column("V x H")
    table.add_column("optimizer")
    times = ("ms", "x fused", "x clip + fused", "B/number", "GB/s", "% of copy", "host µs")
    for column in (*times, "state MB", "temp. MB"):
        table.add_column(column, justify="right")
    for m in measurements:
        same = {other.peer: other.milliseconds for other in measurements if other.shape == m.shape}
        table.add_row(
            m.shape,
            m.peer,
            f"{m.milliseconds:.3f}",
            f"{m.milliseconds / same['AdamW fused']:.2f}",
            f"{m.milliseconds / same['clip_grad_norm_ + AdamW fused']:.2f}",
            str(m.bytes_per_number),
            f"{m.gigabytes_per_second:,.0f}",
            f"{100 * m.gigabytes_per_second / ceiling:.0f}" if ceiling else "-",
            f"{m.host_microseconds:,.0f}",
            f"{m.state_bytes / 1e6:,.1f}",
            f"{m.temporary_bytes / 1e6:,.1f}",
        )
    console.print(table)


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    result = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", metavar="VxH", help="default: the vocabularies of GPT-2, Llama 3, Gemma")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of table and state")
    parser.add_argument(
        "--state-dtype", choices=["float32", "bfloat16"], help="also time CoupledAdamW with first moments of this dtype"
    )
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="keep N other processes busy")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, help="steps in a row per round (default: 20 on CUDA, 3 on the CPU)")
    parser.add_argument("--back-to-back", action="store_true", help="time steps in a row, including launches")
    parser.add_argument("--json", metavar="FILE", help="also write the measurements to this file")
    parser.add_argument("--commit", default=commit(), help="commit to report, if git is not available")
    arguments = parser.parse_args()
    device = arguments.device
    repeats = arguments.repeats or (20 if device == "cuda" else 3)
    console = Console(width=150)
    console.print(f"{hardware(device)}, torch {torch.__version__}, {date.today()}, commit {arguments.commit}")
    ceiling = copy_bandwidth(device)
    timer = back_to_back_seconds_of if arguments.back_to_back else seconds_of
    dtype = getattr(torch, arguments.dtype)
    state_dtype = getattr(torch, arguments.state_dtype) if arguments.state_dtype else None
    measurements = []
    with busy_processes(arguments.busy):
        for shape in arguments.shapes or SHAPES[device]:
            measurements += measure_shape(shape, dtype, state_dtype, device, arguments.rounds, repeats, timer)
    show(measurements, ceiling, console)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    console.print(f"{arguments.busy} other busy processes; load average of the machine {load:.1f}")
    if arguments.json:
        report = {
            "hardware": hardware(device),
            "torch": torch.__version__,
            "date": str(date.today()),
            "commit": arguments.commit,
            "busy_processes": arguments.busy,
            "load_average": load,
            "copy_gigabytes_per_second": ceiling,
            "measurements": [asdict(m) for m in measurements],
        }
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
