"""Try tile shapes for the Triton kernels on this GPU. The best ones become constants of the modules that launch them.

python benchmarks/tune_kernels.py coupled   # tune triton_kernels.py
python benchmarks/tune_kernels.py rounding  # tune its update with first moments in bfloat16
python benchmarks/tune_kernels.py compile   # compile the candidates of `family` in advance, in several processes
python benchmarks/tune_kernels.py family    # tune family_triton.py
python benchmarks/tune_kernels.py steps     # time whole steps of both with the current constants
"""

import argparse
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coupled_adam.optimizer import family_triton, triton_kernels
from coupled_adam.optimizer.family_tiling import MAX_WIDTH, Tiling
from coupled_adam.optimizer.kernel_launch import Launcher
from coupled_adam.optimizer.stochastic_rounding import Rounding
from coupled_adam.optimizer.table import Hyperparameters, Table

SHAPES = [(50304, 768), (128256, 4096), (50304, 2560), (262144, 2304)]
# Bytes, read and written, that an H200 copies per millisecond: an upper limit for every pass over a table.
BYTES_PER_MS = 4.27e9
FLUSH_BYTES = 2**28  # several times the L2 cache
COMPILERS = 14


class Candidate(NamedTuple):
    """Constants of `family_triton` to try, and the part of a step that uses them."""

    part: str
    shape: tuple[int, int]
    dtype: torch.dtype
    constants: dict[str, Any]


def milliseconds(function: Callable[[], object], repetitions: int = 15) -> float:
    """Median time on the device, with a cold cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    function()
    torch.cuda.synchronize()
    torch.cuda._sleep(10_000_000)  # about 5 ms for the host to fill the queue
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        function()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) for start, end in times)


def random_table(V: int, H: int, dtype: torch.dtype = torch.float32, **options: Any) -> Table:
    def random() -> Tensor:
        return torch.randn(V, H, device="cuda", dtype=dtype)

    hyper = Hyperparameters(1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0, False, **options)
    return Table(
        rows=V,
        param=random(),
        grad=random(),
        exp_avg=random(),
        exp_avg_sq=torch.rand(1, H, device="cuda"),
        step=torch.ones((), device="cuda"),
        hyper=hyper,
        width=H,
        real_rows=V,
        row_avg_sq=torch.rand(V, 1, device="cuda") if "row_exponent" in options else None,
    )


def coupled_step(table: Table) -> None:
    sums = triton_kernels.column_square_sums(table.grad)
    coefficient = triton_kernels.advance_second_moment(table, sums, None)
    triton_kernels.apply_update(table, coefficient, None)


def family_step(table: Table) -> None:
    sums = family_triton.first_pass(table, None)
    family_triton.advance_column_moment(table, sums.column_sums, None)
    coefficient, offset = family_triton.coefficients(table, sums.weighted_sums, None)
    family_triton.move_rows(table, coefficient, sums.row_factor, offset)


def clipped_family_step(table: Table) -> None:
    column_sums, row_sums = family_triton.square_sums(table)
    assert row_sums is not None
    _, factor = triton_kernels.clip_factor(column_sums.sum(), None, 1.0)
    row_factor = family_triton.advance_row_moment(table, row_sums, factor)
    family_triton.advance_column_moment(table, column_sums, factor)
    weighted_sums = family_triton.advance_first_moment(table, row_factor, factor)
    coefficient, offset = family_triton.coefficients(table, weighted_sums, None)
    family_triton.move_rows(table, coefficient, row_factor, offset)


def family_step_with_mean(table: Table) -> None:
    column_sums, row_sums = family_triton.square_sums(table)
    assert row_sums is not None
    row_factor = family_triton.advance_row_moment(table, row_sums, None)
    family_triton.advance_column_moment(table, column_sums, None)
    coefficient, _ = family_triton.coefficients(table, None, None)
    family_triton.apply_update(table, coefficient, row_factor, None)


@functools.cache
def partial_sums(P: int, H: int) -> Tensor:
    return torch.rand(P, H, device="cuda", dtype=torch.float64)


def small_kernels(table: Table) -> None:
    multiprocessors = torch.cuda.get_device_properties(table.param.device).multi_processor_count
    sums = partial_sums(multiprocessors * family_triton.FIRST_PASS.programs, table.width)
    family_triton.advance_column_moment(table, sums, None)
    family_triton.coefficients(table, sums, None)


# For each part of a step: the function to time, and its minimum number of passes over a table.
PARTS: dict[str, tuple[Callable[[Table], object], int]] = {
    "first_pass": (lambda table: family_triton.first_pass(table, None), 3),
    "square_sums": (family_triton.square_sums, 1),
    "advance_first_moment": (lambda table: family_triton.advance_first_moment(table, table.row_avg_sq, None), 3),
    "move_rows": (family_step, 6),  # timed as a whole step, because the first pass fills the cache
    "apply_update": (family_step_with_mean, 6),
    "small kernels": (small_kernels, 0),
}


def candidates(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Candidate]:
    candidate = functools.partial(Candidate, shape=shape, dtype=dtype)
    for columns_per_warp, elements, stages, programs in itertools.product(
        (128, 256), (2048, 4096, 8192), (1, 2, 3), (1, 2, 3, 4, 8)
    ):
        tiling = Tiling(MAX_WIDTH, columns_per_warp, elements, programs, stages)
        yield candidate("first_pass", constants={"FIRST_PASS": tiling})
        if stages < 3:
            tiling = tiling._replace(elements=2 * elements)
            yield candidate("square_sums", constants={"SQUARE_SUMS": tiling})
    for columns, elements, stages, programs in itertools.product((512, 1024), (2048, 4096, 8192), (1, 2, 3), (2, 4, 8)):
        yield candidate(
            "advance_first_moment", constants={"FIRST_MOMENT": Tiling(columns, 128, elements, programs, stages)}
        )
    for block_h, block_v, warps in itertools.product((256, 512, 1024), (1, 2, 4, 8), (4, 8)):
        if 512 <= block_h * block_v <= 4096:
            constants = {"UPDATE_BLOCK_V": block_v, "UPDATE_BLOCK_H": block_h, "UPDATE_WARPS": warps}
            yield candidate("move_rows", constants=constants)
            yield candidate("apply_update", constants=constants)
    for block_p, programs in itertools.product((64, 128, 256), (64, 128, 256, 512)):
        yield candidate("small kernels", constants={"REDUCE_BLOCK_P": block_p, "REDUCE_PROGRAMS": programs})


def compile_all(share: list[Candidate]) -> None:
    """Run each candidate once to fill Triton's disk cache. Compiled kernels work for every V divisible by 16."""
    for candidate in share:
        table = random_table(2**12, candidate.shape[1], candidate.dtype, row_exponent=0.25, mean_free=True)
        with_constants(candidate.constants, functools.partial(PARTS[candidate.part][0], table))


