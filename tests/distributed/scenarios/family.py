"""The family of second moments on several ranks: row moments, mean-free updates and padded tables."""

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step
from scenarios import checkpoints
from scenarios.checkpoints import HALF, assert_state, checkpoint, load, save
from scenarios.collectives import watched
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    H,
    V,
    assert_close,
    assert_follows_unsharded,
    assert_same_parameters,
    full,
    mesh_of,
    place,
    random_tensor,
    runs_on,
    train,
)
from scenarios.data_parallel import fsdp2
from scenarios.placements import Placements, assert_same_on_all_ranks, meshes_and_placements
from scenarios.tensor_parallel import BY_COLUMNS, BY_ROWS, fsdp2_over_tensor_parallel

PARTIAL: dict[str, Any] = {"row_exponent": 0.25, "mean_free": True}
WITHOUT_MOMENTUM: dict[str, Any] = {"betas": (0.0, 0.99), "row_exponent": 1.0, "mean_free": True}
MEMBERS: tuple[dict[str, Any], ...] = (
    PARTIAL,
    {"row_exponent": 0.5, "column_exponent": 0.5},
    {"mean_free": True},
    {"column_exponent": 0.25},
    {"betas": (0.0, 0.99)},
    WITHOUT_MOMENTUM,
)


def placements_of_one_column(placements: Placements) -> Placements:
    """Placements of a (V, 1) tensor for a table: sharded with its rows, otherwise replicated."""
    return tuple(p if p.is_replicate() or p.dim == 0 else Replicate() for p in placements)


def family_table(mesh: Any, placements: Placements, shape: tuple[int, int], **options: Any) -> Any:
    table = nn.Parameter(place(random_tensor(*shape, seed=0), mesh, placements))
    group = {"params": [("table", table)], "coupled": True, "weight_decay": 0.1}
    return table, CoupledAdamW([group], lr=LR, **options)


def random_gradient(shape: tuple[int, int], step: int) -> Tensor:
    return random_tensor(*shape, seed=step) * torch.logspace(-2, 0, shape[0]).unsqueeze(1)


def assert_follows_the_equations(shape: tuple[int, int], clipping: dict[str, Any], **options: Any) -> None:
    for mesh, placements in meshes_and_placements():
        table, optimizer = family_table(mesh, placements, shape, **options, **clipping)
        oracle = reference_init(random_tensor(*shape, seed=0))
        for step in range(1, 4):
            gradient = random_gradient(shape, step)
            table.grad = place(gradient, mesh, placements)
            optimizer.step()
            if clipping:
                gradient = gradient * min(1.0, clipping["max_grad_norm"] / (float(gradient.norm()) + 1e-6))
                assert_close("grad_norm", optimizer.grad_norm, full(table.grad).norm())
            oracle = reference_step(oracle, gradient, lr=LR, weight_decay=0.1, **options)
        what = f"{placements} {options} {clipping}"
        state = optimizer.state[table]
        assert_close(f"table {what}", table, oracle.embeddings)
        assert_close(f"gradient {what}", table.grad, random_gradient(shape, step), tolerance=1e-30)
        assert ("exp_avg" in state) == ("betas" not in options)
        if "exp_avg" in state:
            assert_close(f"exp_avg {what}", state["exp_avg"], oracle.first_moment)
        real = slice(options.get("vocabulary_size"))
        assert_close(f"exp_avg_sq {what}", state["exp_avg_sq"], oracle.second_moment[real].mean(0, keepdim=True))
        assert ("row_avg_sq" in state) == ("row_exponent" in options)
        if "row_avg_sq" in state:
            assert_close(f"row_avg_sq {what}", state["row_avg_sq"], oracle.second_moment.mean(1, keepdim=True))


@runs_on(2, 4)
def family_under_any_placement_follows_the_equations() -> None:
    for member in MEMBERS:
        assert_follows_the_equations((V, H), {}, **member)
    for member in (PARTIAL, WITHOUT_MOMENTUM):
        assert_follows_the_equations((V, H), {"max_grad_norm": 0.1}, **member)
    # With one row or column fewer than ranks, one of four ranks has none.
    for member in (PARTIAL, WITHOUT_MOMENTUM):
        assert_follows_the_equations((3, 3), {}, **member)
        assert_follows_the_equations((3, 3), {"max_grad_norm": 0.1}, **member)


@runs_on(2, 4)
def padding_is_left_out_of_all_means_on_every_rank() -> None:
    for vocabulary_size in (1, 6, 12):
        assert_follows_the_equations((V, H), {}, **PARTIAL, vocabulary_size=vocabulary_size)
    assert_follows_the_equations((V, H), {}, **WITHOUT_MOMENTUM, vocabulary_size=6)
    assert_follows_the_equations((V, H), {"max_grad_norm": 0.1}, vocabulary_size=6)


