"""Edge cases of the family on several ranks: skipped steps, huge moments, ZeroRedundancyOptimizer."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    H,
    V,
    assert_close,
    assert_same_parameters,
    backward,
    full,
    mesh_of,
    place,
    random_tensor,
    runs_on,
)
from scenarios.family import PARTIAL, WITHOUT_MOMENTUM, family_table
from scenarios.placements import meshes_and_placements
from scenarios.zero_redundancy import ranks_with_tables, zero


@runs_on(2)
def zero_with_mean_free_updates_equals_single_process() -> None:
    """Each table is whole on the rank that updates it, so its mean is exact."""
    options: dict[str, Any] = {**PARTIAL, "vocabulary_size": 11}
    for tied, couple in ((True, "output"), (False, "all")):
        model, reference = GPT(tied=tied), GPT(tied=tied)
        wrapped = DistributedDataParallel(model)
        optimizer = zero(model, couple, **options)
        plain = CoupledAdamW(reference, lr=LR, weight_decay=0.1, couple=couple, **options)
        assert any(ranks_with_tables(optimizer))
        before = model.lm_head.weight.detach()[:11].mean(0)
        for step in range(STEPS):
            backward(wrapped, step)
            optimizer.step()
            backward(reference, step)
            plain.step()
        assert_same_parameters(model, reference)
        moved = (model.lm_head.weight.detach()[:11].mean(0) - before).abs().max()
        assert moved < 1e-6, f"the mean embedding moved by {moved}"


@runs_on(2)
def a_skipped_step_changes_nothing_and_no_rank_waits() -> None:
    for mesh, placements in meshes_and_placements():
        for options in (PARTIAL, {**PARTIAL, "max_grad_norm": 0.1}, WITHOUT_MOMENTUM):
            table, optimizer = family_table(mesh, placements, (V, H), **options)
            table.grad = place(random_tensor(V, H, seed=1), mesh, placements)
            optimizer.step()
            before = copy.deepcopy([table.detach(), *optimizer.state[table].values()])
            optimizer.found_inf = torch.tensor(1.0)  # as set by GradScaler
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.step()
            after = [table.detach(), *optimizer.state[table].values()]
            for one, other in zip(before, after, strict=True):
                assert torch.equal(full(one), full(other)), f"{placements} {options}"


@runs_on(2)
def a_rank_that_skips_alone_keeps_no_other_waiting() -> None:
    """The caller decides about found_inf; a rank with a non-finite gradient must not leave the others hanging."""
    mesh = mesh_of(2)
    for placement in (Shard(0), Shard(1)):
        table, optimizer = family_table(mesh, (placement,), (V, H), **PARTIAL, max_grad_norm=0.1)
        table.grad = place(random_tensor(V, H, seed=1), mesh, (placement,))
        optimizer.found_inf = torch.tensor(float(dist.get_rank() == 0))
        before = table.detach().to_local().clone()
        optimizer.step()
        assert torch.equal(table.detach().to_local(), before) == (dist.get_rank() == 0)


@runs_on(2)
def a_table_that_is_a_sum_over_ranks_is_refused() -> None:
    local = random_tensor(V, H, seed=0)
    table = nn.Parameter(DTensor.from_local(local, mesh_of(2), (Partial(),)))
    with pytest.raises(ValueError, match="'head'"):
        CoupledAdamW([{"params": [("head", table)], "coupled": True}], **PARTIAL)


@runs_on(2)
def column_moments_whose_sum_overflows_float32_do_not_stop_the_table() -> None:
    mesh = mesh_of(2)
    options: dict[str, Any] = {"row_exponent": 0.5, "column_exponent": 0.5, "mean_free": True}
    for placement in (Shard(0), Shard(1)):
        table = nn.Parameter(place(random_tensor(V, H, seed=0), mesh, (placement,)))
        optimizer = CoupledAdamW([{"params": [table], "coupled": True}], lr=LR, weight_decay=0.0, **options)
        gradient = 4e20 * random_tensor(V, H, seed=1).sign()  # c_h is then 1.6e38; the maximum is 3.4e38
        table.grad = place(gradient, mesh, (placement,))
        optimizer.step()
        oracle = reference_step(reference_init(random_tensor(V, H, seed=0)), gradient, lr=LR, **options)
        assert_close(f"table {placement}", table, oracle.embeddings)
