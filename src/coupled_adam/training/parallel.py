"""Parallelism of a training run: one process, DDP or FSDP2, applied from outside the models.

Under torchrun, each rank takes an equal share of every global batch, and gradients are averaged over the ranks. The
same config therefore gives the same loss curve on any number of ranks, up to rounding.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings.unigram import Counts
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
# The fastest rank waits until the slowest has written its files.
SAVE_TIMEOUT = timedelta(hours=1)


class Agreement:
    """Exchange values between the ranks of a process group (default: all); every rank must make the same calls."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self._alone = not _has_ranks()
        self.rank = 0 if self._alone else dist.get_rank(process_group)
        self.size = 1 if self._alone else dist.get_world_size(process_group)

    def from_first(self, value: T) -> T:
        """Return the value of the first rank."""
        return self._gather(value)[0]

    def first_not_none(self, value: T | None) -> T | None:
        """Return the value of the lowest rank whose value is not None."""
        return next((found for found in self._gather(value) if found is not None), None)

    def first_does(self, action: Callable[[], None]) -> None:
        """Run an action on the first rank while the others wait; its exception is raised on all ranks."""
        failure: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = error
        failure = self.first_not_none(failure)
        if failure is not None:
            raise failure

    def _gather(self, value: T) -> list[T]:
        if self._alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


@dataclass(frozen=True)
class Ranks:
    """This process and its rank in the run."""

    rank: int
    size: int
    device: torch.device
    mode: str
    """none, ddp or fsdp2"""
    host_group: Any = None
    """A gloo group for short messages between hosts; None with a single rank."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints messages."""
        return self.rank == 0

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank; all ranks must call this."""
        if self.size == 1:
            return list(flags)
        numbers = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host_group)
        return [bool(number) for number in numbers.tolist()]

    def first_does(self, action: Callable[[], T]) -> T | None:
        """Run an action on the first rank while the others wait.

        Returns:
            The result of the action on the first rank; None on the others.

        Raises:
            The exception of the action, on every rank; on the others it has the attribute `said_by_first_rank`.
        """
        results: list[T] = []
        try:
            Agreement(self.host_group).first_does(lambda: results.append(action()))
        except Exception as error:
            error.said_by_first_rank = not self.is_first  # type: ignore[attr-defined]
            raise
        return results[0] if results else None

    def all_get(self, value: T | None) -> T:
        """Return the first rank's value on every rank; the other ranks' values are ignored."""
        found = Agreement(self.host_group).from_first(value)
        assert found is not None
        return found

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Average a tensor over the ranks in place, without waiting for the device."""
        if self.size > 1:
            dist.all_reduce(value, dist.ReduceOp.SUM)
            value /= self.size
        return value


@contextmanager
def ranks_of_run(mode: str, device: torch.device) -> Iterator[Ranks]:
    """Join the process group of torchrun, and leave it at the end.

    Args:
        mode: auto (DDP with several ranks), none, ddp or fsdp2.
        device: cpu or cuda; with cuda, every rank uses the GPU of its local rank.
    """
    started_by_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    if not started_by_torchrun:
        yield Ranks(0, 1, device, "none")
        return
    size = int(os.environ["WORLD_SIZE"])
    if size > 1 and mode == "none":
        raise UserError(
            f"training.parallel is 'none', but torchrun started {size} processes; set it to 'ddp' or 'fsdp2'"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        mode = "ddp" if mode == "auto" and size > 1 else "none" if mode == "auto" else mode
        host_group = dist.new_group(backend="gloo", timeout=TIMEOUT) if size > 1 else None
        yield Ranks(dist.get_rank(), size, device, mode, host_group)
    finally:
        dist.destroy_process_group()


def background_group(process_group: Any) -> Any:
    """Create a separate gloo group for a background thread; None without a process group.

    Its messages never mix with those of the training. All ranks must call this together.
    """
    if not _has_ranks():
        return None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    return dist.new_group(ranks, backend="gloo", timeout=SAVE_TIMEOUT)


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def build(
    config: ModelConfig,
    seed: int,
    ranks: Ranks,
    *,
    bf16: bool,
    compile: bool,
    unigram: Counts | None = None,
    inductor_options: dict[str, Any] | None = None,
) -> tuple[nn.Module, LanguageModel]:
    """Build the model with its initial weights, which do not depend on the number of ranks.

    Args:
        config: the shape of the model.
        seed: seed of the initial weights.
        ranks: the ranks of the run.
        bf16: whether autocast will be used.
        compile: whether to compile the model.
        unigram: token counts of the training text, on every rank; required for an output bias.
        inductor_options: names of `torch._inductor.config` and their values, for compilation; None for its defaults.

    Returns:
        The module to call, and the model itself, whose parameters have plain names and are DTensors with FSDP2.
    """
    with torch.device("meta"):
        model = build_model(config)
    if ranks.mode == "fsdp2":
        _shard(model, ranks, bf16=bf16, compile=compile, inductor_options=inductor_options)
    elif compile:
        model.compile(dynamic=False, options=inductor_options)
    _materialise(model, ranks.device)
    initialise(model, seed, unigram)
    if ranks.mode == "ddp":
        device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True), model
    return model, model


def _shard(
    model: LanguageModel, ranks: Ranks, *, bf16: bool, compile: bool, inductor_options: dict[str, Any] | None
) -> None:
    """Apply FSDP2: each block is a group; embedding, final norm and head form one group, because they may be tied."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh: DeviceMesh = init_device_mesh(ranks.device.type, (ranks.size,))
    # Autocast decides the precision of every operation, as without sharding: the residual stream keeps its dtype. Only
    # the blocks' weights are sent and gathered as bf16; the tables and their gradients are float32 throughout.
    # Not on the CPU, where LayerNorm needs weights of its input's dtype.
    as_bf16 = bf16 and ranks.device.type == "cuda"
    in_blocks = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if as_bf16 else None
    for block in model.blocks:
        if compile:
            block.compile(dynamic=False, options=inductor_options)
        fully_shard(block, mesh=mesh, mp_policy=in_blocks or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on the device; tied parameters stay tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def synchronise_gradients(module: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass averages gradients over the ranks; only the last micro-batch needs it."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = wanted
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
