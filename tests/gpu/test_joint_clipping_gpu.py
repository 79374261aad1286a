"""Clipping two optimizers by one norm on a GPU: without synchronisation, and in a CUDA graph."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from side_streams import side_stream
from torch import nn

from coupled_adam import CoupledAdamW, clip_together, hidden_matrices

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from oracle import relative_error
from test_joint_clipping import LanguageModel

pytestmark = pytest.mark.gpu
FLAGS: list[dict[str, Any]] = [{"capturable": True}, {"capturable": True, "fused": True}]


def two_optimizers(model: nn.Module, muon: bool, **options: Any) -> list[torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    other = torch.optim.Muon(matrices, lr=0.02) if muon else torch.optim.SGD(matrices, lr=0.1, momentum=0.5)
    return [CoupledAdamW(model, lr=torch.tensor(0.01, device="cuda"), exclude=matrices, **options), other]


def set_gradients(*models: nn.Module) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn_like(parameters[0])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_host_never_waits_for_the_device(flags: dict[str, Any], muon: bool) -> None:
    model = LanguageModel().cuda()
    optimizers = two_optimizers(model, muon, **flags)
    clip_together(*optimizers, max_norm=0.1)
    set_gradients(model)
    for optimizer in optimizers:  # compiles kernels and creates state
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_cuda_graph_of_both_steps_equals_clip_grad_norm_before_them(flags: dict[str, Any]) -> None:
    torch.manual_seed(0)
    captured = LanguageModel().cuda()
    eager = copy.deepcopy(captured)
    optimizers, references = two_optimizers(captured, False, **flags), two_optimizers(eager, False, **flags)
    clip_together(*optimizers, max_norm=0.1)

    def reference_step() -> None:
        nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        for optimizer in references:
            optimizer.step()

    with side_stream():
        for _ in range(2):
            set_gradients(captured, eager)
            for optimizer in optimizers:
                optimizer.step()
            reference_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for optimizer in optimizers:
            optimizer.step()
    for _ in range(3):
        set_gradients(captured, eager)
        graph.replay()
        reference_step()
    for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-5
