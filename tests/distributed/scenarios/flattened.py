"""FSDP1 shards flattened parameters: every such setup is refused before anything is written."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from coupled_adam import CoupledAdamW, hidden_matrices, param_groups
from scenarios.common import GPT, LR, assert_close, backward, runs_on, train


def fsdp1(model: nn.Module, use_orig_params: bool, **options: object) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of NO_SHARD
        return FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **options
        )


def assert_refused(build_or_step: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"(?s)FSDP1.*fully_shard"):
        build_or_step()


@runs_on(2)
def models_and_parameters_of_fsdp1_are_refused() -> None:
    for use_orig_params in (False, True):
        for tied in (False, True):
            model = fsdp1(GPT(tied=tied), use_orig_params)
            assert {p.dim() for p in model.parameters()} == {1}
            for build in (CoupledAdamW, param_groups, hidden_matrices):
                assert_refused(lambda build=build, model=model: build(model))
            assert_refused(lambda model=model: CoupledAdamW(model.parameters()))
            assert_refused(lambda model=model: CoupledAdamW([{"params": model.parameters(), "coupled": True}]))


@runs_on(2)
def a_model_wrapped_by_fsdp1_after_its_optimizer_was_built_is_refused_at_the_step() -> None:
    """With use_orig_params=True the optimizer's own tensors become one-dimensional parts, empty on some ranks."""
    model = GPT(tied=False)
    optimizer = CoupledAdamW(model, lr=LR)
    wrapped = fsdp1(model, use_orig_params=True)
    backward(wrapped, 0)
    before = [p.detach().clone() for p in model.parameters()]
    assert_refused(optimizer.step)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@runs_on(2)
def parameters_that_fsdp1_has_replaced_never_get_a_gradient() -> None:
    """With use_orig_params=False, the tensors of an earlier optimizer are no longer in the model, as in torch.optim."""
    model = GPT(tied=False)
    optimizer = CoupledAdamW(model, lr=LR)
    train(fsdp1(model, use_orig_params=False), optimizer, range(2))
    assert not any(optimizer.state.values())
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])


@runs_on(2)
def fsdp1_that_shards_nothing_trains_like_one_rank() -> None:
    """NO_SHARD keeps the tables two-dimensional, so an optimizer built before still works exactly."""
    model, reference = GPT(tied=True), GPT(tied=True)
    optimizer, reference_optimizer = CoupledAdamW(model, lr=LR), CoupledAdamW(reference, lr=LR)
    train(fsdp1(model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD), optimizer)
    train(reference, reference_optimizer)
    assert_close("wte.weight", model.wte.weight, reference.wte.weight)
