"""Tensor parallelism, alone and under FSDP2: tables sharded by rows, by columns, and by both."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from scenarios.common import GPT, assert_follows_unsharded, mesh_of, runs_on

# Each rank has some rows of the tables. In torch's terms: the embedding is "row-wise", the head "column-wise".
BY_ROWS = {
    "wte": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
# Each rank has some columns of the tables.
BY_COLUMNS = {
    "wte": ColwiseParallel(output_layouts=Replicate()),
    "lm_head": RowwiseParallel(input_layouts=Replicate()),
}


def assert_placements(model: nn.Module, *placements: object) -> None:
    for name in ("wte.weight", "lm_head.weight"):
        found = model.get_parameter(name).placements
        assert found == placements, f"{name} is placed {found}, expected {placements}"


@runs_on(2, 4)
def tables_sharded_by_rows_follow_unsharded() -> None:
    model = parallelize_module(GPT(tied=False), mesh_of(dist.get_world_size()), BY_ROWS)
    assert_placements(model, Shard(0))
    # The trap: the gradient of the embedding comes out replicated, that of the head sharded (torch 2.13).
    assert_follows_unsharded(model, GPT(tied=False), couple="all")


@runs_on(2)
def tied_tables_sharded_by_rows_follow_unsharded() -> None:
    model = parallelize_module(GPT(tied=True), mesh_of(2), BY_ROWS)
    model.lm_head.weight = model.wte.weight  # parallelize_module has untied them (torch 2.13)
    assert_follows_unsharded(model, GPT(tied=True))


@runs_on(2, 4)
def tables_sharded_by_columns_follow_unsharded() -> None:
    model = parallelize_module(GPT(tied=False), mesh_of(dist.get_world_size()), BY_COLUMNS)
    assert_placements(model, Shard(1))
    assert_follows_unsharded(model, GPT(tied=False), couple="all", max_grad_norm=0.1)


def fsdp2_over_tensor_parallel(plan: dict[str, object], mesh: DeviceMesh, shard_dim: int = 0) -> nn.Module:
    model = parallelize_module(GPT(tied=False), mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(shard_dim if p.ndim == 2 else 0))


@runs_on(4)
def fsdp2_over_tables_sharded_by_rows_follows_unsharded() -> None:
    for options in ({}, {"max_grad_norm": 0.1}):
        model = fsdp2_over_tensor_parallel(BY_ROWS, mesh_of(2, 2))
        assert_placements(model, _StridedShard(0, split_factor=2), Shard(0))
        assert_follows_unsharded(model, GPT(tied=False), couple="all", **options)


@runs_on(4)
def fsdp2_over_tables_sharded_by_columns_follows_unsharded() -> None:
    for options in ({}, {"max_grad_norm": 0.1}):
        model = fsdp2_over_tensor_parallel(BY_COLUMNS, mesh_of(2, 2))
        assert_placements(model, Shard(0), Shard(1))
        assert_follows_unsharded(model, GPT(tied=False), couple="all", **options)


@runs_on(4)
def fsdp2_by_columns_over_tables_sharded_by_columns_follows_unsharded() -> None:
    model = fsdp2_over_tensor_parallel(BY_COLUMNS, mesh_of(2, 2), shard_dim=1)
    assert_placements(model, _StridedShard(1, split_factor=2), Shard(1))
    assert_follows_unsharded(model, GPT(tied=False), couple="all", max_grad_norm=0.1)
