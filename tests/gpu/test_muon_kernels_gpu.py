"""BatchedMuon's kernels on a real GPU: results of torch operations, CUDA graphs, no synchronisation, few launches."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from side_streams import side_stream
from test_muon_gpu import no_waiting
from torch import Tensor, nn

from coupled_adam import BatchedMuon, CoupledAdamW, clip_together, hidden_matrices
from coupled_adam.optimizer import muon_step

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from muon_reference import gradients_like, matrices, muon_reference, relative_error, run
from test_joint_clipping import LanguageModel

pytestmark = pytest.mark.gpu
# The matrices of a small GPT-2, which share a padded batch; odd shapes, rows and columns.
SMALL_GPT2 = ((384, 384), (384, 1536), (1152, 384), (1536, 384))
SHAPES = (*SMALL_GPT2, (127, 131), (131, 127), (1, 77), (77, 1), (1, 1), (3, 2000))


def on_gpu(shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in matrices(*shapes, dtype=dtype)]


def gradients_of(params: Sequence[Tensor], steps: int) -> list[list[Tensor]]:
    return [[gradient.cuda() for gradient in step] for step in gradients_like(params, steps)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launched kernels."""
    from coupled_adam.optimizer import muon_kernels

    names: list[str] = []
    for name in ("GATHER", "SCALE", "DESCEND"):
        launcher = getattr(muon_kernels, name)

        def launch(*arguments: Any, name: str = name, original: Any = launcher.launch) -> None:
            names.append(name)
            original(*arguments)

        monkeypatch.setattr(launcher, "launch", launch)
    return names


def torch_run(params: Sequence[nn.Parameter], steps: Sequence[Sequence[Tensor]], **options: Any) -> BatchedMuon:
    optimizer = BatchedMuon(params, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(muon_step, "kernels_for", lambda batch: None)
        run(optimizer, params, steps)
    return optimizer


@pytest.mark.usefixtures("exact_float32")
def test_float32_iteration_follows_the_literal_one_in_float64(launches: list[str]) -> None:
    params, starts = on_gpu(), matrices(*SHAPES)
    steps = gradients_like(starts, 2)
    run(BatchedMuon(params, lr=0.02, adjust_lr_fn="match_rms_adamw", ns_dtype="float32"), params, steps)
    assert set(launches) == {"GATHER", "SCALE", "DESCEND"}
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        ratio = 0.2 * max(p.shape) ** 0.5
        expected, _ = muon_reference(start.detach(), [step[i] for step in steps], lr=0.02, ratio=ratio)
        assert relative_error(p, expected) < 1e-5, tuple(p.shape)


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.0, "lr": torch.tensor([0.02])},
        {"momentum": 0.3},
        {"momentum": 0, "weight_decay": 0, "lr": 1},  # integers: a compiled kernel expects floats
    ],
    ids=str,
)
def test_every_option_agrees_with_torch_operations(options: dict[str, Any]) -> None:
    ours, theirs = on_gpu(), on_gpu()
    steps = gradients_of(ours, 3)
    settings: dict[str, Any] = {"lr": 0.02, "ns_dtype": "float32"} | options
    if isinstance(settings["lr"], Tensor):
        settings["lr"] = settings["lr"].cuda()
    optimizer = BatchedMuon(ours, **settings)
    run(optimizer, ours, steps)
    reference = torch_run(theirs, steps, **settings)
    for p, q in zip(ours, theirs, strict=True):
        assert relative_error(p, q) < 2e-6, tuple(p.shape)
        momenta = optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"]
        assert relative_error(*momenta) < 1e-6, tuple(p.shape)


@pytest.mark.usefixtures("exact_float32")
def test_programs_with_several_tiles_agree_with_torch_operations() -> None:
    shapes = ((2048, 2560), (2560, 2048))
    ours, theirs = on_gpu(shapes), on_gpu(shapes)
    steps = gradients_of(ours, 1)
    run(BatchedMuon(ours, lr=0.02, ns_dtype="float32"), ours, steps)
    torch_run(theirs, steps, lr=0.02, ns_dtype="float32")
    for p, q in zip(ours, theirs, strict=True):
        assert relative_error(p, q) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bfloat16_iteration_agrees_with_torch_operations_within_bfloat16(dtype: torch.dtype) -> None:
    ours, theirs = on_gpu(dtype=dtype), on_gpu(dtype=dtype)
    with torch.no_grad():
        torch._foreach_mul_([*ours, *theirs], 1e-3)  # small, so that a narrow parameter can follow the updates
    starts = [p.detach().double() for p in ours]
    steps = gradients_of(ours, 3)
    run(BatchedMuon(ours, lr=0.02), ours, steps)
    torch_run(theirs, steps, lr=0.02)
    for p, q, start in zip(ours, theirs, starts, strict=True):
        moved, expected = p.double() - start, q.double() - start
        assert (moved - expected).norm() < 0.03 * expected.norm(), tuple(p.shape)


