"""Try tile shapes for the Triton kernels on this GPU; the best become constants of triton_kernels.py.

python benchmarks/tune_kernels.py
"""

import functools
import itertools
import statistics
from collections.abc import Callable

import torch

from coupled_adam.optimizer import triton_kernels
from coupled_adam.optimizer.table import Hyperparameters, Table
from coupled_adam.optimizer.triton_kernels import Launcher

SHAPES = [(50304, 768), (128256, 4096), (50304, 2560), (262144, 2304)]


def milliseconds(function: Callable[[], object]) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / 10)
    return statistics.median(times)


def random_table(V: int, H: int) -> Table:
    def random() -> torch.Tensor:
        return torch.randn(V, H, device="cuda")

    hyper = Hyperparameters(1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0, False)
    exp_avg_sq = torch.rand(1, H, device="cuda")
    return Table(V, random(), random(), random(), exp_avg_sq, torch.ones((), device="cuda"), hyper, H, V)


def with_warps(launcher: Launcher, warps: int) -> Launcher:
    return Launcher(launcher.kernel, warps)


def sums_and_update(table: Table) -> None:
    sums = triton_kernels.column_square_sums(table.grad)
    coefficient = triton_kernels.advance_second_moment(table, sums, None)
    triton_kernels.apply_update(table, coefficient, None)


def report(title: str, results: list[tuple[float, str]], floor: float) -> None:
    print(f"{title}: floor {floor:.4f} ms")
    for time, label in sorted(results)[:6]:
        print(f"  {time:.4f} ms  {100 * floor / time:.0f}%  {label}")


def main() -> None:
    bytes_per_ms = 4.27e9
    for V, H in SHAPES:
        table = random_table(V, H)
        size = V * H * 4
        results = []
        for block_h, block_v, warps, programs in itertools.product(
            (128, 256, 512, 1024), (4, 8, 16, 32), (4, 8), (1056, 2112, 4224)
        ):
            if not 1024 <= block_h * block_v <= 8192:
                continue
            triton_kernels.BLOCK_H, triton_kernels.SUM_BLOCK_V = block_h, block_v
            triton_kernels.SUM, triton_kernels.SUM_PROGRAMS = with_warps(triton_kernels.SUM, warps), programs
            time = milliseconds(functools.partial(triton_kernels.column_square_sums, table.grad))
            results.append((time, f"BLOCK_H {block_h} BLOCK_V {block_v} warps {warps} programs {programs}"))
        report(f"{V}x{H} sums", results, size / bytes_per_ms)
        triton_kernels.BLOCK_H, triton_kernels.SUM_BLOCK_V = 256, 16
        triton_kernels.SUM, triton_kernels.SUM_PROGRAMS = with_warps(triton_kernels.SUM, 4), 1056
        results = []
        for block_h, block_v, warps in itertools.product((128, 256, 512, 1024), (1, 2, 4, 8, 16), (4, 8)):
            if not 512 <= block_h * block_v <= 4096:
                continue
            triton_kernels.BLOCK_H, triton_kernels.UPDATE_BLOCK_V = block_h, block_v
            triton_kernels.UPDATE = with_warps(triton_kernels.UPDATE, warps)
            label = f"BLOCK_H {block_h} BLOCK_V {block_v} warps {warps}"
            results.append((milliseconds(functools.partial(sums_and_update, table)), label))
        report(f"{V}x{H} sums and update", results, 6 * size / bytes_per_ms)
        del table
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