@runs_on(2, 4)
def row_moments_are_one_column_placed_like_the_rows() -> None:
    for mesh, placements in meshes_and_placements():
        table, optimizer = family_table(mesh, placements, (V, H), **PARTIAL)
        table.grad = place(random_tensor(V, H, seed=1), mesh, placements)
        optimizer.step()
        row_avg_sq = optimizer.state[table]["row_avg_sq"]
        assert isinstance(row_avg_sq, DTensor), type(row_avg_sq)
        assert tuple(row_avg_sq.shape) == (V, 1), row_avg_sq.shape
        assert row_avg_sq.dtype == torch.float32, row_avg_sq.dtype
        expected = placements_of_one_column(placements)
        assert row_avg_sq.placements == expected, f"{row_avg_sq.placements} for a table {placements}"
        for mesh_dim, placement in enumerate(expected):
            if placement.is_replicate():
                assert_same_on_all_ranks("row_avg_sq", row_avg_sq.to_local(), mesh.get_group(mesh_dim))


@runs_on(2, 4)
def row_moments_made_in_the_middle_start_at_the_mean_of_the_column_moments() -> None:
    for mesh, placements in meshes_and_placements():
        table, optimizer = family_table(mesh, placements, (V, H), betas=(0.9, 0.5))
        for step in (1, 2):
            table.grad = place(random_tensor(V, H, seed=step), mesh, placements)
            optimizer.step()
        before = full(optimizer.state[table]["exp_avg_sq"]).mean()
        optimizer.param_groups[0]["row_exponent"] = 0.5
        gradient = random_tensor(V, H, seed=3)
        table.grad = place(gradient, mesh, placements)
        optimizer.step()
        expected = 0.5 * before + 0.5 * gradient.square().mean(1, keepdim=True)
        assert_close(f"row_avg_sq {placements}", optimizer.state[table]["row_avg_sq"], expected)


@runs_on(2)  # hsdp and tensor parallel below need 4
def family_models_follow_unsharded() -> None:
    mesh = mesh_of(dist.get_world_size())
    for options in (PARTIAL, WITHOUT_MOMENTUM, {**PARTIAL, "max_grad_norm": 0.1, "vocabulary_size": 11}):
        assert_follows_unsharded(fsdp2(GPT(tied=True), mesh), GPT(tied=True), **options)
        assert_follows_unsharded(fsdp2(GPT(tied=False), mesh), GPT(tied=False), couple="all", **options)


@runs_on(4)
def family_models_under_hsdp_and_tensor_parallel_follow_unsharded() -> None:
    mesh = mesh_of(2, 2)
    for options in (PARTIAL, {**PARTIAL, "max_grad_norm": 0.1, "vocabulary_size": 11}):
        assert_follows_unsharded(fsdp2(GPT(tied=True), mesh), GPT(tied=True), **options)
        for plan in (BY_ROWS, BY_COLUMNS):
            model = fsdp2_over_tensor_parallel(plan, mesh)
            assert_follows_unsharded(model, GPT(tied=False), couple="all", **options)


@runs_on(2)
def sums_of_all_tables_travel_in_one_message() -> None:
    mesh = mesh_of(2)
    tables = [nn.Parameter(place(random_tensor(V, H, seed=i), mesh, (Shard(0),))) for i in range(2)]
    for options, elements in (
        (PARTIAL, [4 * H]),  # column sums of g^2 and of rho m of two tables
        ({"row_exponent": 0.25}, [2 * H]),
        (WITHOUT_MOMENTUM, [4 * H]),
        ({**PARTIAL, "max_grad_norm": 1.0}, [2 * H + 2, 2 * H]),  # the norms first, then the sums of the clipped m
    ):
        optimizer = CoupledAdamW([{"params": tables, "coupled": True}], **options)
        for table in tables:
            table.grad = table.detach().clone()
        with watched() as events:
            optimizer.step()
        assert events.elements == elements, f"{options}: {events.elements}, expected {elements}"


def partially_coupled(model: nn.Module, momentum: bool = True) -> CoupledAdamW:
    """Without momentum, the tables keep no first moment, and the other parameters keep theirs."""
    options = {"output_embeddings": {"betas": (0.0, 0.99)}} if not momentum else None
    return CoupledAdamW(model, lr=LR, weight_decay=0.1, couple="all", options=options, max_grad_norm=0.5, **PARTIAL)


def assert_family_continues(model: nn.Module, optimizer: CoupledAdamW, momentum: bool) -> None:
    train(model, optimizer, range(HALF, STEPS))
    reference = GPT(tied=True)
    train(reference, partially_coupled(reference, momentum))
    assert_same_parameters(model, reference)


@runs_on(2, 4)
def checkpoints_of_the_family_are_saved() -> None:
    ranks = dist.get_world_size()
    for momentum in (True, False):
        model = fsdp2(GPT(tied=True), mesh_of(ranks))
        optimizer = partially_coupled(model, momentum)
        train(model, optimizer, range(HALF))
        for flat in (False, True):
            path = checkpoint(f"family-on-{ranks}-flat-{flat}-momentum-{momentum}")
            save(path, model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))


