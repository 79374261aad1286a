"""Groups that are not coupled are bitwise equal to torch's AdamW, even with mixed kinds of tensors in one group."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from coupled_adam import CoupledAdamW
from scenarios.clipping import IMPLEMENTATIONS, set_gradients
from scenarios.common import LR, STEPS, H, V, assert_close, full, mesh_of, place, random_tensor, runs_on


def kinds() -> dict[str, dict[str, nn.Parameter]]:
    """Plain tensors, DTensors on one mesh, DTensors on another; torch.optim.AdamW needs a group for each."""
    one, two = mesh_of(4), mesh_of(2, 2)
    shapes = {"matrix": (V, H), "vector": (H + 1,)}
    tensors = {name: random_tensor(*shape, seed=len(name)) for name, shape in shapes.items()}
    return {
        "plain": {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()},
        "one": {name: nn.Parameter(place(tensor, one, (Shard(0),))) for name, tensor in tensors.items()},
        "two": {name: nn.Parameter(place(tensor, two, (Replicate(), Shard(0)))) for name, tensor in tensors.items()},
    }


@runs_on(4)
def group_of_plain_tensors_and_two_meshes_equals_adamw_bitwise() -> None:
    for options in ({}, *IMPLEMENTATIONS):
        mixed, apart = kinds(), kinds()
        table = nn.Parameter(random_tensor(V, H, seed=0))
        everything = [parameter for parameters in mixed.values() for parameter in parameters.values()]
        groups = [{"params": [table], "coupled": True}, {"params": everything}]
        coupled = CoupledAdamW(groups, lr=LR, weight_decay=0.1, **options)
        adamw = {
            kind: torch.optim.AdamW(parameters.values(), lr=LR, weight_decay=0.1, **options)
            for kind, parameters in apart.items()
        }
        for step in range(STEPS):
            table.grad = random_tensor(V, H, seed=step)
            for kind in apart:
                set_gradients(mixed[kind], step)
                set_gradients(apart[kind], step)
                adamw[kind].step()
            coupled.step()
        for kind, parameters in apart.items():
            for name, expected in parameters.items():
                found = mixed[kind][name]
                _assert_equal(f"{kind} {name} {options}", found, expected)
                for key, value in adamw[kind].state[expected].items():
                    _assert_equal(f"{key} of {kind} {name} {options}", coupled.state[found][key], value)


@runs_on(2)
def gradients_placed_unlike_their_parameter_are_redistributed() -> None:
    """Gradients as with tensor parallelism: replicated for sharded parameters, partial for norms (SequenceParallel)."""
    mesh = mesh_of(2)
    for options in (*IMPLEMENTATIONS, *({"max_grad_norm": 0.1, **each} for each in IMPLEMENTATIONS)):
        sharded = {
            "table": nn.Parameter(place(random_tensor(V, H, seed=0), mesh, (Shard(0),))),
            "matrix": nn.Parameter(place(random_tensor(V, H, seed=1), mesh, (Shard(1),))),
            "norm": nn.Parameter(place(random_tensor(H, seed=2), mesh, (Replicate(),))),
        }
        unsharded = {name: nn.Parameter(full(parameter).clone()) for name, parameter in sharded.items()}
        optimizer, reference = (
            CoupledAdamW([{"params": [table], "coupled": True}, {"params": others}], lr=LR, **options)
            for table, *others in (sharded.values(), unsharded.values())
        )
        for step in range(STEPS):
            set_gradients(unsharded, step)
            for name, parameter in sharded.items():
                gradient = unsharded[name].grad.clone()
                if name == "norm":  # each rank has seen some of the tokens
                    share = gradient * (0.25 if dist.get_rank() == 0 else 0.75)
                    parameter.grad = DTensor.from_local(share, mesh, (Partial(),))
                else:
                    parameter.grad = place(gradient, mesh, (Replicate(),))
            optimizer.step()
            reference.step()
            if "max_grad_norm" in options:
                assert_close("grad_norm", optimizer.grad_norm, reference.grad_norm)
        for name, parameter in sharded.items():
            assert_close(f"{name} {options}", parameter, unsharded[name])


def _assert_equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(found) is type(expected), f"{what} is a {type(found)}"
    if isinstance(expected, DTensor):
        assert found.placements == expected.placements, f"{what} is placed {found.placements}"
        found, expected = found.to_local(), expected.to_local()
    assert torch.equal(found, expected), f"{what} is not that of torch.optim.AdamW"
