"""Compare the monitor of sharded tables on two forked ranks with the same table on one rank.

Usage: python monitor_on_ranks.py STORE

Legend: V vocabulary rows, H hidden size.
"""

import math
import multiprocessing
import sys
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from coupled_adam.embeddings import measure
from coupled_adam.training.embedding_monitor import full_measures, light_measures

H = 8
# 13 rows are uneven on two ranks; with one row the second rank has none; padding begins in the second rank's part,
# between both, in the first rank's part, or not at all.
SHAPES = [(13, 13), (13, 11), (13, 7), (13, 3), (12, 6), (1, 1), (2, 1)]


def table_of(V: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(V, H, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


def expected(table: Tensor, vocabulary_size: int) -> tuple[float, float]:
    rows = table[:vocabulary_size].double().numpy()
    mu_norm = np.linalg.norm(rows.mean(0))
    return mu_norm, mu_norm / np.linalg.norm(rows, axis=1).mean()


def assert_light(what: str, results: dict[str, Tensor], role: str, table: Tensor, vocabulary_size: int) -> None:
    for name, value in zip(("mu_norm", "mu_norm_ratio"), expected(table, vocabulary_size), strict=True):
        actual = results[name if role == "output" else f"{role}_{name}"].item()
        assert math.isclose(actual, value, rel_tol=1e-6), (
            f"{what}, rank {dist.get_rank()}: {name} {actual}, not {value}"
        )


def rows_sharded_in_any_way() -> None:
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    for V, vocabulary_size in SHAPES:
        for mesh, placements in ((line, [Shard(0)]), (line, [Replicate()]), (grid, [Replicate(), Shard(0)])):
            for dtype in (torch.float32, torch.bfloat16):
                table = table_of(V, dtype=dtype)
                sharded = distribute_tensor(table.clone(), mesh, placements)
                results = light_measures({"output": sharded}, vocabulary_size)
                assert_light(
                    f"{V} rows, {vocabulary_size} tokens, {placements}", results, "output", table, vocabulary_size
                )


def two_tables_of_fsdp2_in_one_message() -> None:
    model = nn.Sequential(nn.Embedding(13, H), nn.Linear(H, 13, bias=False))
    for seed, module in enumerate(model):
        module.weight.data.copy_(table_of(13, seed))
    fully_shard(model)
    with CommDebugMode() as messages:
        results = light_measures({"input": model[0].weight, "output": model[1].weight}, 11)
    for seed, role in enumerate(("input", "output")):
        assert_light("FSDP2", results, role, table_of(13, seed), 11)
    assert messages.get_total_counts() == 1, messages.get_comm_counts()
    numbers = full_measures({"output": model[1].weight}, 11)
    if dist.get_rank() == 0:
        reference = measure(table_of(13, 1)[:11])
        assert numbers["iso"] == reference.iso
        assert numbers["mu_norm_ratio"] == reference.mu_norm_ratio
    else:
        assert numbers == {}


def columns_are_refused() -> None:
    table = distribute_tensor(table_of(12), init_device_mesh("cpu", (2,)), [Shard(1)])
    with pytest.raises(ValueError, match=r"^output table: .*Shard\(dim=1\).*table\.full_tensor\(\)"):
        light_measures({"output": table}, 12)


def run_rank(rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    rows_sharded_in_any_way()
    two_tables_of_fsdp2_in_one_message()
    columns_are_refused()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank,), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode != 0 for process in ranks))
