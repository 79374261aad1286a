"""What the loops that numba compiles have in common: memory, elements, pieces and threads.

A loop works on pieces of a table, each a range of rows. Its last argument is a counter, from which every thread claims
the next piece until none is left.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from coupled_adam.optimizer.row_threads import run_on_threads


def run_loop(loop: Any, *arguments: Any) -> None:
    """Run a loop in as many threads as torch uses; its last argument counts the pieces that are taken."""
    next_piece = np.zeros(1, np.int64)

    def work() -> None:
        try:
            loop(*arguments, next_piece)
        except OSError:  # it is compiled, but the disk to keep it on is full, say; now it runs
            loop(*arguments, next_piece)

    run_on_threads(work, torch.get_num_threads())


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor; numpy has no bfloat16, so its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def count_as_written(*tensors: Tensor) -> None:
    """So that autograd still notices when a graph that was built before the step is used after it."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


@intrinsic
def claim_piece(typing_context, counter):
    """The number of the next piece, for one thread only."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def load(typing_context, stored):
    """An element as float32; uint16 are the bits of a bfloat16, the upper half of a float32's."""

    def codegen(context, builder, signature, arguments):
        (value,) = arguments
        if signature.args[0] == types.uint16:
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            value = builder.bitcast(bits, ir.FloatType())
        return value

    return types.float32(stored), codegen


@intrinsic
def round_like(typing_context, value, stored):
    """A float32 as an element of an array like `stored` is; a bfloat16 is rounded to nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        value = arguments[0]
        if signature.args[1] == types.uint16:
            bits = builder.bitcast(value, ir.IntType(32))
            number = ir.Constant(ir.IntType(32), 0x7FFF)
            upper = ir.Constant(ir.IntType(32), 16)
            odd = builder.and_(builder.lshr(bits, upper), ir.Constant(ir.IntType(32), 1))
            rounded = builder.lshr(builder.add(builder.add(bits, number), odd), upper)
            is_nan = builder.fcmp_unordered("uno", value, value)
            rounded = builder.select(is_nan, ir.Constant(ir.IntType(32), 0x7FC0), rounded)
            value = builder.trunc(rounded, ir.IntType(16))
        return value

    return stored(types.float32, stored), codegen


def compiled_loop(function):
    """Compile when first called, for the types of the arguments, and keep the result on disk where that is possible.

    Without fastmath: the order of the operations is that of the source.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no folder it may write to
        return numba.njit(**options)(function)
