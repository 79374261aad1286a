"""Checkpoints of a run on a GPU: staged through page-locked memory, and bitwise equal after resuming."""

from pathlib import Path

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, load, newest_good
from coupled_adam.training.checkpoint.training_state import Staging, make_optimizer_state, training_tensors

pytestmark = pytest.mark.gpu


def model_and_optimizer(capturable: bool) -> tuple[nn.Module, CoupledAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)).cuda()
    optimizer = CoupledAdamW(model, lr=1e-2, max_grad_norm=0.5, fused=True, capturable=capturable)
    make_optimizer_state([optimizer])
    return model, optimizer


def train(model: nn.Module, optimizer: CoupledAdamW, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        noise = torch.rand(50, 16, device="cuda")  # uses the generator of the GPU
        (model[1](noise) + model[0].weight.sum()).logsumexp(-1).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("capturable", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, capturable: bool) -> None:
    model, optimizer = model_and_optimizer(capturable)
    train(model, optimizer, 3)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(3, training_tensors(model, [optimizer]), {})
    train(model, optimizer, 3)  # immediately: no change may reach the file
    writer.wait()
    expected = {name: tensor.clone() for name, tensor in training_tensors(model, [optimizer]).items()}

    resumed, resumed_optimizer = model_and_optimizer(capturable)
    torch.rand(10, device="cuda")
    tensors = training_tensors(resumed, [resumed_optimizer])
    assert all(tensor.is_cuda for name, tensor in tensors.items() if name.endswith(".step"))
    load(newest_good(tmp_path, on_skip=pytest.fail), tensors)
    train(resumed, resumed_optimizer, 3)
    actual = training_tensors(resumed, [resumed_optimizer])
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_the_host_memory_is_page_locked_and_hardly_larger_than_the_tensors() -> None:
    tensors = {f"model.{i}": torch.full((300_000 + i,), float(i), device="cuda") for i in range(400)}  # 480 MB
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    staged = Staging().stage(tensors, rank=0, ranks=1)
    assert all(buffer.is_pinned() for buffer in staged.data.values())
    assert all(torch.equal(staged.data[name], tensor.cpu()) for name, tensor in tensors.items())
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before < 1.2 * size
