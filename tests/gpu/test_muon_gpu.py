"""BatchedMuon on a real GPU: its results, its step as a CUDA graph, and that the host never waits for the device."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from side_streams import side_stream
from torch import nn

from coupled_adam.optimizer import BatchedMuon

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from muon_reference import gradients_like, matrices, muon_reference, relative_error, run

pytestmark = pytest.mark.gpu
SHAPES = ((64, 96), (96, 64), (64, 96), (80, 80), (64, 256), (256, 64))


def on_gpu(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in matrices(*SHAPES, seed=seed, dtype=dtype)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise an error if the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("exact_float32")
def test_float32_iteration_follows_the_literal_one_in_float64() -> None:
    params, starts = on_gpu(), matrices(*SHAPES)
    steps = gradients_like(starts, 4)
    run(BatchedMuon(params, lr=0.02, adjust_lr_fn="match_rms_adamw", ns_dtype="float32"), params, steps)
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        ratio = 0.2 * max(p.shape) ** 0.5
        expected, _ = muon_reference(start.detach(), [step[i] for step in steps], lr=0.02, ratio=ratio)
        assert relative_error(p, expected) < 1e-5


def test_bfloat16_iteration_agrees_with_torch_within_bfloat16() -> None:
    ours, theirs = on_gpu(), on_gpu()
    starts = [p.detach().clone() for p in ours]
    steps = gradients_like(starts, 4)
    run(BatchedMuon(ours, lr=0.02), ours, [[g.cuda() for g in step] for step in steps])
    run(torch.optim.Muon(theirs, lr=0.02), theirs, [[g.cuda() for g in step] for step in steps])
    for p, q, start in zip(ours, theirs, starts, strict=True):
        assert ((p - start) - (q - start)).norm() < 0.03 * (q - start).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_as_a_cuda_graph_equals_the_plain_step_and_follows_the_learning_rate(dtype: torch.dtype) -> None:
    recorded, plain = on_gpu(dtype=dtype), on_gpu(dtype=dtype)
    steps = [[g.cuda() for g in step] for step in gradients_like(plain, 4)]
    lr = torch.tensor(0.02, device="cuda")
    optimizer = BatchedMuon(recorded, lr=lr, capturable=True)
    for p in recorded:
        p.grad = torch.zeros_like(p)
    optimizer.make_state()
    values = [p.detach().clone() for p in recorded]
    with side_stream():
        optimizer.step()  # cuBLAS allocates its workspace
    with torch.no_grad():
        for p, value in zip(recorded, values, strict=True):
            p.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    other_lr = torch.tensor(0.02, device="cuda")
    other = BatchedMuon(plain, lr=other_lr)
    for i, gradients in enumerate(steps):
        lr.fill_(0.02 / (i + 1))
        other_lr.fill_(0.02 / (i + 1))
        for p, gradient in zip(recorded, gradients, strict=True):
            p.grad.copy_(gradient)
        graph.replay()
        run(other, plain, [gradients])
    for p, q in zip(recorded, plain, strict=True):
        torch.testing.assert_close(p, q)


def test_recording_without_capturable_is_refused() -> None:
    params = on_gpu()
    optimizer = BatchedMuon(params)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="capturable"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_capturable_with_a_learning_rate_on_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="lr"):
        BatchedMuon(on_gpu(), lr=torch.tensor(0.02), capturable=True)


@pytest.mark.parametrize("is_tensor", [True, False])
def test_step_never_waits_for_the_device(is_tensor: bool) -> None:
    params = on_gpu()
    lr = torch.tensor(0.02, device="cuda") if is_tensor else 0.02
    optimizer = BatchedMuon(params, lr=lr, capturable=True)
    for p in params:
        p.grad = torch.ones_like(p)
    with no_waiting():
        optimizer.step()
        optimizer.step()


def test_grad_scaler_skips_a_step_with_an_infinite_gradient() -> None:
    params = on_gpu()
    before = [p.detach().clone() for p in params]
    optimizer = BatchedMuon(params)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(sum((p * torch.inf).sum() for p in params)).backward()
    scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