@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("layout", ["transposed", "gradient transposed", "sliced", "not aligned"])
def test_any_stride_and_alignment_is_accepted(layout: str, launches: list[str]) -> None:
    shapes = ((100, 300), (300, 100))
    ours, theirs = on_gpu(shapes), on_gpu(shapes)
    steps = gradients_of(theirs, 2)

    def laid_out(tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape
        if layout == "sliced":
            return torch.zeros(rows, 2 * columns + 1, device="cuda")[:, 1::2].copy_(tensor)
        if layout == "not aligned":
            return torch.zeros(tensor.numel() + 1, device="cuda")[1:].view(rows, columns).copy_(tensor)
        return tensor.T.contiguous().T

    if layout != "gradient transposed":
        ours = [nn.Parameter(laid_out(p.detach())) for p in ours]
    optimizer = BatchedMuon(ours, ns_dtype="float32", lr=0.02)
    for step in steps:
        for p, gradient in zip(ours, step, strict=True):
            p.grad = laid_out(gradient)
        optimizer.step()
    torch_run(theirs, steps, ns_dtype="float32", lr=0.02)
    assert "GATHER" in launches
    for p, q in zip(ours, theirs, strict=True):
        assert relative_error(p, q) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_as_a_cuda_graph_is_bitwise_equal_to_the_plain_step(dtype: torch.dtype) -> None:
    """Also with a clipping factor that the graph reads from the device."""
    recorded, plain = on_gpu(dtype=dtype), on_gpu(dtype=dtype)
    steps = gradients_of(plain, 4)
    lr, factor = torch.tensor(0.02, device="cuda"), torch.tensor(1.0, device="cuda")
    optimizer, other = (BatchedMuon(params, lr=lr, capturable=True) for params in (recorded, plain))
    for p in recorded:
        p.grad = torch.zeros_like(p)
    optimizer.make_state()
    values = [p.detach().clone() for p in recorded]
    with side_stream():
        optimizer.grad_factor = factor
        optimizer.step()  # compiles kernels; cuBLAS allocates its workspace
    with torch.no_grad():
        for p, value in zip(recorded, values, strict=True):
            p.copy_(value)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.grad_factor = factor
        optimizer.step()
    for i, gradients in enumerate(steps):
        lr.fill_(0.02 / (i + 1))
        factor.fill_(0.5**i)
        for p, gradient in zip(recorded, gradients, strict=True):
            p.grad.copy_(gradient)
        graph.replay()
        other.grad_factor = factor
        run(other, plain, [gradients])
    for p, q in zip(recorded, plain, strict=True):
        assert torch.equal(p, q), tuple(p.shape)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


@pytest.mark.parametrize("is_tensor", [True, False])
def test_step_with_a_factor_never_waits_for_the_device(is_tensor: bool, launches: list[str]) -> None:
    params = on_gpu()
    lr = torch.tensor(0.02, device="cuda") if is_tensor else 0.02
    optimizer = BatchedMuon(params, lr=lr, capturable=True)
    factor = torch.tensor(0.5, device="cuda")
    for p in params:
        p.grad = torch.ones_like(p)
    with no_waiting():
        for _ in range(2):
            optimizer.grad_factor = factor
            optimizer.step()
    assert "DESCEND" in launches


def test_clipping_together_equals_clip_grad_norm_before_and_writes_no_gradient() -> None:
    torch.manual_seed(0)
    momenta = []
    for together in (True, False):
        torch.manual_seed(0)
        model = LanguageModel().cuda()
        hidden = hidden_matrices(model)
        coupled = CoupledAdamW(model, lr=0.01, exclude=hidden, fused=True)
        muon = BatchedMuon(hidden, lr=0.02, ns_dtype="float32")
        if together:
            clip_together(coupled, muon, max_norm=0.1)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            before = [p.grad.clone() for _, p in hidden]
            if not together:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            coupled.step()
            muon.step()
            if together:
                assert all(torch.equal(p.grad, grad) for (_, p), grad in zip(hidden, before, strict=True))
        momenta.append([muon.state[p]["momentum_buffer"] for _, p in hidden])
    for mine, theirs in zip(*momenta, strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_a_nan_spoils_its_own_matrix_and_no_other() -> None:
    params = on_gpu(((70, 90), (70, 90), (90, 70)))
    steps = gradients_of(params, 1)
    steps[0][1][3, 4] = torch.nan
    run(BatchedMuon(params), params, steps)
    assert [bool(p.isnan().all()) for p in params] == [False, True, False]
    assert bool(params[0].isfinite().all() & params[2].isfinite().all())


def test_two_runs_are_bitwise_equal() -> None:
    runs = []
    for _ in range(2):
        params = on_gpu()
        run(BatchedMuon(params), params, gradients_of(params, 2))
        runs.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def test_six_blocks_take_nine_launches_besides_the_products(launches: list[str]) -> None:
    """Four shapes of six matrices each share a batch."""
    params = on_gpu(SMALL_GPT2 * 6)
    optimizer = BatchedMuon(params, lr=torch.tensor(0.02, device="cuda"), capturable=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert launches == ["GATHER"] * 4 + ["SCALE"] + ["DESCEND"] * 4
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event.name for event in on_device if not event.name.startswith("Optimizer.")]
    assert len(kernels) <= 9 + 25 + 6, kernels  # five rounds of three products and two copies, with a margin for cuBLAS
