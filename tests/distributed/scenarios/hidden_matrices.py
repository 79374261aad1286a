"""BatchedMuon updates sharded matrices as on one rank."""

import itertools
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from coupled_adam.optimizer import BatchedMuon, muon_step
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    assert_close,
    backward,
    full,
    mesh_of,
    place,
    random_tensor,
    runs_on,
)
from scenarios.data_parallel import fsdp2
from scenarios.placements import meshes_and_placements

# The tensor-parallel plan of a block, in torch's terms.
BLOCK = {
    f"blocks.{i}.{name}": style
    for i in range(2)
    for name, style in (("fc", ColwiseParallel()), ("proj", RowwiseParallel()))
}
# Forward passes on one and on several ranks round differently, and the bfloat16 iteration amplifies that.
TOLERANCE = 1e-4


def optimizer_of(model: nn.Module, **options: Any) -> BatchedMuon:
    hidden = [(name, p) for name, p in model.named_parameters() if "blocks." in name and p.ndim == 2]
    assert len(hidden) == 4, [name for name, _ in hidden]
    return BatchedMuon(hidden, lr=LR, weight_decay=0.1, ns_dtype="float32", **options)


def assert_trains_like_unsharded(model: nn.Module, **options: Any) -> None:
    """Train both on their own gradients; parameters and momentum must agree."""
    reference = GPT(tied=True)
    optimizer, expected = optimizer_of(model, **options), optimizer_of(reference, **options)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        backward(reference, step)
        expected.step()
    pairs = zip(optimizer.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True)
    for name, (mine, theirs) in zip(expected.param_groups[0]["param_names"], pairs, strict=True):
        assert_close(name, mine, theirs, TOLERANCE)
        buffers = optimizer.state[mine]["momentum_buffer"], expected.state[theirs]["momentum_buffer"]
        assert_close(f"momentum of {name}", *buffers, TOLERANCE)
        if isinstance(mine, DTensor):
            assert buffers[0].placements == mine.placements, buffers[0].placements


@runs_on(2)
def muon_under_ddp_is_that_of_one_process_to_the_bit() -> None:
    model, reference = GPT(tied=True), GPT(tied=True)
    wrapped = DistributedDataParallel(model)
    optimizer, expected = optimizer_of(wrapped), optimizer_of(reference)
    for step in range(STEPS):
        backward(wrapped, step)
        optimizer.step()
        backward(reference, step)
        expected.step()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.equal(theirs), name


@runs_on(2, 4)
def muon_under_fsdp2_equals_unsharded() -> None:
    mesh = mesh_of(dist.get_world_size())
    for adjust in ("original", "match_rms_adamw"):
        # 10 rows are uneven on 4 ranks: 3, 3, 3, 1.
        assert_trains_like_unsharded(fsdp2(GPT(tied=True), mesh), adjust_lr_fn=adjust)


@runs_on(2)
def muon_under_fsdp2_with_small_matrices_in_one_batch_equals_unsharded() -> None:
    muon_step.small_elements = lambda device: 2**20  # as on a GPU; this process runs nothing else
    assert_trains_like_unsharded(fsdp2(GPT(tied=True), mesh_of(2)))


@runs_on(2)
def muon_under_fsdp2_by_columns_equals_unsharded() -> None:
    def by_columns(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim == 2 else 0)

    assert_trains_like_unsharded(fully_shard(GPT(tied=True), mesh=mesh_of(2), shard_placement_fn=by_columns))


@runs_on(4)
def muon_under_hsdp_equals_unsharded() -> None:
    assert_trains_like_unsharded(fsdp2(GPT(tied=True), mesh_of(2, 2)))


@runs_on(2)
def muon_under_tensor_parallelism_equals_unsharded() -> None:
    model = parallelize_module(GPT(tied=True), mesh_of(2), BLOCK)
    assert model.blocks[0].fc.weight.placements == (Shard(0),)
    assert model.blocks[0].proj.weight.placements == (Shard(1),)
    assert_trains_like_unsharded(model)


@runs_on(4)
def muon_under_fsdp2_over_tensor_parallelism_equals_unsharded() -> None:
    mesh = mesh_of(2, 2)
    model = fully_shard(parallelize_module(GPT(tied=True), mesh["tp"], BLOCK), mesh=mesh["dp"])
    assert model.blocks[0].fc.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert_trains_like_unsharded(model)


@runs_on(2, 4)
def muon_moves_a_matrix_under_any_placement_as_a_whole_one() -> None:
    """Uneven parts, and parts without any row or column: three of them over four ranks."""
    for shape, (mesh, placements) in itertools.product([(13, 8), (3, 7), (7, 3)], meshes_and_placements()):
        spread = nn.Parameter(place(random_tensor(*shape, seed=0), mesh, placements))
        whole = nn.Parameter(random_tensor(*shape, seed=0))
        optimizers = [BatchedMuon([p], lr=LR, ns_dtype="float32") for p in (spread, whole)]
        for step in range(3):
            gradient = random_tensor(*shape, seed=10 + step)
            spread.grad, whole.grad = place(gradient, mesh, placements), gradient
            for optimizer in optimizers:
                optimizer.step()
        assert_close(f"{shape} {placements}", spread, whole, 1e-6)
        assert_close(
            "momentum", *(o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (spread, whole), strict=True))
        )


@runs_on(2)
def muon_takes_gradients_of_another_placement() -> None:
    """With tensor parallelism, a sharded parameter can have a replicated or partial gradient."""
    mesh = mesh_of(2)
    for placement in (Replicate(), Partial()):
        spread, whole = (
            nn.Parameter(p) for p in (place(random_tensor(5, 4, seed=0), mesh, [Shard(0)]), random_tensor(5, 4, seed=0))
        )
        gradient = random_tensor(5, 4, seed=1)
        local = gradient / 2 if placement.is_partial() else gradient
        spread.grad = DTensor.from_local(local, mesh, [placement])
        whole.grad = gradient
        for p in (spread, whole):
            BatchedMuon([p], lr=LR, ns_dtype="float32").step()
        assert_close("parameter", spread, whole)


@runs_on(2)
def muon_with_spread_and_whole_matrices_in_one_group() -> None:
    mesh = mesh_of(2)
    spread, whole = (
        [nn.Parameter(random_tensor(5, 4, seed=seed)) for seed in range(2)],
        [nn.Parameter(random_tensor(5, 4, seed=seed)) for seed in range(2)],
    )
    spread[0] = nn.Parameter(place(spread[0].detach(), mesh, [Shard(0)]))
    for params in (spread, whole):
        for seed, p in enumerate(params):
            gradient = random_tensor(5, 4, seed=9 + seed)
            p.grad = place(gradient, mesh, [Shard(0)]) if isinstance(p, DTensor) else gradient
        BatchedMuon(params, lr=LR, ns_dtype="float32").step()
    for mine, theirs in zip(spread, whole, strict=True):
        assert_close("parameter", full(mine), theirs)
