"""torch's ZeroRedundancyOptimizer: every rank updates some complete parameters and sends them to the others."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from coupled_adam import CoupledAdamW, param_groups
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    assert_close,
    assert_same_parameters,
    backward,
    runs_on,
)


def groups_of(model: nn.Module, couple: str = "output") -> list[dict[str, Any]]:
    """The groups without parameter names, which ZeRO does not accept."""
    groups = param_groups(model, weight_decay=0.1, couple=couple)
    return [group | {"params": [parameter for _, parameter in group["params"]]} for group in groups]


def zero(model: nn.Module, couple: str = "output", **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(groups_of(model, couple), optimizer_class=CoupledAdamW, lr=LR, **options)


def ranks_with_tables(optimizer: ZeroRedundancyOptimizer) -> list[bool]:
    holds = any(group["coupled"] and group["params"] for group in optimizer.optim.param_groups)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, holds)
    return every


@runs_on(2)
def zero_equals_single_process() -> None:
    """Even if one rank has all tables and the other none."""
    for tied, couple, options in (
        (True, "output", {}),
        (False, "output", {"parameters_as_bucket_view": True}),
        (False, "all", {}),
        (True, "output", {"fused": True}),
    ):
        model, reference = GPT(tied=tied), GPT(tied=tied)
        wrapped = DistributedDataParallel(model)
        optimizer = zero(model, couple, **options)
        plain = CoupledAdamW(reference, lr=LR, weight_decay=0.1, couple=couple, fused=options.get("fused"))
        if couple == "output":
            assert sorted(ranks_with_tables(optimizer)) == [False, True], ranks_with_tables(optimizer)
        for step in range(STEPS):
            backward(wrapped, step)
            optimizer.step()
            backward(reference, step)
            plain.step()
        assert_same_parameters(model, reference)


@runs_on(2)
def zero_with_clip_grad_norm_before_it_equals_clipping_in_the_step() -> None:
    """The alternative that the refusal of max_grad_norm suggests."""
    model, reference = GPT(tied=True), GPT(tied=True)
    wrapped = DistributedDataParallel(model)
    optimizer, plain = zero(model), CoupledAdamW(reference, lr=LR, weight_decay=0.1, max_grad_norm=0.1)
    for step in range(STEPS):
        backward(wrapped, step)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        backward(reference, step)
        plain.step()
        assert_close("grad_norm", plain.grad_norm, norm)
    assert_same_parameters(model, reference)


@runs_on(2)
def zero_refuses_the_norm_of_one_rank_on_every_rank() -> None:
    assert_refused(lambda: zero(GPT(tied=True), max_grad_norm=1.0))
    assert_refused(lambda: zero(GPT(tied=False), max_grad_norm=1.0))
    assert_refused(lambda: zero(GPT(tied=True), error_if_nonfinite=True))
    partial = functools.partial(CoupledAdamW, max_grad_norm=1.0)
    assert_refused(lambda: ZeroRedundancyOptimizer(groups_of(GPT(tied=True)), optimizer_class=partial))
    optimizer = zero(GPT(tied=True))
    assert_refused(lambda: setattr(optimizer.optim, "max_grad_norm", 1.0))
    assert_refused(lambda: setattr(optimizer.optim, "error_if_nonfinite", True))
    # Outside of ZeRO nothing changes, even after a ZeRO optimizer was built.
    assert CoupledAdamW(GPT(tied=True), max_grad_norm=1.0).max_grad_norm == 1.0


def assert_refused(action: Callable[[], object]) -> None:
    try:
        action()
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError("no error")
    assert "ZeroRedundancyOptimizer" in message, message
    assert "clip_grad_norm_" in message, message
