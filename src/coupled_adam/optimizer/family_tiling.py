"""Tile sizes of the family's Triton kernels: as large as the registers and shared memory of a GPU allow.

Legend: V vocabulary rows on this rank, H hidden size. A program works on tiles of BLOCK_V x BLOCK_H.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_adam.optimizer.kernel_launch import ceil_div

# Wider rows do not fit into registers.
MAX_WIDTH = 8192
MAX_WARPS = 16
# Elements of all tensors of a tile per thread, one register each.
ELEMENTS_PER_THREAD = 64


class Tiling(NamedTuple):
    """Tiling of a kernel that adds up columns. Each program writes one partial sum per column, so use few programs.

    The numbers in `family_triton` were found with a first moment. Without one, a tile has only the gradient.
    """

    columns: int
    """Maximum columns of a tile."""
    columns_per_warp: int
    """Columns per warp for float32. Narrower elements have twice as many: a thread loads eight of them at a time."""
    elements: int
    """Elements of a float32 tile, which set its rows. Narrower elements have half as many, but at least two rows."""
    programs: int
    """Programs of eight warps per multiprocessor, over all columns. There are more if they have fewer warps."""
    stages: int
    """Tiles in flight: one in registers, the others being loaded into shared memory."""


def tile_for(tiling: Tiling, *tensors: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Choose warps, programs per block of columns, and (BLOCK_V, BLOCK_H, STAGES) for a kernel on these tensors.

    A row fills all warps, so that each thread adds up its own columns.
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
    """Return the multiprocessors of a GPU, and the bytes of shared memory for the tiles of one program."""
    if device.type == "cpu":  # Triton's interpreter
        return 4, 2**16
    properties = torch.cuda.get_device_properties(device)
    # Triton itself needs shared memory for the sums over rows and columns.
    spare = 4 * MAX_WIDTH
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, shared - spare


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
