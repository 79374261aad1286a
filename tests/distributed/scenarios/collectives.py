"""Communication in a step: one all-reduce per process group, in flight while other groups are updated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import blockwise
from coupled_adam.optimizer import step as step_module
from scenarios.common import GPT, H, backward, mesh_of, place, random_tensor, runs_on
from scenarios.tensor_parallel import BY_ROWS, fsdp2_over_tensor_parallel


@dataclass
class Events:
    """The events of a step, in order."""

    names: list[str] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)  # of each all-reduce
    elements: list[int] = field(default_factory=list)  # of each all-reduce
    collectives: int = 0  # of any kind, counted in torch's dispatcher


class WatchedWork:
    """An asynchronous collective that records when it is awaited."""

    def __init__(self, work: Any, events: Events) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.names.append("wait")
        self._work.wait()


@contextmanager
def watched() -> Iterator[Events]:
    """Record all-reduces, when they are awaited, and the updates of standard and coupled groups."""
    events = Events()
    all_reduce, adamw, apply_update = dist.all_reduce, step_module.adamw, blockwise.apply_update

    def watched_all_reduce(tensor: Tensor, *, group: Any, async_op: bool) -> WatchedWork:
        assert async_op, "an all-reduce that blocks cannot overlap with anything"
        events.names.append("all_reduce")
        events.groups.append(group)
        events.elements.append(tensor.numel())
        return WatchedWork(all_reduce(tensor, group=group, async_op=True), events)

    def watched_adamw(*args: Any, **kwargs: Any) -> None:
        events.names.append("standard update")
        adamw(*args, **kwargs)

    def watched_apply_update(*args: Any, **kwargs: Any) -> None:
        events.names.append("coupled update")
        apply_update(*args, **kwargs)

    with (
        mock.patch.object(dist, "all_reduce", watched_all_reduce),
        mock.patch.object(step_module, "adamw", watched_adamw),
        mock.patch.object(blockwise, "apply_update", watched_apply_update),
        CommDebugMode() as counter,
    ):
        yield events
    events.collectives = counter.get_total_counts()


def fsdp2_step(**options: Any) -> Events:
    """A step of a model with two coupled tables, a decayed and an undecayed group, all sharded by rows."""
    model = fully_shard(GPT(tied=False), mesh=mesh_of(dist.get_world_size()))
    optimizer = CoupledAdamW(model, couple="all", **options)
    backward(model, 0)
    with watched() as events:
        optimizer.step()
    return events


def table_step(mesh: DeviceMesh, *placements: tuple[Any, ...], **options: Any) -> Events:
    """A step of one coupled group with a table for each of the placements."""
    tables = [nn.Parameter(place(random_tensor(13, H, seed=i), mesh, each)) for i, each in enumerate(placements)]
    optimizer = CoupledAdamW([{"params": tables, "coupled": True}], **options)
    for table in tables:
        table.grad = table.detach().clone()
    with watched() as events:
        optimizer.step()
    return events


@runs_on(2)
def all_reduce_of_all_tables_overlaps_the_standard_groups() -> None:
    events = fsdp2_step()
    order = ["all_reduce", "standard update", "standard update", "wait", "coupled update", "coupled update"]
    assert events.names == order, events.names
    assert events.elements == [2 * H], f"{events.elements} elements, expected {H} for each of two tables"
    assert events.collectives == 1, f"{events.collectives} collectives"


@runs_on(2)
def all_reduce_with_clipping_is_awaited_before_any_update() -> None:
    events = fsdp2_step(max_grad_norm=1.0)
    order = ["all_reduce", "wait", "standard update", "standard update", "coupled update", "coupled update"]
    assert events.names == order, events.names
    # In addition to the column sums of two tables: their two squared norms, and one for all other parameters.
    assert events.elements == [2 * H + 3], events.elements
    assert events.collectives == 1, f"{events.collectives} collectives"


@runs_on(4)
def replicating_dimensions_of_a_mesh_are_silent() -> None:
    mesh = mesh_of(2, 2)
    for options in ({}, {"max_grad_norm": 1.0}):
        events = table_step(mesh, (Replicate(), Shard(0)), (Replicate(), Shard(0)), **options)
        assert events.groups == [mesh.get_group("tp")], events.groups
        assert events.collectives == 1, f"{events.collectives} collectives"
        events = table_step(mesh, (Replicate(), Replicate()), **options)
        assert events.collectives == 0, f"{events.collectives} collectives for a replicated table"


@runs_on(2)
def columns_of_a_table_need_no_collective_without_clipping() -> None:
    mesh = mesh_of(2)
    events = table_step(mesh, (Shard(1),))
    assert events.collectives == 0, f"{events.collectives} collectives"
    events = table_step(mesh, (Shard(1),), max_grad_norm=1.0)
    assert events.elements == [1], f"{events.elements} elements, expected the squared norm alone"


@runs_on(4)
def table_sharded_by_rows_over_two_dimensions_takes_one_all_reduce_for_each() -> None:
    mesh = mesh_of(2, 2)
    for options in ({}, {"max_grad_norm": 1.0}):
        events = table_step(mesh, (Shard(0), Shard(0)), (Shard(0), Shard(0)), **options)
        assert events.groups == [mesh.get_group("dp"), mesh.get_group("tp")], events.groups
        assert events.collectives == 2, f"{events.collectives} collectives"


@runs_on(4)
def fsdp2_over_tensor_parallel_takes_one_all_reduce_for_each_mesh_dimension() -> None:
    """Blocks are on the "dp" mesh and tables on the mesh of both, but they share a message."""
    mesh = mesh_of(2, 2)
    for options in ({}, {"max_grad_norm": 1.0}):
        model = fsdp2_over_tensor_parallel(BY_ROWS, mesh)
        optimizer = CoupledAdamW(model, couple="all", **options)
        backward(model, 0)
        with watched() as events:
            optimizer.step()
        assert events.groups == [mesh.get_group("dp"), mesh.get_group("tp")], events.groups
        assert events.collectives == 2, f"{events.collectives} collectives"


@runs_on(2)
def plain_tensors_take_no_collective() -> None:
    model = GPT(tied=True)
    optimizer = CoupledAdamW(model, max_grad_norm=1.0, error_if_nonfinite=True)
    backward(model, 0)
    with watched() as events:
        optimizer.step()
    assert events.collectives == 0, f"{events.collectives} collectives"
    assert torch.isfinite(optimizer.grad_norm)
