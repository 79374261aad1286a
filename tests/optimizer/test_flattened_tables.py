"""Tables flattened by a framework, and state created by a hook, are refused with the reason.

tests/distributed/scenarios/flattened.py tests FSDP1 itself, tests/docs/test_framework_deepspeed.py DeepSpeed.
"""

import pytest
import torch
from torch import Tensor, nn

from coupled_adam import CoupledAdamW


def model() -> nn.Module:
    return nn.ModuleDict({"embedding": nn.Embedding(11, 4), "block": nn.Linear(4, 4), "head": nn.Linear(4, 11)})


def flatten_groups(optimizer: torch.optim.Optimizer) -> None:
    """Replace all tensors of a group by one flat partition and keep their names, as DeepSpeed ZeRO does."""
    for group in optimizer.param_groups:
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]))
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]


@pytest.mark.parametrize("names", [["head.weight"], ["head.weight", "embedding.weight"]], ids=["one table", "two"])
def test_partitions_of_deepspeed_are_refused_before_anything_is_written(names: list[str]) -> None:
    optimizer = CoupledAdamW(model(), couple=names)
    flatten_groups(optimizer)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO.*fully_shard.*stage 0") as raised:
        optimizer.step()
    assert all(repr(name) in str(raised.value) for name in names)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_the_error_for_flattened_parameters_without_a_coupled_group_names_fsdp1() -> None:
    """It does not suggest passing the model, which would be refused too."""
    flat = nn.Parameter(torch.zeros(12))
    flat._fsdp_flattened = True  # FSDP1 marks its flat parameters with this attribute
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        CoupledAdamW([nn.Parameter(torch.zeros(2)), flat])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_second_moment_is_refused_in_a_coupled_group(dtype: torch.dtype) -> None:
    """A hook that creates AdamW's state before the first step would turn off the coupling."""

    def make_state(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                moments: dict[str, Tensor] = {
                    key: torch.zeros_like(p, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")
                }
                optimizer.state[p] = {"step": torch.tensor(0.0), **moments}

    table = nn.Parameter(torch.ones(3, 2))
    optimizer = CoupledAdamW([{"params": [("head.weight", table)], "coupled": True}])
    optimizer.register_step_pre_hook(make_state)
    table.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"'head\.weight'.*\(3, 2\).*\(1, 2\)"):
        optimizer.step()
    assert torch.equal(table, torch.ones(3, 2))
