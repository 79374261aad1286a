"""Shared parts of the loops that numba compiles: memory, elements, pieces and threads.

A loop processes a table in pieces, each a range of rows. Its last argument is a counter, from which every thread claims
the next piece until none is left.
"""

import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from coupled_adam.optimizer import stochastic_rounding
from coupled_adam.optimizer.row_threads import run_on_threads
from coupled_adam.optimizer.stochastic_rounding import StepKeys
from coupled_adam.optimizer.table import Table

# Files with code or constants that are compiled into loops of other files.
SHARED_FILES = (__file__, str(stochastic_rounding.__file__))
INT16, INT32 = ir.IntType(16), ir.IntType(32)
LARGEST_BITS = 0x7F7F0000  # of the largest finite bfloat16, as a float32


def run_loop(loop: Any, *arguments: Any) -> None:
    """Run a loop in as many threads as torch uses. Passes the counter of claimed pieces as the last argument."""
    next_piece = np.zeros(1, np.int64)

    def work() -> None:
        try:
            loop(*arguments, next_piece)
        except OSError:  # compiled but not cached, for example because the disk is full; the second call runs it
            loop(*arguments, next_piece)

    run_on_threads(work, torch.get_num_threads())


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """View the memory of a tensor. bfloat16, which numpy lacks, becomes uint16 bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def moment_array(table: Table) -> npt.NDArray[Any] | None:
    """View the memory of the first moment; None if beta1 = 0, which the loops are compiled for separately."""
    return None if table.exp_avg is None else array_of(table.exp_avg)


def moment_numbers(table: Table, factor: float) -> tuple[np.float32, np.float32, np.float32]:
    """Return the numbers of `advance_moment`."""
    beta1 = table.hyper.beta1
    return np.float32(beta1), np.float32(1 - beta1), np.float32(factor)


def count_as_written(*tensors: Tensor | None) -> None:
    """Mark tensors as modified, so that autograd detects a graph from before the step that is used after it."""
    written = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)


@intrinsic
def claim_piece(typing_context, counter):
    """Claim the next piece atomically and return its number."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def load(typing_context, stored):
    """Convert an element to float32. uint16 are the bits of a bfloat16: the upper half of a float32."""

    def codegen(context, builder, signature, arguments):
        (value,) = arguments
        if signature.args[0] == types.uint16:
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            value = builder.bitcast(bits, ir.FloatType())
        return value

    return types.float32(stored), codegen


@intrinsic
def round_like(typing_context, value, stored):
    """Convert a float32 to the type of `stored`, rounding a bfloat16 to nearest, ties to even."""

    def codegen(context, builder, signature, arguments):
        value = arguments[0]
        if signature.args[1] == types.uint16:
            value = builder.trunc(_nearest_bits(builder, value), INT16)
        return value

    return stored(types.float32, stored), codegen


@intrinsic
def round_at_random(typing_context, value, x, column, middle_key):
    """Round a float32 stochastically to bfloat16 bits; `x` is that of column 0 in `stochastic_rounding.random_bits`."""

    def codegen(context, builder, signature, arguments):
        value, x, column, middle_key = arguments
        x = builder.add(x, builder.mul(column, INT32(stochastic_rounding.SPREAD)))
        x = _xor_shifted(builder, x, 16)
        x = builder.mul(x, INT32(stochastic_rounding.MULTIPLIER1))
        x = builder.xor(_xor_shifted(builder, x, 15), middle_key)
        x = builder.mul(x, INT32(stochastic_rounding.MULTIPLIER2))
        bits = builder.bitcast(value, INT32)
        rounded = builder.lshr(builder.add(bits, builder.lshr(x, INT32(16))), INT32(16))
        size = builder.and_(bits, INT32(0x7FFFFFFF))
        has_neighbours = builder.icmp_unsigned("<", size, INT32(LARGEST_BITS))
        return builder.trunc(builder.select(has_neighbours, rounded, _nearest_bits(builder, value)), INT16)

    return types.uint16(types.float32, types.uint32, types.uint32, types.uint32), codegen