@runs_on(1, 2, 4)
def checkpoint_of_the_family_continues_on_any_number_of_ranks() -> None:
    ranks = dist.get_world_size()
    for saved_on, flat, momentum in itertools.product((2, 4), (False, True), (True, False)):
        if ranks == 2 and saved_on == 4:
            continue  # is saved later
        path = checkpoint(f"family-on-{saved_on}-flat-{flat}-momentum-{momentum}")
        model = fsdp2(GPT(tied=True), mesh_of(ranks))
        optimizer = partially_coupled(model, momentum)
        load(path, model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
        assert ("exp_avg" in optimizer.state[model.wte.weight]) == momentum
        assert_state(model, optimizer, torch.load(path / "expected.pt"))
        assert_family_continues(model, optimizer, momentum)


@runs_on(1, 2, 4)
def checkpoint_of_coupled_adam_loads_into_the_family() -> None:
    """DCP loads what the file has; the row moments are then zero and start at the mean of the column moments."""
    path = checkpoint("coupled-on-2-tied-True-flat-False")
    model = fsdp2(GPT(tied=True), mesh_of(dist.get_world_size()))
    optimizer = partially_coupled(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    table = model.wte.weight
    mean = full(optimizer.state[table]["exp_avg_sq"]).mean()
    assert mean > 0
    optimizer.param_groups[0]["row_exponent"] = 0.25
    checkpoints.backward(model, HALF)
    optimizer.step()
    row_avg_sq = full(optimizer.state[table]["row_avg_sq"])
    assert (row_avg_sq >= 0.999 * mean * (1 - 1e-5)).all(), row_avg_sq


@runs_on(1, 2)
def checkpoint_with_a_first_moment_loads_without_momentum_and_back() -> None:
    """DCP fills what the live optimizer has. The table's group keeps its beta1 instead of that of the file."""
    for momentum in (True, False):
        path = checkpoint(f"family-on-2-flat-False-momentum-{momentum}")
        model = fsdp2(GPT(tied=True), mesh_of(dist.get_world_size()))
        optimizer = partially_coupled(model, not momentum)
        betas = optimizer.param_groups[0]["betas"]
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        state["optimizer"]["param_groups"][0]["betas"] = betas
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        table = model.wte.weight
        assert optimizer.param_groups[0]["betas"] == betas
        assert ("exp_avg" in optimizer.state[table]) == (not momentum)
        if not momentum:
            assert not full(optimizer.state[table]["exp_avg"]).any()
        assert_close("exp_avg_sq", optimizer.state[table]["exp_avg_sq"], expected_of(path, "exp_avg_sq"))
        checkpoints.backward(model, HALF)
        optimizer.step()


@runs_on(2)
def full_state_with_a_first_moment_loads_without_momentum() -> None:
    """torch distributes only the moments that the live optimizer has; the moment of the file stays a plain tensor."""
    options = StateDictOptions(full_state_dict=True)
    model = fsdp2(GPT(tied=True), mesh_of(2))
    optimizer = partially_coupled(model)
    train(model, optimizer, range(HALF))
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    other = fsdp2(GPT(tied=True), mesh_of(2))
    live = partially_coupled(other, momentum=False)
    betas = live.param_groups[0]["betas"]
    load = functools.partial(
        set_state_dict, other, live, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )
    with pytest.raises(ValueError, match="set the file's betas in the optimizer's group"):
        load()
    optimizer_state["param_groups"][0]["betas"] = betas
    load()
    state = live.state[other.wte.weight]
    assert "exp_avg" not in state
    assert_close("exp_avg_sq", state["exp_avg_sq"], full(optimizer.state[model.wte.weight]["exp_avg_sq"]))
    checkpoints.backward(other, HALF)
    live.step()


def expected_of(path: Path, key: str) -> Tensor:
    expected: Tensor = torch.load(path / "expected.pt")[f"{key} of wte.weight"]
    return expected


@runs_on(1, 2, 4)
def adamw_state_gives_row_and_column_means() -> None:
    ranks = dist.get_world_size()
    mesh = mesh_of(ranks)
    second_moment = random_tensor(V, H, seed=5).square()
    for placement in (Shard(0), Shard(1), Replicate()):
        table, optimizer = family_table(mesh, (placement,), (V, H), **PARTIAL, vocabulary_size=11)
        adamw = torch.optim.AdamW([("table", table)])
        table.grad = place(random_tensor(V, H, seed=1), mesh, (placement,))
        adamw.step()
        adamw.state[table]["exp_avg_sq"] = place(second_moment, mesh, (placement,))
        optimizer.load_state_dict(adamw.state_dict())
        state = optimizer.state[table]
        assert_close("exp_avg_sq", state["exp_avg_sq"], second_moment[:11].mean(0, keepdim=True))
        assert_close("row_avg_sq", state["row_avg_sq"], second_moment.mean(1, keepdim=True))
        optimizer.step()
