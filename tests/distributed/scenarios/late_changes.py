"""Models sharded after their optimizer was built, and gradients whose squares overflow float32."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from coupled_adam import CoupledAdamW
from scenarios.clipping import mixed_optimizer, mixed_parameters, set_gradients
from scenarios.common import (
    GPT,
    LR,
    assert_close,
    backward,
    mesh_of,
    runs_on,
)
from scenarios.data_parallel import fsdp2


def warnings_of_a_step(model: nn.Module, optimizer: CoupledAdamW, step: int) -> list[str]:
    backward(model, step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught if "no coupled table" in str(warning.message)]


@runs_on(1, 2)
def tables_sharded_after_the_optimizer_was_built_are_warned_of_once_on_every_rank() -> None:
    model = GPT(tied=False)
    optimizer = CoupledAdamW(model, lr=LR)
    fully_shard(model.lm_head, mesh=mesh_of(dist.get_world_size()))
    said = [text for step in range(3) for text in warnings_of_a_step(model, optimizer, step)]
    assert len(said) == 1, said
    assert "'lm_head.weight'" in said[0], said
    assert "fully_shard" in said[0], said


@runs_on(1, 2, 4)
def sharded_tables_are_never_warned_of() -> None:
    """Also on ranks whose part of the table is empty."""
    for vocabulary in (13, 3):
        model = fsdp2(GPT(tied=True, vocabulary=vocabulary), mesh_of(dist.get_world_size()))
        optimizer = CoupledAdamW(model, lr=LR)
        said = [text for step in range(2) for text in warnings_of_a_step(model, optimizer, step)]
        assert said == [], said


@runs_on(4)
def huge_gradients_of_sharded_parameters_equal_unsharded_ones() -> None:
    """Their squares overflow float32, on each rank or only in the sum over all."""
    for size in (3e18, 1e20):
        for options in ({}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "fused": True}):
            sharded, unsharded = mixed_parameters(sharded=True), mixed_parameters(sharded=False)
            optimizer, reference = mixed_optimizer(sharded, **options), mixed_optimizer(unsharded, **options)
            for step in range(3):
                for parameters in (sharded, unsharded):
                    set_gradients(parameters, step)
                    if step == 0:
                        for parameter in parameters.values():
                            parameter.grad *= size
                optimizer.step()
                reference.step()
                if options:
                    assert_close("grad_norm", optimizer.grad_norm, reference.grad_norm)
                    assert torch.isfinite(optimizer.grad_norm)
            for name, parameter in sharded.items():
                assert torch.isfinite(unsharded[name]).all(), name
                assert_close(name, parameter, unsharded[name])
                for key, value in reference.state[unsharded[name]].items():
                    assert_close(f"{key} of {name}", optimizer.state[parameter][key], value)
