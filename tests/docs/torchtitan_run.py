"""torchtitan's optimizer container with CoupledAdamW on its llama3 debug model, alone or with FSDP2 on two ranks.

The gradients are made up and the same on all ranks, because a forward pass needs flex attention, which is slow on a
CPU. The reference is the float64 Algorithm 1 for the head and torch.optim.AdamW for the rest.

Usage: torchrun --nproc-per-node N torchtitan_run.py  (in a folder with the files of the page)
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

STEPS = 3


def main() -> None:
    import pytest
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from coupled_titan import CoupledOptimizers, coupled_adamw
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config.manager import ConfigManager
    from torchtitan.models.llama3 import model_registry

    from coupled_adam import CoupledAdamW
    from coupled_adam.optimizer.reference import reference_init, reference_step

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    debug = model_registry("debugmodel").model
    sharded = dist.get_world_size() > 1

    def new_model(shard: bool = sharded) -> nn.Module:
        model = dataclasses.replace(debug, layers=debug.layers[:1]).build()
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        return fully_shard(model, mesh=mesh) if shard else model

    def gradient(parameter: nn.Parameter, seed: int) -> torch.Tensor:
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(whole, mesh, parameter.placements) if isinstance(parameter, DTensor) else whole

    def parts(model: nn.Module) -> tuple[CoupledOptimizers, Any]:
        optimizers = coupled_adamw(lr=1e-3).build(model_parts=[model])  # as torchtitan's trainer does
        config = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5)
        return optimizers, config.build(optimizers=optimizers, training_steps=STEPS)

    def take(model: nn.Module, optimizers: CoupledOptimizers, schedulers: Any, step: int) -> None:
        optimizers.zero_grad()
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = gradient(parameter, seed + 100 * step)
        optimizers.step()
        schedulers.step()

    # torchtitan's command line rebuilds the config; our container must not become torchtitan's own.
    arguments = ["--module", "my_configs", "--config", "coupled_debugmodel", "--optimizer.implementation", "foreach"]
    config = ConfigManager().parse_args(arguments)
    assert config.optimizer == dataclasses.replace(coupled_adamw(lr=8e-4), implementation="foreach")
    assert type(config.optimizer) is CoupledOptimizers.Config

    model = new_model()
    optimizers, schedulers = parts(model)
    assert isinstance(optimizers, CoupledOptimizers)
    (coupled,) = optimizers.optimizers
    assert isinstance(coupled, CoupledAdamW)

    # Algorithm 1 and AdamW, with the learning rates of the schedule.
    expected = new_model(shard=False)
    others = {name: p for name, p in expected.named_parameters() if name != "lm_head.weight"}
    undecayed = [p for name, p in others.items() if "norm" in name or "tok_embeddings" in name]
    decayed = [p for name, p in others.items() if p.ndim == 2 and "tok_embeddings" not in name]
    assert len(undecayed) + len(decayed) == len(others)
    groups = [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    state = reference_init(expected.lm_head.weight)
    rates = []
    for step in range(STEPS):
        rates.append(coupled.param_groups[0]["lr"])
        for group in adamw.param_groups:
            group["lr"] = rates[-1]
        for seed, parameter in enumerate(expected.parameters()):
            parameter.grad = gradient(parameter, seed + 100 * step)
        adamw.step()
        state = reference_step(state, expected.lm_head.weight.grad, lr=rates[-1], betas=(0.9, 0.95))
        take(model, optimizers, schedulers, step)
        if step == 1:  # saved halfway
            dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id="checkpoint")
    expected.lm_head.weight.data.copy_(state.embeddings)
    assert math.isclose(rates[0], 5e-4), rates
    assert len(set(rates)) > 1, rates

    def assert_as_expected(trained: nn.Module) -> None:
        for (name, parameter), wanted in zip(trained.named_parameters(), expected.parameters(), strict=True):
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert (whole - wanted).abs().max() < 2e-6, name

    assert_as_expected(model)
    assert tuple(coupled.state[model.lm_head.weight]["exp_avg_sq"].shape) == (1, 256)

    # A run that resumes from torchtitan's flat state dict.
    resumed = new_model()
    resumed_optimizers, resumed_schedulers = parts(resumed)
    for _ in range(2):
        resumed_schedulers.step()
    content = {"model": resumed.state_dict(), "optimizer": resumed_optimizers.state_dict()}
    dcp.load(content, checkpoint_id="checkpoint")
    resumed.load_state_dict(content["model"])
    rate = resumed_optimizers.optimizers[0].param_groups[0]["lr"]
    resumed_optimizers.load_state_dict(content["optimizer"])
    for group in resumed_optimizers.optimizers[0].param_groups:
        group["lr"] = rate  # torchtitan's scheduler resets it when it is loaded
    take(resumed, resumed_optimizers, resumed_schedulers, 2)
    assert_as_expected(resumed)

    # Settings that the page says are refused.
    bfloat16 = dataclasses.replace(coupled_adamw(), implementation="fused_opt_states_bf16")
    refusing = bfloat16.build(model_parts=[model])
    refusing.zero_grad()
    model.lm_head.weight.grad = gradient(model.lm_head.weight, 0)
    with pytest.raises(ValueError, match="fused_opt_states_bf16"):
        refusing.step()
    stage = new_model()
    stage.lm_head = None  # as in a pipeline stage that is not the last
    with pytest.raises(ValueError, match="matched no parameters"):
        coupled_adamw().build(model_parts=[stage])

    Path(f"outcome.rank{dist.get_rank()}").write_text("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
