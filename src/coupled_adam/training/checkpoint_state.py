"""The tensors that make up the state of a training run, by name, so that they can be saved and filled in place.

model.<parameter>               weights and buffers, tied ones once
optimizer.<parameter>.<key>     exp_avg, exp_avg_sq, row_avg_sq, step, momentum_buffer, ...
rng.cpu, rng.cuda               torch's random number generators, as bytes
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from coupled_adam.base.errors import UserError
from coupled_adam.optimizer.inventory import plain_name

RNG = "rng."


def training_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """The state of a training run by name: what a checkpoint saves, and what loading fills in place.

    The same on every rank, with DTensors where the model is sharded. Names are those of the model without what DDP and
    torch.compile add to them, so that a checkpoint fits the model however it is wrapped. All share memory with the
    model and the optimizers, except for the state of the random number generators, which is a copy: take the tensors
    anew for every save.

    Args:
        model: a model of any parallelism, between two steps.
        optimizers: all optimizers of its parameters; see :func:`make_optimizer_state`.

    Returns:
        Tensors by name.

    Example:
        >>> model = nn.Linear(3, 2, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> make_optimizer_state([optimizer])
        >>> sorted(training_tensors(model, [optimizer]))
        ['model.weight', 'optimizer.weight.momentum_buffer', 'rng.cpu']
    """
    names: dict[Tensor, str] = {}
    # Not named_parameters: after an evaluation FSDP2 shows gathered weights there; state_dict shards them again.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name!r} in the state of the model is a {type(tensor).__name__}, expected tensors only")
        names.setdefault(tensor, plain_name(name))
    tensors = {f"model.{name}": tensor.detach() for tensor, name in names.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if parameter not in names:
                raise UserError("the optimizer has a parameter that is not in the model; build it from this model")
            for key, value in state.items():
                tensors |= _state_tensor(f"optimizer.{names[parameter]}.{key}", value)
    device = next(model.parameters()).device
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def make_optimizer_state(optimizers: Iterable[Optimizer]) -> None:
    """Give fresh optimizers the state they would make at their first step, so that a checkpoint can be loaded into it.

    Parameters and existing state are not touched, and no gradient, step or message between ranks is needed. Call it for
    new runs too: a checkpoint then has the same names from step 0 on, and the first step gives the same.

    Args:
        optimizers: AdamW, CoupledAdamW or SGD.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            fresh = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"] != 0:
                    for p in fresh:
                        optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)
            elif isinstance(optimizer, torch.optim.Adam):  # AdamW and CoupledAdamW are Adams
                _make_adam_state(optimizer, {**group, "params": fresh})
            else:
                raise UserError(
                    f"cannot prepare the state of {type(optimizer).__name__} for loading; "
                    "use torch.optim.AdamW, torch.optim.SGD or CoupledAdamW"
                )


def restore_generators(tensors: Mapping[str, Tensor]) -> None:
    """Set torch's random number generators to the states among the tensors."""
    if "rng.cpu" in tensors:
        torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])


def _make_adam_state(optimizer: torch.optim.Adam, group: dict[str, Any]) -> None:
    """Let the optimizer make its state as `step` would, with the flags of the group deciding where counters live."""
    gradients = [p.grad for p in group["params"]]
    try:
        for p in group["params"]:
            p.grad = p.detach()  # it only has to be there; it takes no memory and is not looked into
        optimizer._init_group(group, [], [], [], [], [], [])
    finally:
        for p, gradient in zip(group["params"], gradients, strict=True):
            p.grad = gradient


def _state_tensor(name: str, value: object) -> dict[str, Tensor]:
    if value is None:  # SGD without momentum
        return {}
    if not isinstance(value, Tensor):
        raise UserError(f"{name} is a {type(value).__name__}, expected tensors only in the state of an optimizer")
    return {name: value.detach()}
