"""Runs that switch between AdamW and Coupled Adam in the middle, with sharded state.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups
from coupled_adam.optimizer.reference import ReferenceState, reference_step
from scenarios.checkpoints import HALF, checkpoint, load, save
from scenarios.collectives import watched
from scenarios.common import (
    GPT,
    LR,
    H,
    V,
    assert_close,
    backward,
    full,
    mesh_of,
    place,
    random_tensor,
    runs_on,
    train,
)
from scenarios.data_parallel import fsdp2
from scenarios.placements import Placements, meshes_and_placements, placements_of_one_row


def adamw_baseline(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model, weight_decay=0.1, couple="none"), lr=LR)


def reference_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> ReferenceState:
    """The state of an unsharded run, for the oracle."""
    state = optimizer.state[parameter]
    second_moment = state["exp_avg_sq"].double().expand_as(parameter)
    t = int(state["step"].item())
    return ReferenceState(parameter.detach().double(), state["exp_avg"].double(), second_moment, t)


def assert_next_step_is_coupled(model: nn.Module, optimizer: CoupledAdamW) -> None:
    """Take step HALF + 1 of a run whose first half used AdamW; the tables must follow the oracle."""
    reference = GPT(tied=False)
    adamw = adamw_baseline(reference)
    train(reference, adamw, range(HALF))
    tables = ("wte.weight", "lm_head.weight")
    oracle = {name: reference_state(reference.get_parameter(name), adamw) for name in tables}
    for name in tables:
        averaged = optimizer.state[model.get_parameter(name)]["exp_avg_sq"]
        assert tuple(averaged.shape) == (1, H), averaged.shape
        assert_close(f"exp_avg_sq of {name}", averaged, oracle[name].second_moment.mean(dim=0, keepdim=True))
    backward(model, HALF)
    backward(reference, HALF)
    optimizer.step()
    adamw.step()
    for name, parameter in reference.named_parameters():
        is_table = name in oracle
        expected = reference_step(oracle[name], parameter.grad, lr=LR).embeddings if is_table else parameter
        assert_close(name, model.get_parameter(name), expected)


@runs_on(2)
def adamw_checkpoint_is_saved() -> None:
    model = fsdp2(GPT(tied=False), mesh_of(2))
    adamw = adamw_baseline(model)
    train(model, adamw, range(HALF))
    save(checkpoint("adamw"), model, adamw, StateDictOptions())


@runs_on(1, 2, 4)
def adamw_checkpoint_continues_coupled_through_a_temporary_adamw() -> None:
    model = fsdp2(GPT(tied=False), mesh_of(dist.get_world_size()))
    adamw = adamw_baseline(model)
    load(checkpoint("adamw"), model, adamw, StateDictOptions())
    optimizer = CoupledAdamW(model, lr=LR, weight_decay=0.1, couple="all")
    with watched() as events:
        optimizer.load_state_dict(adamw.state_dict())
    assert events.elements == [2 * H], f"{events.elements}, expected one all-reduce for both tables"
    for table in (model.wte.weight, model.lm_head.weight):
        exp_avg_sq = optimizer.state[table]["exp_avg_sq"]
        assert isinstance(exp_avg_sq, DTensor), type(exp_avg_sq)
        assert exp_avg_sq.placements == (Replicate(),), exp_avg_sq.placements
    assert_next_step_is_coupled(model, optimizer)


@runs_on(2)
def full_adamw_state_dict_continues_coupled_directly() -> None:
    """A full state dict has its own shapes, so no temporary AdamW is needed."""
    model = fsdp2(GPT(tied=False), mesh_of(2))
    adamw = adamw_baseline(model)
    train(model, adamw, range(HALF))
    options = StateDictOptions(full_state_dict=True)
    state_dict = get_optimizer_state_dict(model, adamw, options=options)
    optimizer = CoupledAdamW(model, lr=LR, weight_decay=0.1, couple="all")
    model.zero_grad()  # if gradients remain, DCP does not initialize the state of an optimizer
    set_optimizer_state_dict(model, optimizer, state_dict, options=options)
    assert_next_step_is_coupled(model, optimizer)


def trained_table(
    mesh: DeviceMesh, placements: Placements, kind: type[torch.optim.AdamW], **group: object
) -> tuple[nn.Parameter, torch.optim.AdamW]:
    """A table and its optimizer after three steps; the same gradients for every optimizer and placement."""
    table = nn.Parameter(place(random_tensor(V, H, seed=0), mesh, placements))
    optimizer = kind([{"params": [("table", table)], **group}], lr=LR, weight_decay=0.0)
    for step in range(1, 4):
        table.grad = place(random_tensor(V, H, seed=step), mesh, placements)
        optimizer.step()
    return table, optimizer


def next_embeddings(optimizer: torch.optim.Optimizer, table: nn.Parameter, *, coupled: bool) -> torch.Tensor:
    """The table after the oracle's step with the fourth gradient."""
    state = optimizer.state[table]
    second_moment = full(state["exp_avg_sq"]).double().expand(V, H)
    before = ReferenceState(full(table).double(), full(state["exp_avg"]).double(), second_moment, 3)
    return reference_step(before, random_tensor(V, H, seed=4), lr=LR, coupled=coupled).embeddings