def with_constants(constants: dict[str, Any], function: Callable[[], Any]) -> Any:
    before = {name: getattr(family_triton, name) for name in constants}
    for name, value in constants.items():
        setattr(family_triton, name, value)
    try:
        return function()
    finally:
        for name, value in before.items():
            setattr(family_triton, name, value)


def compile_family(shapes: list[tuple[int, int]], dtype: torch.dtype, parts: list[str]) -> None:
    kinds = {}
    every = [candidate for shape in shapes for candidate in candidates(shape, dtype) if candidate.part in parts]
    for candidate in every:  # the number of programs does not affect compilation
        compiled = {
            name: value._replace(programs=0) if isinstance(value, Tiling) else value
            for name, value in candidate.constants.items()
        }
        kinds[repr((candidate.part, candidate.shape, compiled))] = candidate
    to_compile = list(kinds.values())
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.map(compile_all, [to_compile[i::COMPILERS] for i in range(COMPILERS)], chunksize=1)


def tune_family(shapes: list[tuple[int, int]], dtype: torch.dtype, parts: list[str]) -> None:
    for shape in shapes:
        table = random_table(*shape, dtype, row_exponent=0.25, mean_free=True)
        size = table.param.numel() * table.param.element_size()
        for part in parts:
            function, passes = PARTS[part]
            results = []
            for candidate in candidates(shape, dtype):
                if candidate.part == part:
                    duration = with_constants(
                        candidate.constants, functools.partial(milliseconds, functools.partial(function, table))
                    )
                    results.append(
                        (duration, ", ".join(f"{name}={value}" for name, value in candidate.constants.items()))
                    )
            report(f"{shape[0]}x{shape[1]} {part}", results, passes * size / BYTES_PER_MS)
        del table
        torch.cuda.empty_cache()