def _xor_shifted(builder: Any, x: Any, shift: int) -> Any:
    return builder.xor(x, builder.lshr(x, INT32(shift)))


def _nearest_bits(builder: Any, value: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even, in the lower half of 32 bits."""
    bits = builder.bitcast(value, INT32)
    odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, INT32(0x7FFF)), odd), INT32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, INT32(0x7FC0), rounded)


def part_of_a_loop(**options: Any) -> Any:
    """Compile a function that loops call for each row or element, as part of the loop."""
    return numba.njit(nogil=True, error_model="numpy", **options)


def rounding_numbers(table: Table, keys: StepKeys | None) -> tuple[Any, ...] | None:
    """Return the arguments of `keys_of_row`, or None for rounding to nearest."""
    if table.rounding is None or keys is None:
        return None
    index_key, middle_key = np.uint32(keys.index_key), np.uint32(keys.middle_key)
    return index_key, middle_key, np.int64(table.rounding.first), np.int64(table.width)


@part_of_a_loop()
def keys_of_row(i, rounding):
    """Return the keys of the random bits of row i, or None for rounding to nearest.

    Returns:
        x of the row's first element and `middle_key`; the column from which both change, because the index passes a
        multiple of 2^32; and their new values.
    """
    if rounding is None:
        return None
    index_key, middle_key, first, width = rounding
    index = first + i * width
    x = (index & stochastic_rounding.MASK) * stochastic_rounding.SPREAD + np.int64(index_key)
    high = index >> 32
    before, after = _mixed(high), _mixed(high + 1)
    x_before, x_after = (
        np.uint32((x + before) & stochastic_rounding.MASK),
        np.uint32((x + after) & stochastic_rounding.MASK),
    )
    last = ((high + 1) << 32) - index
    return x_before, np.uint32(middle_key ^ before), last, x_after, np.uint32(middle_key ^ after)


@part_of_a_loop()
def _mixed(x):
    """`stochastic_rounding.mix` of an int64 below 2^32."""
    x = x ^ (x >> 16)
    x = (x * stochastic_rounding.MULTIPLIER1) & stochastic_rounding.MASK
    x = x ^ (x >> 15)
    x = (x * stochastic_rounding.MULTIPLIER2) & stochastic_rounding.MASK
    return x ^ (x >> 15)


@part_of_a_loop()
def stored_moment_like(moment, h, row_keys, stored):
    """Convert m_t of column h from float32 to the type of `stored`."""
    if row_keys is None:
        return round_like(moment, stored)
    x_before, key_before, last, x_after, key_after = row_keys
    is_before = h < last
    return round_at_random(
        moment, x_before if is_before else x_after, np.uint32(h), key_before if is_before else key_after
    )


@part_of_a_loop()
def advance_moment(grad, exp_avg, i, h, numbers, row_keys):
    """Update m_t of one element in place.

    Returns:
        m_t as stored, and m_t before rounding. Without a first moment (beta1 = 0), both are the gradient.
    """
    beta1, one_minus_beta1, factor = numbers
    g = factor * load(grad[i, h])
    if exp_avg is None:
        return g, g
    m = load(exp_avg[i, h])
    # As in torch.lerp: the weights add up to 1 despite rounding.
    m = m + one_minus_beta1 * (g - m) if one_minus_beta1 < 0.5 else g - beta1 * (g - m)
    stored = stored_moment_like(m, h, row_keys, exp_avg[i, h])
    exp_avg[i, h] = stored
    return load(stored), m


def compiled_loop(function):
    """Compile a loop at its first call, for the types of its arguments, and cache the result on disk if possible.

    Without fastmath, so that the operations keep the order of the source.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        # numba only notices changes of the loop's own file. The hash of the shared files is added to the loop's name,
        # which is part of the name of its cache file.
        function.__qualname__ += f"_{_hash_of_shared_files()}"
        return numba.njit(cache=True, **options)(function)
    except (OSError, RuntimeError):  # no source, or numba found no writable folder
        return numba.njit(**options)(function)


def _hash_of_shared_files() -> str:
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in SHARED_FILES)).hexdigest()[:16]
