"""The state of a training run as tensors by name, and its copy in host memory for saving.

model.<parameter>               weights and buffers, tied ones once
optimizer.<parameter>.<key>     exp_avg, exp_avg_sq, row_avg_sq, step, momentum_buffer, ...
rng.cpu, rng.cuda               torch's random number generators, as bytes

Checkpoints use these names, and loading fills the tensors in place. For a save, every rank copies only what it will
write: its shards, and its share of the tensors that all ranks hold. Training continues while the copy is written. The
copy's memory is reused by the next save, so there is never more than one copy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim.optimizer import Optimizer

from coupled_adam.base.errors import UserError
from coupled_adam.optimizer import BatchedMuon, CoupledAdamW
from coupled_adam.optimizer.inventory import plain_name
from coupled_adam.optimizer.sharding import is_distributed, local_part
from coupled_adam.optimizer.torch_versions import collect_adamw_group

RNG = "rng."
ALIGNMENT = 64
PINNED_BLOCK = 256 * 2**20


def training_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """The state of a training run by name, for saving and for loading in place.

    All ranks have the same names, with DTensors if the model is sharded. Prefixes added by DDP and torch.compile are
    removed, so a checkpoint fits the model however it is wrapped. The tensors share memory with the model and the
    optimizers, except for the state of the random number generators, which is a copy: call this again for every save.

    Args:
        model: a model with any parallelism, between two steps.
        optimizers: all optimizers of its parameters; see :func:`make_optimizer_state`.

    Returns:
        Tensors by name.

    Example:
        >>> model = nn.Linear(3, 2, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> make_optimizer_state([optimizer])
        >>> sorted(training_tensors(model, [optimizer]))
        ['model.weight', 'optimizer.weight.momentum_buffer', 'rng.cpu']
    """
    names: dict[Tensor, str] = {}
    # Not named_parameters: after an evaluation, FSDP2 shows gathered weights there; state_dict shards them again.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name!r} in the model's state is a {type(tensor).__name__}, expected a tensor")
        names.setdefault(tensor, plain_name(name))
    tensors = {f"model.{name}": tensor.detach() for tensor, name in names.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter not in names:
                raise UserError("the optimizer has a parameter that is not in the model; build it from this model")
            for key, value in state.items():
                tensors |= _state_tensor(f"optimizer.{names[parameter]}.{key}", value)
    device = next(model.parameters()).device
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def make_optimizer_state(optimizers: Iterable[Optimizer]) -> None:
    """Create the state that new optimizers would create in their first step, so that a checkpoint can be loaded.

    Parameters and existing state do not change, and no gradient, step or communication is needed. Call it for new runs
    too: their checkpoints then have the same names from step 0 on, and the first step gives the same result.

    Args:
        optimizers: AdamW, CoupledAdamW, SGD or BatchedMuon.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            fresh = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"] != 0:
                    for p in fresh:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
            elif isinstance(optimizer, BatchedMuon):
                optimizer.make_state()
            elif isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):  # CoupledAdamW is an AdamW
                _make_adam_state(optimizer, {**group, "params": fresh})
            else:
                raise UserError(
                    f"cannot create the state of {type(optimizer).__name__} for loading; "
                    "use torch.optim.AdamW, torch.optim.SGD, CoupledAdamW or BatchedMuon"
                )


def restore_generators(tensors: Mapping[str, Tensor]) -> None:
    """Set torch's random number generators to the states in the tensors, if any."""
    if "rng.cpu" in tensors:
        torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])


def _make_adam_state(optimizer: torch.optim.Adam | torch.optim.AdamW, group: dict[str, Any]) -> None:
    """Let the optimizer create its state as `step` would; the group's flags decide where the step counters are."""
    gradients = [p.grad for p in group["params"]]
    try:
        for p in group["params"]:
            p.grad = p.detach()  # a placeholder that takes no memory; its values are not used
        if isinstance(optimizer, CoupledAdamW):
            optimizer._init_group(group, [], [], [], [], [], [])
        else:
            collect_adamw_group(optimizer, group, [], [], [], [], [], [])
    finally:
        for p, gradient in zip(group["params"], gradients, strict=True):
            p.grad = gradient