def tune_coupled(shapes: list[tuple[int, int]]) -> None:
    for V, H in shapes:
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
            duration = milliseconds(functools.partial(triton_kernels.column_square_sums, table.grad))
            results.append((duration, f"BLOCK_H {block_h} BLOCK_V {block_v} warps {warps} programs {programs}"))
        report(f"{V}x{H} sums", results, size / BYTES_PER_MS)
        triton_kernels.BLOCK_H, triton_kernels.SUM_BLOCK_V = 256, 16
        triton_kernels.SUM, triton_kernels.SUM_PROGRAMS = with_warps(triton_kernels.SUM, 4), 1056
        results = []
        for block_h, block_v, warps in itertools.product((128, 256, 512, 1024), (1, 2, 4, 8, 16), (4, 8)):
            if not 512 <= block_h * block_v <= 4096:
                continue
            triton_kernels.BLOCK_H, triton_kernels.UPDATE_BLOCK_V = block_h, block_v
            triton_kernels.UPDATE = with_warps(triton_kernels.UPDATE, warps)
            label = f"BLOCK_H {block_h} BLOCK_V {block_v} warps {warps}"
            results.append((milliseconds(functools.partial(coupled_step, table)), label))
        report(f"{V}x{H} sums and update", results, 6 * size / BYTES_PER_MS)
        del table
        torch.cuda.empty_cache()


def tune_rounding(shapes: list[tuple[int, int]]) -> None:
    for V, H in shapes:
        table = random_table(V, H)
        assert table.exp_avg is not None
        table.exp_avg, table.rounding = table.exp_avg.bfloat16(), Rounding(key=1, first=0, is_large=False)
        results = []
        for block_h, block_v, warps in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8), (4, 8)):
            if not 512 <= block_h * block_v <= 4096:
                continue
            triton_kernels.ROUNDING_BLOCK_V, triton_kernels.ROUNDING_BLOCK_H = block_v, block_h
            triton_kernels.ROUNDING_UPDATE = with_warps(triton_kernels.ROUNDING_UPDATE, warps)
            label = f"ROUNDING_BLOCK_V {block_v} ROUNDING_BLOCK_H {block_h} warps {warps}"
            results.append((milliseconds(functools.partial(coupled_step, table)), label))
        report(f"{V}x{H} sums and update, first moments in bfloat16", results, 20 * V * H / BYTES_PER_MS)
        del table
        torch.cuda.empty_cache()


def with_warps(launcher: Launcher, warps: int) -> Launcher:
    return Launcher(launcher.kernel, warps)


def report(title: str, results: list[tuple[float, str]], floor: float) -> None:
    print(f"{title}: floor {floor:.4f} ms")
    for duration, label in sorted(results)[:8]:
        print(f"  {duration:.4f} ms  {100 * floor / duration:.0f}%  {label}")


def time_steps(shapes: list[tuple[int, int]]) -> None:
    steps: list[tuple[str, Callable[[Table], None], int, dict[str, Any]]] = [
        ("coupled", coupled_step, 6, {}),
        ("family, mean-free", family_step, 6, {"row_exponent": 0.25, "mean_free": True}),
        ("family, mean-free, clipped", clipped_family_step, 7, {"row_exponent": 0.25, "mean_free": True}),
        ("family", family_step_with_mean, 6, {"row_exponent": 0.25}),
    ]
    for (V, H), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        for name, step, passes, options in steps:
            table = random_table(V, H, dtype, **options)
            duration = milliseconds(functools.partial(step, table), repetitions=30)
            floor = passes * V * H * dtype.itemsize / BYTES_PER_MS
            print(f"{V}x{H} {dtype} {name}: {duration:.4f} ms, {100 * floor / duration:.0f}% of {passes} passes")
            del table
            torch.cuda.empty_cache()
    for shape in shapes:
        table = random_table(*shape, row_exponent=0.25, mean_free=True)
        for part, (function, _) in PARTS.items():
            duration = milliseconds(functools.partial(function, table), repetitions=30)
            print(f"{shape[0]}x{shape[1]} {part}: {duration:.4f} ms")
        del table
    table = random_table(64, 64, row_exponent=0.25, mean_free=True)
    for name, step, _, _ in steps:
        step(table)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            step(table)
        print(f"{name}: {(time.perf_counter() - begin) / 200 * 1e6:.0f} us of the host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["coupled", "rounding", "compile", "family", "steps"])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="use only the first N shapes")
    parser.add_argument("--dtype", default="float32", help="dtype of the table, for compile and family")
    parser.add_argument(
        "--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="parts of a step, for compile and family"
    )
    arguments = parser.parse_args()
    shapes = SHAPES[: arguments.shapes]
    if arguments.what == "coupled":
        tune_coupled(shapes)
    elif arguments.what == "rounding":
        tune_rounding(shapes)
    elif arguments.what == "compile":
        compile_family(shapes, getattr(torch, arguments.dtype), arguments.parts)
    elif arguments.what == "family":
        tune_family(shapes, getattr(torch, arguments.dtype), arguments.parts)
    else:
        time_steps(shapes)


if __name__ == "__main__":
    main()
