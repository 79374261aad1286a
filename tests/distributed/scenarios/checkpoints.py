"""torch.distributed.checkpoint: other ranks load a checkpoint, and training continues as if uninterrupted.

The launches run in the order 2, 4, 1 ranks, so each can load the checkpoints of earlier ones.
"""

import copy
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from coupled_adam import CoupledAdamW
from scenarios.common import GPT, LR, STEPS, assert_same_parameters, backward, full, mesh_of, runs_on, train
from scenarios.data_parallel import fsdp2
from scenarios.tensor_parallel import BY_COLUMNS, BY_ROWS, fsdp2_over_tensor_parallel

HALF = STEPS // 2
PLANS = {"by-rows": BY_ROWS, "by-columns": BY_COLUMNS}


def checkpoint(name: str) -> Path:
    """The path of a checkpoint; all launches of one test session share the folder."""
    return Path(os.environ["CHECKPOINTS"]) / name


def coupled(model: nn.Module) -> CoupledAdamW:
    return CoupledAdamW(model, lr=LR, weight_decay=0.1, couple="all", max_grad_norm=0.5)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    expected = whole_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, path / "expected.pt")
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All parameters and their states, unsharded."""
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = full(parameter).clone()
        state |= {f"{key} of {name}": full(value).clone() for key, value in optimizer.state[parameter].items()}
    return state


def assert_state(model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, torch.Tensor]) -> None:
    found = whole_state(model, optimizer)
    assert found.keys() == expected.keys(), found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name} is not what was saved"


def assert_continues(model: nn.Module, optimizer: torch.optim.Optimizer, tied: bool) -> None:
    """Train the second half, and compare with an uninterrupted unsharded model."""
    train(model, optimizer, range(HALF, STEPS))
    reference = GPT(tied=tied)
    train(reference, coupled(reference))
    assert_same_parameters(model, reference)


def assert_checkpoint_continues(saved_on: int) -> None:
    ranks = dist.get_world_size()
    for tied, flat in itertools.product((True, False), (False, True)):
        path = checkpoint(f"coupled-on-{saved_on}-tied-{tied}-flat-{flat}")
        models = [fsdp2(GPT(tied=tied), mesh_of(ranks))]
        if ranks == 1:
            models.append(GPT(tied=tied))
        for model in models:
            optimizer = coupled(model)
            load(path, model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
            assert_state(model, optimizer, torch.load(path / "expected.pt"))
            assert_continues(model, optimizer, tied)


@runs_on(2, 4)
def checkpoints_are_saved() -> None:
    ranks = dist.get_world_size()
    for tied in (True, False):
        model = fsdp2(GPT(tied=tied), mesh_of(ranks))
        optimizer = coupled(model)
        train(model, optimizer, range(HALF))
        for flat in (False, True):
            path = checkpoint(f"coupled-on-{ranks}-tied-{tied}-flat-{flat}")
            save(path, model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
        assert_continues(model, optimizer, tied)


@runs_on(1, 2, 4)
def checkpoint_of_2_ranks_continues() -> None:
    assert_checkpoint_continues(saved_on=2)


@runs_on(1, 4)
def checkpoint_of_4_ranks_continues() -> None:
    assert_checkpoint_continues(saved_on=4)


@runs_on(4)
def checkpoint_of_fsdp2_over_tensor_parallel_is_saved() -> None:
    mesh = mesh_of(2, 2)
    for name, plan in PLANS.items():
        model = fsdp2_over_tensor_parallel(plan, mesh)
        optimizer = coupled(model)
        train(model, optimizer, range(HALF))
        save(checkpoint(name), model, optimizer, StateDictOptions())


@runs_on(1, 4)
def checkpoint_of_fsdp2_over_tensor_parallel_is_loaded() -> None:
    """Not continued: the parallel forward pass rounds differently."""
    ranks = dist.get_world_size()
    for name, plan in PLANS.items():
        models = [fsdp2(GPT(tied=False), mesh_of(ranks)), GPT(tied=False)]
        if ranks == 4:
            models.append(fsdp2_over_tensor_parallel(plan, mesh_of(2, 2)))
        for model in models:
            optimizer = coupled(model)
            load(checkpoint(name), model, optimizer, StateDictOptions())
            assert_state(model, optimizer, torch.load(checkpoint(name) / "expected.pt"))


@runs_on(2)
def full_state_dict_continues() -> None:
    """From all ranks to all ranks, and from rank 0 alone by broadcast, sharded to sharded and to unsharded.

    Not by set_state_dict: on ranks whose model state is empty it loads the optimizer only, while rank 0 waits for
    them to receive the model (torch 2.13).
    """
    ranks = dist.get_world_size()
    model = fsdp2(GPT(tied=True), mesh_of(ranks))
    optimizer = coupled(model)
    train(model, optimizer, range(HALF))
    for on_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=on_rank_0)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        assert bool(model_state) == bool(optimizer_state) == (dist.get_rank() == 0 or not on_rank_0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=on_rank_0)
        for other in (fsdp2(GPT(tied=True), mesh_of(ranks)), GPT(tied=True)):
            other_optimizer = coupled(other)
            # Copied, because torch shards the given dict in place, and because on the CPU cpu_offload=True leaves plain
            # tensors such as `step` those of the optimizer.
            set_model_state_dict(other, copy.deepcopy(model_state), options=options)
            set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(optimizer_state), options=options)
            assert_continues(other, other_optimizer, tied=True)


@runs_on(2)
def loading_does_not_touch_the_options_of_groups() -> None:
    """DCP initializes an empty state with a step of learning rate 0; afterwards the groups must be as before."""
    model = fsdp2(GPT(tied=True), mesh_of(2))
    optimizer = coupled(model)
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    load(checkpoint("coupled-on-2-tied-True-flat-False"), model, optimizer, StateDictOptions())
    after = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert before == after, f"{before}\n{after}"
    assert optimizer.defaults["max_grad_norm"] == 0.5, optimizer.defaults
    backward(model, 0)
    optimizer.step()
    assert optimizer.state[model.wte.weight]["step"].item() == HALF + 1
