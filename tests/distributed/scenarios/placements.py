"""A single table with every placement: it follows Algorithm 1, and its second moment has the right placement.

Legend: V vocabulary rows, H hidden size.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step
from scenarios.common import LR, STEPS, H, V, assert_close, mesh_of, place, random_tensor, runs_on

Placements = tuple[Placement, ...]


def meshes_and_placements() -> list[tuple[DeviceMesh, Placements]]:
    """All ways to place a table over a mesh of one and, on four ranks, of two dimensions."""
    one = mesh_of(dist.get_world_size())
    cases: list[tuple[DeviceMesh, Placements]] = [(one, (p,)) for p in (Shard(0), Shard(1), Replicate())]
    if dist.get_world_size() == 4:
        two = mesh_of(2, 2)
        cases += [(two, pair) for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)]
        # FSDP2's placement of a table that tensor parallelism has already sharded along the same dimension.
        cases += [(two, (_StridedShard(dim, split_factor=2), Shard(dim))) for dim in (0, 1)]
    return cases


def coupled_table(
    mesh: DeviceMesh, placements: Placements, shape: tuple[int, int] = (V, H)
) -> tuple[nn.Parameter, CoupledAdamW]:
    table = nn.Parameter(place(random_tensor(*shape, seed=0), mesh, placements))
    assert table.placements == placements, f"{table.placements}, expected {placements}"
    group = {"params": [("table", table)], "coupled": True, "weight_decay": 0.1}
    return table, CoupledAdamW([group], lr=LR)


def placements_of_one_row(placements: Placements) -> Placements:
    """Placements of a (1, H) tensor for a table: sharded with its columns, otherwise replicated."""
    # Not is_shard(0): _StridedShard is not a Shard.
    return tuple(p if p.is_replicate() or p.dim == 1 else Replicate() for p in placements)


def assert_same_on_all_ranks(what: str, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Assert bitwise equality: otherwise replicated tensors would drift apart."""
    copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, tensor.contiguous(), group=group)
    assert all(torch.equal(copy, tensor) for copy in copies), f"{what} differs between ranks: {copies}"


@runs_on(2, 4)
def table_under_any_placement_follows_algorithm_1() -> None:
    # With one row or column fewer than ranks, one of four ranks has none.
    for shape, (mesh, placements) in itertools.product([(V, H), (3, 3)], meshes_and_placements()):
        table, optimizer = coupled_table(mesh, placements, shape)
        oracle = reference_init(random_tensor(*shape, seed=0))
        for step in range(1, STEPS + 1):
            gradient = random_tensor(*shape, seed=step)
            table.grad = place(gradient, mesh, placements)
            optimizer.step()
            oracle = reference_step(oracle, gradient, lr=LR, weight_decay=0.1)
        assert_close(f"table {placements}", table, oracle.embeddings)
        assert_close(f"exp_avg {placements}", optimizer.state[table]["exp_avg"], oracle.first_moment)
        second_moment = oracle.second_moment.mean(dim=0, keepdim=True)
        assert_close(f"exp_avg_sq {placements}", optimizer.state[table]["exp_avg_sq"], second_moment)


@runs_on(2, 4)
def second_moment_is_one_row_placed_like_the_columns() -> None:
    for mesh, placements in meshes_and_placements():
        table, optimizer = coupled_table(mesh, placements)
        table.grad = place(random_tensor(V, H, seed=1), mesh, placements)
        optimizer.step()
        exp_avg_sq = optimizer.state[table]["exp_avg_sq"]
        assert isinstance(exp_avg_sq, DTensor), type(exp_avg_sq)
        assert exp_avg_sq.device_mesh == mesh, exp_avg_sq.device_mesh
        assert tuple(exp_avg_sq.shape) == (1, H), exp_avg_sq.shape
        assert exp_avg_sq.dtype == torch.float32, exp_avg_sq.dtype
        expected = placements_of_one_row(placements)
        assert exp_avg_sq.placements == expected, f"{exp_avg_sq.placements} for a table {placements}"
        for mesh_dim, placement in enumerate(expected):
            if placement.is_replicate():
                assert_same_on_all_ranks("exp_avg_sq", exp_avg_sq.to_local(), mesh.get_group(mesh_dim))
        exp_avg = optimizer.state[table]["exp_avg"]
        assert exp_avg.placements == placements, f"{exp_avg.placements} for a table {placements}"


@runs_on(2)
def second_moment_of_bfloat16_table_is_float32() -> None:
    mesh = mesh_of(2)
    table = nn.Parameter(place(random_tensor(V, H, seed=0).bfloat16(), mesh, (Shard(0),)))
    optimizer = CoupledAdamW([{"params": [table], "coupled": True}])
    gradient = random_tensor(V, H, seed=1).bfloat16()
    table.grad = place(gradient, mesh, (Shard(0),))
    optimizer.step()
    exp_avg_sq = optimizer.state[table]["exp_avg_sq"]
    assert exp_avg_sq.dtype == torch.float32, exp_avg_sq.dtype
    assert_close("exp_avg_sq", exp_avg_sq, 1e-3 * gradient.double().square().mean(dim=0, keepdim=True))


@runs_on(2, 4)
def gradient_placed_unlike_its_table_is_redistributed() -> None:
    for mesh, placements in meshes_and_placements():
        for grad_placement in (Replicate(), Partial(), Shard(0), Shard(1)):
            table, optimizer = coupled_table(mesh, placements)
            oracle = reference_init(random_tensor(V, H, seed=0))
            for step in range(1, 3):
                gradient = random_tensor(V, H, seed=step)
                table.grad = _gradient(gradient, mesh, grad_placement)
                optimizer.step()
                oracle = reference_step(oracle, gradient, lr=LR, weight_decay=0.1)
            assert_close(f"table {placements} with gradient {grad_placement}", table, oracle.embeddings)


def _gradient(gradient: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A gradient with the same placement over all mesh dimensions; if partial, each rank has its own share."""
    if not placement.is_partial():
        return place(gradient, mesh, [placement] * mesh.ndim)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares = [random_tensor(V, H, seed=100 + other) for other in range(ranks - 1)]
    shares.append(gradient - sum(shares))
    return DTensor.from_local(shares[rank], mesh, [placement] * mesh.ndim)
