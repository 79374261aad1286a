"""A copy of the training state in host memory, so that training goes on while it is written.

Every rank stages only what it is going to write: its shards, and its share of what all ranks hold alike. The memory is
kept from one save to the next; there is never more than one copy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from coupled_adam.base.errors import UserError
from coupled_adam.optimizer.sharding import is_distributed, local_part

ALIGNMENT = 64
PINNED_BLOCK = 256 * 2**20


@dataclass(frozen=True)
class Staged:
    """What this rank writes: DCP's plan, and the data by name."""

    plan: SavePlan
    data: dict[str, Tensor]


class StagedPlanner(DefaultSavePlanner):
    """Gives DCP the plan that was made when the state was staged, and the staged data instead of the live."""

    def __init__(self, staged: Staged) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        self.plan = self.staged.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The data of one entry."""
        return self.staged.data[index.fqn]


class Staging:
    """The host memory that saves are staged in."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Staged:
        """Copy what this rank has to write; when it returns, the tensors may change.

        Args:
            tensors: the whole state, with the same names on every rank. Plain tensors are taken to be the same on every
                rank, and written by one of them.
            rank: this rank, among `ranks` that save together.
        """
        mine = {name: tensors[name].detach() for name in sorted(_written_by(tensors, rank, ranks))}
        parts = {name: local_part(tensor) for name, tensor in mine.items()}
        if not _fits(self._buffers, parts):
            self._buffers = {}  # before the new ones are made: never two copies
            self._buffers = dict(_new_buffers(parts))
        for name, part in parts.items():
            self._buffers[name].copy_(part, non_blocking=True)
        for device in {part.device for part in parts.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Staged(create_default_local_save_plan(mine, is_coordinator=rank == 0), self._buffers)


def _written_by(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Iterator[str]:
    """The names of the tensors that a rank writes (its part of), found without talking to the others."""
    load = [0] * ranks  # bytes that each rank writes of the tensors all of them hold
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if is_distributed(tensor):
            if _writes_its_part(tensor):
                yield name
            continue
        writer = load.index(min(load))
        load[writer] += tensor.nbytes
        if writer == rank:
            yield name


def _writes_its_part(tensor: Tensor) -> bool:
    """Whether this rank writes its part of a DTensor: not when another that has the same part writes it."""
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:  # not in the mesh of this tensor
        return False
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise UserError(f"a tensor of shape {tuple(tensor.shape)} is still a partial sum ({placements}); reduce it")
    return all(c == 0 for c, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())


def _fits(buffers: dict[str, Tensor], parts: dict[str, Tensor]) -> bool:
    return buffers.keys() == parts.keys() and all(
        buffers[name].shape == part.shape and buffers[name].dtype == part.dtype for name, part in parts.items()
    )


def _new_buffers(parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Host memory for every part, page-locked when any comes from a GPU.

    The parts are laid into few large blocks, because torch rounds page-locked memory up to a power of two: one by one,
    they could take twice the room.
    """
    pinned = any(part.is_cuda for part in parts.values())
    largest_first = sorted(parts, key=lambda name: -parts[name].nbytes)
    sizes = [_aligned(parts[name].nbytes) for name in largest_first]
    capacity = _power_of_two(max([PINNED_BLOCK, *sizes])) if pinned else sum(sizes)
    places, used = _first_fit(sizes, capacity)
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage() for size in used]
    for name, (block, start) in zip(largest_first, places, strict=True):
        part = parts[name]
        # A storage of its own, which ends where the tensor ends: DCP would copy a tensor with a larger one once more.
        storage = blocks[block][start : start + part.nbytes]
        empty = torch.empty(0, dtype=part.dtype)
        yield name, empty.set_(storage, 0, part.shape, torch.empty(part.shape, device="meta").stride())


def _first_fit(sizes: list[int], capacity: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Put each size into the first block with room for it.

    Returns:
        (block, start) of each size, and how much of each block is used.

    Example:
        >>> _first_fit([6, 3, 3], capacity=8)
        ([(0, 0), (1, 0), (1, 3)], [6, 6])
    """
    places: list[tuple[int, int]] = []
    used: list[int] = []
    for size in sizes:
        block = next((i for i, taken in enumerate(used) if taken + size <= capacity), len(used))
        if block == len(used):
            used.append(0)
        places.append((block, used[block]))
        used[block] += size
    return places, used


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