def _state_tensor(name: str, value: object) -> dict[str, Tensor]:
    if value is None:  # SGD without momentum
        return {}
    if not isinstance(value, Tensor):
        raise UserError(f"{name} is a {type(value).__name__}, expected a tensor in the state of an optimizer")
    return {name: value.detach()}


@dataclass(frozen=True)
class Staged:
    """The data that this rank writes, by name, and DCP's plan for it."""

    plan: SavePlan
    data: dict[str, Tensor]


class StagedPlanner(DefaultSavePlanner):
    """DCP planner that returns the staged plan and data instead of the live tensors."""

    def __init__(self, staged: Staged) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged = staged

    def create_local_plan(self) -> SavePlan:
        """Return the staged plan of this rank."""
        self.plan = self.staged.plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the staged data of one entry."""
        return self.staged.data[index.fqn]


class Staging:
    """Host memory for staging saves."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Staged:
        """Copy what this rank has to write; the tensors may change once this returns.

        Args:
            tensors: the whole state, with the same names on every rank. Plain tensors must be equal on all ranks; one
                rank writes each.
            rank: this rank.
            ranks: number of ranks that save together.
        """
        mine = {name: tensors[name].detach() for name in sorted(_written_by(tensors, rank, ranks))}
        parts = {name: local_part(tensor) for name, tensor in mine.items()}
        if not _fits(self._buffers, parts):
            self._buffers = {}  # free the old buffers first: never two copies
            self._buffers = dict(_new_buffers(parts))
        for name, part in parts.items():
            self._buffers[name].copy_(part, non_blocking=True)
        for device in {part.device for part in parts.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return Staged(create_default_local_save_plan(mine, is_coordinator=rank == 0), self._buffers)


def _written_by(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Iterator[str]:
    """Names of the tensors that this rank writes, in full or in part; determined without communication."""
    load = [0] * ranks  # bytes of the plain tensors that each rank writes
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
    """Whether this rank writes its part of a DTensor; only one rank with the same part does."""
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]
    if coordinate is None:  # not in the mesh of this tensor
        return False
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise UserError(f"a tensor of shape {tuple(tensor.shape)} is a partial sum ({placements}); reduce it first")
    return all(c == 0 for c, placement in zip(coordinate, placements, strict=True) if placement.is_replicate())


def _fits(buffers: dict[str, Tensor], parts: dict[str, Tensor]) -> bool:
    return buffers.keys() == parts.keys() and all(
        buffers[name].shape == part.shape and buffers[name].dtype == part.dtype for name, part in parts.items()
    )


def _new_buffers(parts: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Allocate host memory for every part, page-locked if any part is on a GPU.

    The parts share a few large blocks, because torch rounds page-locked memory up to a power of two: separate
    allocations could take twice the memory.
    """
    pinned = any(part.is_cuda for part in parts.values())
    largest_first = sorted(parts, key=lambda name: -parts[name].nbytes)
    sizes = [_aligned(parts[name].nbytes) for name in largest_first]
    capacity = _power_of_two(max([PINNED_BLOCK, *sizes])) if pinned else sum(sizes)
    places, used = _first_fit(sizes, capacity)
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage() for size in used]
    for name, (block, start) in zip(largest_first, places, strict=True):
        part = parts[name]
        # A separate storage that ends with the tensor: DCP would copy a tensor whose storage is larger.
        storage = blocks[block][start : start + part.nbytes]
        empty = torch.empty(0, dtype=part.dtype)
        yield name, empty.set_(storage, 0, part.shape, torch.empty(part.shape, device="meta").stride())


def _first_fit(sizes: list[int], capacity: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Put each size into the first block with enough space.

    Returns:
        (block, start) of each size, and the used size of each block.

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
