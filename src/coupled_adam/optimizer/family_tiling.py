"""Tiles of the Triton kernels of the family of second moments: as large as registers and shared memory of a GPU allow.

Legend: V vocabulary rows on this rank, H hidden size. A program works on tiles of BLOCK_V x BLOCK_H.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.optimizer.kernel_launch import ceil_div

# Wider rows are not kept in registers.
MAX_WIDTH = 8192
MAX_WARPS = 16
# Of a tile; all tensors together have as many registers in each thread.
ELEMENTS_PER_THREAD = 64


class Tiling(NamedTuple):
    """How a kernel that adds up columns walks a table. Each program leaves a partial sum per column: few are enough."""

    columns: int
    """The most columns of a tile."""
    columns_per_warp: int
    """Of float32. Of narrower elements, which a thread loads eight at a time, twice as many."""
    elements: int
    """Of a tile of float32: so many rows does it have. Half of it for narrower elements, but two rows at least."""
    programs: int
    """Per multiprocessor, over all columns, when a program has eight warps; of smaller ones there are more."""
    stages: int
    """Tiles at one time: one in registers, the others on their way from memory into shared memory."""


def tile_for(tiling: Tiling, *tensors: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Warps, programs per block of columns, and BLOCK_V, BLOCK_H, STAGES for a kernel that reads these tensors.

    A row fills all warps, so that each thread adds up columns of its own.
    """
    V, H = tensors[0].shape
    multiprocessors, shared_memory = _limits(tensors[0].device)
    narrowest = min(tensor.element_size() for tensor in tensors)
    block_h = min(next_power_of_2(max(H, 32)), tiling.columns)
    warps = max(min(block_h * narrowest // (4 * tiling.columns_per_warp), MAX_WARPS), 1)
    elements = max(tiling.elements * narrowest // 4, 2 * block_h)
    elements = min(elements, warps * 32 * ELEMENTS_PER_THREAD // len(tensors))
    block_v, stages = max(elements // block_h, 1), tiling.stages
    row_bytes = block_h * sum(tensor.element_size() for tensor in tensors)
    while stages > 1 and block_v * row_bytes * (stages - 1) > shared_memory:
        block_v, stages = (block_v // 2, stages) if block_v > 1 else (1, stages - 1)
    programs = tiling.programs * max(8 // warps, 1)
    if stages > 1:
        programs = min(programs, shared_memory // (block_v * row_bytes * (stages - 1)))
    programs = max(multiprocessors * programs // max(ceil_div(H, block_h), 1), 1)
    return warps, max(min(ceil_div(V, block_v), programs), 1), (block_v, block_h, stages)


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and bytes of shared memory that tiles of one program may take."""
    if device.type == "cpu":  # Triton's interpreter
        return 4, 2**16
    properties = torch.cuda.get_device_properties(device)
    # What Triton itself needs, for sums over a row and over a column, comes on top.
    spare = 4 * MAX_WIDTH
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, shared - spare


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
