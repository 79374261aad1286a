"""First moments in bfloat16 on several ranks: bits do not depend on the rank, also after loading a checkpoint."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference_rounding import rounded_table
from scenarios.checkpoints import checkpoint, load, save
from scenarios.common import GPT, LR, H, V, backward, full, mesh_of, place, random_tensor, runs_on
from scenarios.data_parallel import fsdp2
from scenarios.placements import meshes_and_placements
from scenarios.zero_redundancy import ranks_with_tables, zero

MEMBERS: tuple[dict[str, Any], ...] = ({}, {"row_exponent": 0.25}, {"row_exponent": 0.25, "mean_free": True})
STATE: dict[str, Any] = {"state_dtype": torch.bfloat16, "state_seed": 3}


@runs_on(2, 4)
def moments_under_any_placement_have_the_bits_of_the_literal_rounding() -> None:
    # With one row or column fewer than ranks, one of four ranks has none.
    for shape, (mesh, placements) in itertools.product([(V, H), (3, 3)], meshes_and_placements()):
        for member in MEMBERS:
            table = nn.Parameter(place(random_tensor(*shape, seed=0), mesh, placements))
            group = {"params": [("table", table)], "coupled": True}
            optimizer = CoupledAdamW([group], lr=LR, betas=(0.5, 0.9), **STATE, **member)
            for step in (1, 2):
                gradient = random_tensor(*shape, seed=step)
                # From a moment of 0, half of twice the gradient is exactly the gradient.
                if step == 2:
                    optimizer.state[table]["exp_avg"].zero_()
                table.grad = place(2 * gradient, mesh, placements)
                optimizer.step()
                moment = optimizer.state[table]["exp_avg"]
                assert moment.dtype == torch.bfloat16, moment.dtype
                assert moment.placements == table.placements, moment.placements
                expected = rounded_table(gradient, seed=3, table=0, step=step)
                assert torch.equal(full(moment).double(), expected), f"{placements} {shape} {member}"


@runs_on(2)
def tables_under_zero_have_the_bits_of_a_single_process() -> None:
    model, reference = GPT(tied=False), GPT(tied=False)
    optimizer = zero(model, couple="all", **STATE)
    plain = CoupledAdamW(reference, lr=LR, weight_decay=0.1, couple="all", **STATE)
    assert any(ranks_with_tables(optimizer))
    for step in range(2):
        for each in (model, reference):
            backward(each, step)
        optimizer.step()
        plain.step()
    expected = moments(reference, plain)
    mine = {p for group in optimizer.optim.param_groups if group["coupled"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in mine:
            moment = optimizer.optim.state[parameter]["exp_avg"]
            assert moment.dtype == torch.bfloat16, moment.dtype
            assert torch.equal(moment, expected[name]), name


def steps(model: nn.Module, optimizer: CoupledAdamW, numbers: range) -> None:
    """The same gradients on every rank: those of an unsharded model."""
    for step in numbers:
        reference = GPT(tied=False)
        backward(reference, step)
        for (_, parameter), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert other.grad is not None
            is_sharded = hasattr(parameter, "placements")
            gradient = place(other.grad, parameter.device_mesh, parameter.placements) if is_sharded else other.grad
            parameter.grad = gradient
        optimizer.step()


def rounded(model: nn.Module) -> CoupledAdamW:
    return CoupledAdamW(model, lr=LR, couple="all", **STATE)


def moments(model: nn.Module, optimizer: CoupledAdamW) -> dict[str, torch.Tensor]:
    return {name: full(optimizer.state[p]["exp_avg"]).clone() for name, p in model.named_parameters()}


@runs_on(2)
def checkpoint_with_rounded_moments_is_saved() -> None:
    model = fsdp2(GPT(tied=False), mesh_of(2))
    optimizer = rounded(model)
    steps(model, optimizer, range(2))
    for flat in (False, True):
        save(checkpoint(f"rounded-{flat}"), model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))


@runs_on(1, 2, 4)
def checkpoint_with_rounded_moments_continues_with_the_bits_of_a_run_that_was_never_stopped() -> None:
    whole = GPT(tied=False)
    whole_optimizer = rounded(whole)
    steps(whole, whole_optimizer, range(4))
    expected = moments(whole, whole_optimizer)
    for flat in (False, True):
        model = fsdp2(GPT(tied=False), mesh_of(dist.get_world_size()))
        # The seed is that of the checkpoint.
        optimizer = CoupledAdamW(model, lr=LR, couple="all", state_dtype=torch.bfloat16, state_seed=99)
        load(checkpoint(f"rounded-{flat}"), model, optimizer, StateDictOptions(flatten_optimizer_state_dict=flat))
        steps(model, optimizer, range(2, 4))
        found = moments(model, optimizer)
        for name, moment in expected.items():
            assert found[name].dtype == moment.dtype, (name, found[name].dtype)
            assert torch.equal(found[name], moment), f"{name}, flat {flat}"
        assert {found[name].dtype for name in ("wte.weight", "lm_head.weight")} == {torch.bfloat16}
