"""Time all measures of one embedding matrix, and compare with a literal implementation in the same run.

    python benchmarks/measure.py                 50304 x 768, the GPT-2 vocabulary at the size of GPT-2 small
    python benchmarks/measure.py --large         262144 x 4096 (4 GiB), time and memory of `measure` alone
    python benchmarks/measure.py --json OUT.json

The literal implementation uses numpy's `eig` of the Gram matrix, one matrix-vector product per eigenvector, and an SVD
of the whole matrix. It is timed in float64, which it needs for the six digits of `measure`, and in float32, the dtype
of the matrix. Rounds alternate between the peers. The table shows the median and the best time; other work on the
machine affects the best time least. There are two matrices, because the time of `measure` depends on the data: short
rows let it skip most eigenvectors, rows four times as long, as in SmolLM2, do not.

Legend: V vocabulary rows, H hidden size.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from coupled_adam.embeddings import measure
from step import commit, hardware

Matrix = npt.NDArray[np.floating]
Measures = dict[str, float]

LENGTHS = {"short": 1.0, "long": 4.0}


@dataclass
class Measurement:
    """One peer on one matrix."""

    shape: str
    rows: str
    """The matrix: "short" or "long" rows."""
    peer: str
    seconds: float
    """Median over the rounds."""
    best_seconds: float
    error: float | None
    """Largest relative error of iso, mu_norm_ratio, kappa and rho_log, compared with the literal float64 results."""


def table(V: int, H: int, length: float) -> npt.NDArray[np.float32]:
    """Create, in blocks, a matrix like a trained one: rows of norm about `length`, a shift, a decaying spectrum."""
    random = np.random.default_rng(0)
    spread = np.geomspace(3, 0.1, H, dtype=np.float32) / np.float32(np.sqrt(H))
    shift = random.standard_normal(H, dtype=np.float32) / np.float32(np.sqrt(H))
    E = np.empty((V, H), np.float32)
    for start in range(0, V, 4096):
        rows = E[start : start + 4096]
        random.standard_normal(out=rows, dtype=np.float32)
        rows *= spread
        rows += shift
        rows *= np.float32(length)
    return E


def zipf_counts(V: int) -> npt.NDArray[np.int64]:
    return (1e9 / np.arange(1, V + 1)).astype(np.int64)


def literal(E: Matrix, counts: npt.NDArray[np.int64]) -> Measures:
    """Compute the paper's definitions, line by line."""
    _, C = np.linalg.eig(E.T @ E)
    mu = E.mean(0)
    Z = []
    for c in C.T.real:
        c = c if c @ mu >= 0 else -c
        Z.append(np.exp(E @ c).sum())
    sigma = np.linalg.svd(E, compute_uv=False)
    norms = np.linalg.norm(E, axis=1)
    p = counts / counts.sum()
    return {
        "iso": float(min(Z) / max(Z)),
        "mu_norm_ratio": float(np.linalg.norm(mu) / norms.mean()),
        "kappa": float(100 * sigma.min() / sigma.max()),
        "rho_log": float(100 * np.corrcoef(norms, np.log(p + 1e-10))[0, 1]),
    }


def by_measure(E: Matrix, counts: npt.NDArray[np.int64]) -> Measures:
    metrics = measure(E, unigram=counts)
    return {name: getattr(metrics, name) for name in ("iso", "mu_norm_ratio", "kappa", "rho_log")}


def compare(V: int, H: int, rows: str, rounds: int) -> list[Measurement]:
    E, counts = table(V, H, LENGTHS[rows]), zipf_counts(V)
    E64 = E.astype(np.float64)
    peers: dict[str, Callable[[], Measures]] = {
        "literal, float64": lambda: literal(E64, counts),
        "literal, float32": lambda: literal(E, counts),
        "measure": lambda: by_measure(E, counts),
    }
    by_measure(E[:4096], counts[:4096])  # warm-up: starts the threads
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    results: dict[str, Measures] = {}
    for _ in range(rounds):
        for peer, run in peers.items():
            begin = time.perf_counter()
            results[peer] = run()
            seconds[peer].append(time.perf_counter() - begin)
    exact = results["literal, float64"]
    return [
        Measurement(
            shape=f"{V}x{H}",
            rows=rows,
            peer=peer,
            seconds=statistics.median(seconds[peer]),
            best_seconds=min(seconds[peer]),
            error=max(abs(result[name] / exact[name] - 1) for name in exact),
        )
        for peer, result in results.items()
    ]


def show(measurements: list[Measurement], console: Console) -> None:
    ours = next(m for m in measurements if m.peer == "measure")
    table = Table(title=f"all measures of {ours.shape}, float32, {ours.rows} rows")
    table.add_column("peer")
    for column in ("median s", "x measure", "best s", "x measure", "relative error"):
        table.add_column(column, justify="right")
    for m in measurements:
        table.add_row(
            m.peer,
            f"{m.seconds:.2f}",
            f"{m.seconds / ours.seconds:.1f}",
            f"{m.best_seconds:.2f}",
            f"{m.best_seconds / ours.best_seconds:.1f}",
            f"{m.error:.0e}",
        )
    console.print(table)


def status_bytes(field: str) -> int:
    """Read a field of /proc/self/status, such as VmRSS (memory in use) or VmHWM (peak memory), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_large(V: int, H: int, console: Console) -> dict[str, object]:
    E, counts = table(V, H, LENGTHS["short"]), zipf_counts(V)
    console.print(f"{V} x {H} float32: {E.nbytes / 2**30:.2f} GiB")
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    begin = time.perf_counter()
    metrics = measure(E, unigram=counts)
    seconds = time.perf_counter() - begin
    above = status_bytes("VmHWM") - before
    console.print(f"{seconds:.0f} s, at most {above / 2**30:.2f} GiB above the matrix itself")
    return {"shape": f"{V}x{H}", "seconds": seconds, "bytes_above_input": above, "metrics": metrics.to_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="50304x768", metavar="VxH")
    parser.add_argument("--large", action="store_true", help="measure time and memory at 262144 x 4096; Linux only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the measurements to this file")
    parser.add_argument("--commit", default=commit(), help="commit to report, if git is not available")
    arguments = parser.parse_args()
    console = Console(width=140)
    console.print(
        f"{hardware('cpu')}, torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}, "
        f"{date.today()}, commit {arguments.commit}"
    )
    report: dict[str, object] = {
        "hardware": hardware("cpu"),
        "torch": torch.__version__,
        "date": str(date.today()),
        "commit": arguments.commit,
    }
    if arguments.large:
        report["large"] = measure_large(262144, 4096, console)
    else:
        V, H = (int(number) for number in arguments.shape.split("x"))
        measurements = []
        for rows in LENGTHS:
            measurements += (one := compare(V, H, rows, arguments.rounds))
            show(one, console)
        report["measurements"] = [asdict(m) for m in measurements]
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