@runs_on(2, 4)
def second_moment_of_adamw_is_averaged_under_any_placement() -> None:
    for mesh, placements in meshes_and_placements():
        table, adamw = trained_table(mesh, placements, torch.optim.AdamW)
        expected = next_embeddings(adamw, table, coupled=True)
        coupled = CoupledAdamW([{"params": [("table", table)], "coupled": True}], lr=LR, weight_decay=0.0)
        for state_dict in (adamw.state_dict(), convert_state_dict(adamw.state_dict(), coupled)):
            coupled.load_state_dict(state_dict)
            exp_avg_sq = coupled.state[table]["exp_avg_sq"]
            mean = full(adamw.state[table]["exp_avg_sq"]).mean(dim=0, keepdim=True)
            assert_close(f"exp_avg_sq {placements}", exp_avg_sq, mean)
            assert exp_avg_sq.placements == placements_of_one_row(placements), f"{exp_avg_sq.placements}"
        table.grad = place(random_tensor(V, H, seed=4), mesh, placements)
        coupled.step()
        assert_close(f"table {placements}", table, expected)


@runs_on(2, 4)
def coupled_second_moment_is_repeated_for_adamw_under_any_placement() -> None:
    for mesh, placements in meshes_and_placements():
        table, coupled = trained_table(mesh, placements, CoupledAdamW, coupled=True)
        expected = next_embeddings(coupled, table, coupled=False)
        adamw = torch.optim.AdamW([("table", table)], lr=LR, weight_decay=0.0)
        adamw.load_state_dict(convert_state_dict(coupled.state_dict(), adamw))
        repeated, row = adamw.state[table]["exp_avg_sq"], coupled.state[table]["exp_avg_sq"]
        assert repeated.placements == placements, f"{repeated.placements}, expected {placements}"
        assert torch.equal(full(repeated), full(row).expand(V, H)), f"rows differ, {placements}"
        table.grad = place(random_tensor(V, H, seed=4), mesh, placements)
        adamw.step()
        assert_close(f"table {placements}", table, expected)


@runs_on(2)
def coupled_run_of_fsdp2_goes_on_with_adamw() -> None:
    model = fsdp2(GPT(tied=True), mesh_of(2))
    coupled = CoupledAdamW(model, lr=LR, weight_decay=0.1)
    train(model, coupled, range(HALF))
    reference = GPT(tied=True)
    coupled_reference = CoupledAdamW(reference, lr=LR, weight_decay=0.1)
    train(reference, coupled_reference, range(HALF))
    before = reference_state(reference.wte.weight, coupled_reference)

    adamw = adamw_baseline(model)
    adamw.load_state_dict(convert_state_dict(coupled.state_dict(), adamw))
    backward(model, HALF)
    backward(reference, HALF)
    adamw.step()
    expected = reference_step(before, reference.wte.weight.grad, lr=LR, coupled=False)
    assert_close("wte.weight", model.wte.weight, expected.embeddings)
