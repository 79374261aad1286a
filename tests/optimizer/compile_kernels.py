"""Compile the optimizer's Triton kernels for an H100 or H200, without a GPU, and print their names.

The interpreter, in which the other tests run the kernels, accepts code that the compiler refuses. Each step below is
taken with tensors on the CPU, and each launch only compiles: what the kernels would compute stays uninitialized.
"""

from collections.abc import Hashable, Iterator
from itertools import product
from typing import Any

import torch
import triton
from family_tables import make_table, step_with_clipping, step_without_clipping
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coupled_adam.optimizer import family_triton, triton_kernels
from coupled_adam.optimizer.kernel_launch import Launcher
from coupled_adam.optimizer.stochastic_rounding import Rounding
from coupled_adam.optimizer.table import Table

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
}
SHAPE = (512, 768)
FACTOR = torch.tensor(0.3)


def compile_instead(launcher: Launcher, grid: tuple[int, int, int], kind: Hashable, *arguments: Any) -> None:
    """Compile the kernel for these arguments, specialized as a launch would, once for each kind of arguments."""
    types: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, (parameter, value) in enumerate(zip(launcher.kernel.params, arguments, strict=True)):
        specialized = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            types[parameter.name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, Tensor):
            types[parameter.name] = TYPES[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if specialized and isinstance(value, int) and value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    key = repr((types, constants))
    if key not in launcher.compiled:
        source = ASTSource(launcher.kernel, types, constants, attributes)
        compiled = triton.compile(source, target=HOPPER, options={"num_warps": launcher.num_warps})
        assert compiled.asm["cubin"]
        launcher.compiled[key] = compiled
        missing = [
            name for (i,), value in constants.items() if value is None for name in [launcher.kernel.params[i].name]
        ]
        print(launcher.kernel.__name__, "without" if missing else "with all pointers", *missing, flush=True)


def tables(momentum: bool, **options: Any) -> Iterator[tuple[Table, Tensor | None]]:
    """Tables with a gradient factor: float32, bfloat16, and with momentum a float32 one with a bfloat16 moment."""
    full, half = torch.float32, torch.bfloat16
    yield make_table(SHAPE, momentum=momentum, **options), None
    yield make_table(SHAPE, momentum=momentum, dtypes=(half, half, half), **options), FACTOR
    if momentum:
        table = make_table(SHAPE, dtypes=(full, full, half), **options)
        table.rounding = Rounding(key=1, first=0, is_large=False)
        yield table, None


def main() -> None:
    Launcher.launch = compile_instead  # type: ignore[assignment, method-assign]
    for momentum in (False, True):
        for table, factor in tables(momentum, row_moment=False):
            sums = triton_kernels.column_square_sums(table.grad)
            coefficient = triton_kernels.advance_second_moment(table, sums, factor)
            triton_kernels.apply_update(table, coefficient, factor)
        for row_exponent, mean_free in product((0.0, 1.0), (False, True)):
            options = {"row_moment": row_exponent > 0, "row_exponent": row_exponent, "mean_free": mean_free}
            for table, factor in tables(momentum, **options):
                step_with_clipping(family_triton, table, factor)
                if mean_free:
                    step_without_clipping(family_triton, table, factor)


if __name__ == "__main__":
    main()
