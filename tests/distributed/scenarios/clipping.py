"""Clipping inside the step, and non-finite gradients: all ranks agree.

Legend: V vocabulary rows, H hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_

from coupled_adam import CoupledAdamW
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    H,
    V,
    assert_close,
    assert_same_parameters,
    assert_same_state,
    backward,
    full,
    mesh_of,
    place,
    random_tensor,
    runs_on,
)
from scenarios.data_parallel import fsdp2
from scenarios.placements import assert_same_on_all_ranks

IMPLEMENTATIONS = ({"foreach": False}, {"foreach": True}, {"fused": True})


@runs_on(2)
def clipping_in_the_step_equals_clip_grad_norm_before_it() -> None:
    for options in IMPLEMENTATIONS:
        for max_norm in (0.1, 1e6):
            mesh = mesh_of(dist.get_world_size())
            inside, outside = fsdp2(GPT(tied=True), mesh), fsdp2(GPT(tied=True), mesh)
            clipping = CoupledAdamW(inside, lr=LR, max_grad_norm=max_norm, **options)
            plain = CoupledAdamW(outside, lr=LR, **options)
            for step in range(STEPS):
                backward(inside, step)
                for parameter, other in zip(inside.parameters(), outside.parameters(), strict=True):
                    other.grad = parameter.grad.clone()
                clipping.step()
                norm = clip_grad_norm_(outside.parameters(), max_norm)
                plain.step()
                assert_close("grad_norm", clipping.grad_norm, norm)
                assert (norm > max_norm) == (max_norm == 0.1), f"norm {norm} makes no use of max_norm {max_norm}"
            assert_same_parameters(inside, outside)
            assert_same_state(inside, clipping, outside, plain)


def mixed_parameters(sharded: bool) -> dict[str, nn.Parameter]:
    """Tables and other parameters: plain, on a mesh of one or two dimensions; by rows, columns or both; uneven."""
    one, two = mesh_of(4), mesh_of(2, 2)
    placements = {
        "table by rows": (one, (Shard(0),)),
        "table by columns": (one, (Shard(1),)),
        "table by rows, columns": (two, (Shard(0), Shard(1))),
        "table by rows twice": (two, (_StridedShard(0, split_factor=2), Shard(0))),
        "plain table": None,
        "matrix by rows": (one, (Shard(0),)),
        "matrix by columns": (two, (Shard(1), Shard(0))),
        "plain matrix": None,
    }
    parameters = {}
    for seed, (name, placement) in enumerate(placements.items()):
        tensor = random_tensor(V, H - 1, seed=seed)  # 7 columns are also uneven
        parameters[name] = nn.Parameter(place(tensor, *placement) if sharded and placement else tensor)
    return parameters


def mixed_optimizer(parameters: dict[str, nn.Parameter], **options: Any) -> CoupledAdamW:
    tables = [(name, parameter) for name, parameter in parameters.items() if "table" in name]
    others = [(name, parameter) for name, parameter in parameters.items() if "table" not in name]
    return CoupledAdamW([{"params": tables, "coupled": True}, {"params": others}], lr=LR, **options)


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    for seed, parameter in enumerate(parameters.values()):
        gradient = random_tensor(*parameter.shape, seed=100 * (step + 1) + seed)
        if isinstance(parameter, DTensor):
            gradient = place(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


@runs_on(4)
def clipping_over_two_meshes_and_plain_tensors_equals_unsharded() -> None:
    """clip_grad_norm_ cannot do this: DTensors neither stack with those of another mesh nor mix with plain tensors."""
    for options in IMPLEMENTATIONS:
        sharded, unsharded = mixed_parameters(sharded=True), mixed_parameters(sharded=False)
        optimizer = mixed_optimizer(sharded, max_grad_norm=1.0, **options)
        reference = mixed_optimizer(unsharded, **options)
        for step in range(STEPS):
            set_gradients(sharded, step)
            set_gradients(unsharded, step)
            optimizer.step()
            norm = clip_grad_norm_(unsharded.values(), 1.0)
            reference.step()
            assert_close("grad_norm", optimizer.grad_norm, norm)
            assert_same_on_all_ranks("grad_norm", optimizer.grad_norm)
        for name, parameter in sharded.items():
            assert_close(name, parameter, unsharded[name])
            for key, value in reference.state[unsharded[name]].items():
                assert_close(f"{key} of {name}", optimizer.state[parameter][key], value)
        assert_same_on_all_ranks("plain table", sharded["plain table"].detach())
        assert_same_on_all_ranks("plain matrix", sharded["plain matrix"].detach())


def snapshot(model: nn.Module, optimizer: CoupledAdamW) -> list[Tensor]:
    """This rank's parts of all parameters, gradients and states."""
    tensors = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors]


@runs_on(2)
def nan_on_one_rank_makes_all_ranks_raise_before_anything_is_written() -> None:
    for name in ("wte.weight", "blocks.1.fc.weight"):
        for options in ({}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.1, "fused": True}):
            model = fsdp2(GPT(tied=True), mesh_of(dist.get_world_size()))
            optimizer = CoupledAdamW(model, lr=LR, error_if_nonfinite=True, **options)
            for step in range(3):
                backward(model, step)
                optimizer.step()
            backward(model, 3)
            if dist.get_rank() == 1:
                model.get_parameter(name).grad.to_local()[0, 0] = float("nan")
            before = snapshot(model, optimizer)
            try:
                optimizer.step()
            except RuntimeError as error:
                message = str(error)
            else:
                raise AssertionError(f"no error for a NaN in {name} on rank 1, {options}")
            expected = repr(name) if dist.get_rank() == 1 else "another rank"
            assert expected in message, message
            for old, new in zip(before, snapshot(model, optimizer), strict=True):
                assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)), f"written in spite of a NaN in {name}"
            _assert_next_step_is_taken(model, optimizer)


@runs_on(2)
def inf_on_one_rank_makes_grad_scaler_skip_the_step_on_all_ranks() -> None:
    for options in ({"foreach": True}, {"fused": True}, {"fused": True, "max_grad_norm": 0.1}):
        model, reference = fsdp2(GPT(tied=True), mesh_of(2)), GPT(tied=True)
        optimizer, plain = CoupledAdamW(model, lr=LR, **options), CoupledAdamW(reference, lr=LR, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            backward(model, step, scaler.scale)
            scaler.step(optimizer)
            scaler.update()
            backward(reference, step)
            plain.step()
        assert_same_parameters(model, reference)
        backward(model, 3, scaler.scale)
        if dist.get_rank() == 1:
            model.wte.weight.grad.to_local()[0, 0] = float("inf")
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, parameter.to_local()), f"written in spite of an infinite gradient, {options}"
        assert optimizer.state[model.wte.weight]["step"].item() == 3, f"counted a skipped step, {options}"
        assert scaler.get_scale() == 512.0, scaler.get_scale()
        _assert_next_step_is_taken(model, optimizer)


def _assert_next_step_is_taken(model: nn.Module, optimizer: CoupledAdamW) -> None:
    """Assert that the ranks still agree, and that no value became non-finite."""
    table = full(model.wte.weight).clone()
    backward(model, 4)
    optimizer.step()
    assert torch.isfinite(full(model.wte.weight)).all()
    assert not torch.equal(full(model.wte.weight), table)
