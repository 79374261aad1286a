"""CoupledAdamW next to another optimizer: clipping by the joint norm over all ranks.

Legend: V vocabulary rows, H hidden size.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from coupled_adam import BatchedMuon, CoupledAdamW, check_muon, clip_together, hidden_matrices
from scenarios.clipping import IMPLEMENTATIONS, mixed_parameters, set_gradients
from scenarios.common import (
    GPT,
    LR,
    STEPS,
    assert_close,
    assert_same_parameters,
    backward,
    full,
    mesh_of,
    runs_on,
)
from scenarios.data_parallel import fsdp2
from scenarios.placements import assert_same_on_all_ranks

MATRICES = ["blocks.0.fc.weight", "blocks.0.proj.weight", "blocks.1.fc.weight", "blocks.1.proj.weight"]


def two_optimizers(model: nn.Module, **options: object) -> tuple[CoupledAdamW, torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    assert [name for name, _ in matrices] == MATRICES, matrices
    return CoupledAdamW(model, lr=LR, exclude=matrices, **options), torch.optim.SGD(matrices, lr=0.1, momentum=0.5)


@runs_on(2)
def sharded_gradients_of_two_optimizers_are_clipped_as_by_clip_grad_norm_before() -> None:
    for options in IMPLEMENTATIONS:
        for max_norm in (0.1, 1e6):
            mesh = mesh_of(dist.get_world_size())
            inside, outside = fsdp2(GPT(tied=True), mesh), fsdp2(GPT(tied=True), mesh)
            coupled, other = two_optimizers(inside, **options)
            clip_together(coupled, other, max_norm=max_norm)
            references = two_optimizers(outside, **options)
            for step in range(STEPS):
                backward(inside, step)
                for parameter, reference in zip(inside.parameters(), outside.parameters(), strict=True):
                    reference.grad = parameter.grad.clone()
                coupled.step()
                other.step()
                norm = clip_grad_norm_(outside.parameters(), max_norm)
                for optimizer in references:
                    optimizer.step()
                assert_close("grad_norm", coupled.grad_norm, norm)
                assert_same_on_all_ranks("grad_factor", coupled.grad_factor)
                assert (norm > max_norm) == (max_norm == 0.1), f"norm {norm} makes no use of max_norm {max_norm}"
            assert_same_parameters(inside, outside)


@runs_on(4)
def two_optimizers_on_two_meshes_and_plain_tensors_are_clipped_as_unsharded() -> None:
    sharded, unsharded = mixed_parameters(sharded=True), mixed_parameters(sharded=False)
    optimizers = []
    for parameters in (sharded, unsharded):
        tables = [(name, parameter) for name, parameter in parameters.items() if "table" in name]
        matrices = [(name, parameter) for name, parameter in parameters.items() if "table" not in name]
        coupled = CoupledAdamW([{"params": tables, "coupled": True}], lr=LR)
        optimizers.append((coupled, torch.optim.SGD(matrices, lr=0.1)))
    (coupled, other), references = optimizers
    clip_together(coupled, other, max_norm=1.0)
    for step in range(STEPS):
        set_gradients(sharded, step)
        set_gradients(unsharded, step)
        coupled.step()
        other.step()
        norm = clip_grad_norm_(unsharded.values(), 1.0)
        for optimizer in references:
            optimizer.step()
        assert_close("grad_norm", coupled.grad_norm, norm)
        assert_same_on_all_ranks("grad_norm", coupled.grad_norm)
    for name, parameter in sharded.items():
        assert_close(name, parameter, unsharded[name])


@runs_on(2)
def muon_beside_coupled_adamw_trains_sharded_and_replicated_models_as_one_rank_does() -> None:
    for wrap in (lambda model: fsdp2(model, mesh_of(2)), DistributedDataParallel):
        model, reference = wrap(GPT(tied=True)), GPT(tied=True)
        optimizers = []
        for chosen in (model, reference):
            matrices = hidden_matrices(chosen)
            muon = torch.optim.Muon(matrices, lr=LR)
            coupled = CoupledAdamW(chosen, lr=LR, exclude=matrices)
            check_muon(chosen, muon, coupled)
            clip_together(coupled, muon, max_norm=0.1)
            optimizers += [coupled, muon]
        for step in range(3):
            backward(model, step)
            backward(reference, step)
            for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                expected.grad = full(parameter.grad).clone()
            for optimizer in optimizers:
                optimizer.step()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            # Muon multiplies in bfloat16, and on several ranks in another order.
            tolerance = 0.02 if "blocks" in name and "weight" in name else 1e-5
            assert_close(name, parameter, expected, tolerance)
            if isinstance(parameter, DTensor):
                assert_same_on_all_ranks(name, full(parameter))


@runs_on(2)
def batched_muon_of_sharded_and_replicated_matrices_is_clipped_as_by_clip_grad_norm_before() -> None:
    for wrap in (lambda model: fsdp2(model, mesh_of(2)), DistributedDataParallel):
        inside, outside = wrap(GPT(tied=True)), wrap(GPT(tied=True))
        optimizers = []
        for model in (inside, outside):
            matrices = hidden_matrices(model)
            muon = BatchedMuon(matrices, lr=LR, ns_dtype="float32")
            optimizers.append((CoupledAdamW(model, lr=LR, exclude=matrices), muon))
        (coupled, muon), references = optimizers
        clip_together(coupled, muon, max_norm=0.1)
        for step in range(3):
            backward(inside, step)
            for parameter, reference in zip(inside.parameters(), outside.parameters(), strict=True):
                reference.grad = parameter.grad.clone()
            coupled.step()
            muon.step()
            norm = clip_grad_norm_(outside.parameters(), 0.1)
            for optimizer in references:
                optimizer.step()
            assert_close("grad_norm", coupled.grad_norm, norm)
            assert norm > 0.1, f"norm {norm} makes no use of max_norm"
        for (name, parameter), expected in zip(inside.named_parameters(), outside.parameters(), strict=True):
            assert_close(name, parameter, expected, 1e-5)
            if parameter in muon.state:
                momenta = muon.state[parameter], references[1].state[expected]
                assert_close(f"momentum of {name}", *(state["momentum_buffer"] for state in momenta))
