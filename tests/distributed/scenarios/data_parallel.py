"""Data parallelism: FSDP2, HSDP and DDP models train like the same model on one rank."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from coupled_adam import CoupledAdamW
from scenarios.common import (
    GPT,
    LR,
    V,
    assert_follows_unsharded,
    assert_same_parameters,
    assert_same_state,
    assert_trains_like_unsharded,
    mesh_of,
    runs_on,
    train,
)


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block by itself and the rest with the root: tied tables must be in one group (torch >= 2.13)."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local_rows(parameter: nn.Parameter) -> list[int]:
    """Rows of each rank's part."""
    rows = [0] * dist.get_world_size()
    dist.all_gather_object(rows, parameter.to_local().shape[0])
    return rows


@runs_on(2, 4)
def fsdp2_with_tied_tables_equals_unsharded() -> None:
    mesh = mesh_of(dist.get_world_size())
    model = fsdp2(GPT(tied=True), mesh)
    assert len(set(local_rows(model.wte.weight))) == 2, f"{V} rows should be uneven"
    assert model.lm_head.weight is model.wte.weight
    assert_trains_like_unsharded(model, GPT(tied=True))
    assert_follows_unsharded(fsdp2(GPT(tied=True), mesh), GPT(tied=True))


@runs_on(2, 4)
def fsdp2_with_all_of_two_tables_coupled_equals_unsharded() -> None:
    mesh = mesh_of(dist.get_world_size())
    options = {"couple": "all", "scale_exponent": 1.0}
    assert_trains_like_unsharded(fsdp2(GPT(tied=False), mesh), GPT(tied=False), **options)
    assert_follows_unsharded(fsdp2(GPT(tied=False), mesh), GPT(tied=False), **options)


@runs_on(4)
def fsdp2_with_more_ranks_than_rows_equals_unsharded() -> None:
    model = fsdp2(GPT(tied=True, vocabulary=3), mesh_of(4))
    assert local_rows(model.wte.weight) == [1, 1, 1, 0], local_rows(model.wte.weight)
    assert_trains_like_unsharded(model, GPT(tied=True, vocabulary=3))


@runs_on(4)
def fsdp2_with_more_ranks_than_rows_and_clipping_follows_unsharded() -> None:
    mesh = mesh_of(4)
    for options in ({"foreach": True}, {"fused": True}):
        model = fsdp2(GPT(tied=True, vocabulary=3), mesh)
        assert_follows_unsharded(model, GPT(tied=True, vocabulary=3), max_grad_norm=0.1, **options)


@runs_on(4)
def hsdp_equals_unsharded() -> None:
    mesh = mesh_of(2, 2)
    model = fsdp2(GPT(tied=True), mesh)
    assert model.wte.weight.placements == (Replicate(), Shard(0)), model.wte.weight.placements
    assert_trains_like_unsharded(model, GPT(tied=True))
    assert_follows_unsharded(fsdp2(GPT(tied=True), mesh), GPT(tied=True), max_grad_norm=0.1)


@runs_on(2)
def fsdp2_sharded_by_columns_equals_unsharded() -> None:
    def by_columns(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim == 2 else 0)

    mesh = mesh_of(2)
    model = fully_shard(GPT(tied=True), mesh=mesh, shard_placement_fn=by_columns)
    assert model.wte.weight.placements == (Shard(1),), model.wte.weight.placements
    assert_trains_like_unsharded(model, GPT(tied=True))
    model = fully_shard(GPT(tied=True), mesh=mesh, shard_placement_fn=by_columns)
    assert_follows_unsharded(model, GPT(tied=True), max_grad_norm=0.1)


@runs_on(2)
def ddp_equals_single_process() -> None:
    for options in ({}, {"max_grad_norm": 0.1}):
        model, reference = GPT(tied=True), GPT(tied=True)
        wrapped = DistributedDataParallel(model)
        optimizer = CoupledAdamW(wrapped, lr=LR, weight_decay=0.1, **options)
        reference_optimizer = CoupledAdamW(reference, lr=LR, weight_decay=0.1, **options)
        names = [group["param_names"] for group in optimizer.param_groups]
        assert names == [group["param_names"] for group in reference_optimizer.param_groups], names
        assert names[0] == ["wte.weight"], names
        train(wrapped, optimizer)
        train(reference, reference_optimizer)
        assert_same_parameters(model, reference)
        assert_same_state(model, optimizer, reference, reference_optimizer)
