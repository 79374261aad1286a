"""BatchedMuon's Triton kernels in Triton's interpreter, compared with the literal Muon and with torch operations."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from muon_reference import assert_follows_reference, gradients_like, matrices, relative_error, run
from torch import Tensor, nn

from coupled_adam.optimizer import BatchedMuon, muon_step
from coupled_adam.optimizer.newton_schulz import orthogonalised

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")

# Square, wide and tall, single rows and columns, primes; several tiles of 16 x 32, the last ones not full.
SHAPES = ((17, 17), (17, 67), (53, 17), (1, 7), (7, 1), (1, 1), (17, 67), (40, 35))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Use the kernels for CPU matrices, with tiles so small that a small matrix has several per program."""
    from coupled_adam.optimizer import muon_kernels

    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("SCALE_BLOCK", 1024), ("MOST_PARTIALS", 2)):
        monkeypatch.setattr(muon_kernels, name, size)
    monkeypatch.setattr(muon_step, "is_for_triton", lambda tensor: tensor.dtype != torch.float64)
    monkeypatch.setattr(muon_step, "small_elements", lambda device: 2**20)
    return muon_kernels


def torch_run(params: Sequence[nn.Parameter], gradients: Sequence[Sequence[Tensor]], **options: Any) -> BatchedMuon:
    """The same steps by torch operations."""
    optimizer = BatchedMuon(params, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(muon_step, "kernels_for", lambda batch: None)
        run(optimizer, params, gradients)
    return optimizer


def assert_same_state(mine: BatchedMuon, theirs: BatchedMuon, tolerance: float) -> None:
    for p, q in zip(_params(mine), _params(theirs), strict=True):
        assert relative_error(p, q) < tolerance, tuple(p.shape)
        momentum = theirs.state[q]["momentum_buffer"]
        assert relative_error(mine.state[p]["momentum_buffer"], momentum) < tolerance, tuple(p.shape)


def _params(optimizer: BatchedMuon) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(("nesterov", "adjust"), [(True, None), (False, "match_rms_adamw")])
def test_float32_iteration_follows_the_literal_one_in_float64(
    kernels: ModuleType, nesterov: bool, adjust: str | None
) -> None:
    params = matrices(*SHAPES)
    starts = [p.detach().clone() for p in params]
    steps = gradients_like(params, 2)
    optimizer = BatchedMuon(params, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust, ns_dtype="float32")
    run(optimizer, params, steps)
    assert_follows_reference(
        optimizer, params, starts, steps, lr=0.02, nesterov=nesterov, adjust=adjust, momentum_error=1e-6
    )


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {"momentum": 0.3, "lr": torch.tensor(0.02)},
        {"nesterov": False, "lr": torch.tensor([0.02], dtype=torch.float64), "adjust_lr_fn": "match_rms_adamw"},
        {"weight_decay": 3.0, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 2, "eps": 1.0},
    ],
    ids=str,
)
def test_every_option_agrees_with_torch_operations(kernels: ModuleType, options: dict[str, Any]) -> None:
    ours, theirs = matrices(*SHAPES[:5]), matrices(*SHAPES[:5])
    steps = gradients_like(ours, 2)
    settings = {"lr": 0.02, "ns_dtype": "float32"} | options
    optimizer = BatchedMuon(ours, **settings)
    run(optimizer, ours, steps)
    assert_same_state(optimizer, torch_run(theirs, steps, **settings), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bfloat16_iteration_agrees_with_torch_operations_within_bfloat16(
    kernels: ModuleType, dtype: torch.dtype
) -> None:
    shapes = ((32, 48), (48, 32), (32, 32))
    ours, theirs = matrices(*shapes, dtype=dtype), matrices(*shapes, dtype=dtype)
    with torch.no_grad():
        torch._foreach_mul_([*ours, *theirs], 1e-3)  # small, so that a narrow parameter can follow the updates
    steps = gradients_like(ours, 2)
    starts = [p.detach().double() for p in ours]
    optimizer = BatchedMuon(ours, lr=0.02)
    run(optimizer, ours, steps)
    reference = torch_run(theirs, steps, lr=0.02)
    for p, q, start in zip(ours, theirs, starts, strict=True):
        moved, expected = p.double() - start, q.double() - start
        assert (moved - expected).norm() < 0.03 * expected.norm()  # the interpreter truncates to bfloat16
        assert p.dtype == optimizer.state[p]["momentum_buffer"].dtype == dtype
        momentum = reference.state[q]["momentum_buffer"]
        assert relative_error(optimizer.state[p]["momentum_buffer"], momentum) < 2**-7


def test_weight_decay_of_a_bfloat16_matrix_is_not_rounded_away(kernels: ModuleType) -> None:
    for lr in (1e-2, torch.tensor(1e-2)):
        p = nn.Parameter(torch.full((4, 4), 1.0, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        BatchedMuon([p], lr=lr, weight_decay=0.3).step()
        assert p[0, 0].item() == 1 - 2**-8  # 0.997 rounded or truncated


@pytest.mark.parametrize("layout", ["param transposed", "gradient transposed", "sliced", "not aligned"])
def test_any_stride_and_alignment_is_accepted(kernels: ModuleType, layout: str) -> None:
    ours, theirs = matrices((17, 40), (40, 17)), matrices((17, 40), (40, 17))
    steps = gradients_like(theirs, 2)

    def laid_out(tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape
        if layout == "sliced":
            return torch.zeros(rows, 2 * columns + 1)[:, 1::2].copy_(tensor)
        if layout == "not aligned":
            return torch.zeros(tensor.numel() + 1)[1:].view(rows, columns).copy_(tensor)
        return tensor.T.contiguous().T

    if layout != "gradient transposed":
        ours = [nn.Parameter(laid_out(p.detach())) for p in ours]
        assert not any(p.is_contiguous() and p.data_ptr() % 16 == 0 for p in ours)
    optimizer = BatchedMuon(ours, ns_dtype="float32", lr=0.02)
    for step in steps:
        for p, gradient in zip(ours, step, strict=True):
            p.grad = laid_out(gradient)
        optimizer.step()
    assert_same_state(optimizer, torch_run(theirs, steps, ns_dtype="float32", lr=0.02), 1e-6)


def test_more_matrices_than_fit_into_a_launch_and_alternating_layouts(kernels: ModuleType) -> None:
    shapes = [(5, 9)] * 12 + [(9, 5)] * 3
    ours, theirs = matrices(*shapes), matrices(*shapes)
    ours[1], ours[13] = (nn.Parameter(p.detach().T.contiguous().T) for p in (ours[1], ours[13]))
    steps = gradients_like(theirs, 2)
    optimizer = BatchedMuon(ours, ns_dtype="float32", lr=0.02)
    run(optimizer, ours, steps)
    assert_same_state(optimizer, torch_run(theirs, steps, ns_dtype="float32", lr=0.02), 1e-6)


def test_groups_keep_their_own_options(kernels: ModuleType) -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.0, "nesterov": False}]

    ours, theirs = matrices((5, 9), (9, 5), (5, 9)), matrices((5, 9), (9, 5), (5, 9))
    steps = gradients_like(ours, 2)
    optimizer = BatchedMuon(groups(ours), ns_dtype="float32")
    run(optimizer, ours, steps)
    reference = BatchedMuon(groups(theirs), ns_dtype="float32")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(muon_step, "kernels_for", lambda batch: None)
        run(reference, theirs, steps)
    assert_same_state(optimizer, reference, 1e-6)


def test_a_batch_is_padded_with_zeros_and_its_sums_give_the_norm(
    kernels: ModuleType,
) -> None:
    grads = gradients_like(matrices((17, 17), (17, 67), (53, 17)), 1)[0]
    stacked = torch.full((3, 17, 67), math.nan)
    momenta = [torch.zeros_like(grad) for grad in grads]
    sums = kernels.gather(grads, momenta, stacked, mu=0.5, is_nesterov=False, grad_factor=torch.tensor(0.25))
    expected = torch.zeros(3, 17, 67)
    for i, grad in enumerate(grads):
        X = grad if grad.shape[0] <= grad.shape[1] else grad.T
        expected[i, :, : X.shape[1]] = 0.125 * X
        assert torch.equal(momenta[i], 0.125 * grad)
    assert torch.equal(stacked, expected)
    assert sums.shape == (3, 2)
    torch.testing.assert_close(sums.sum(1), expected.square().sum((1, 2)))
    kernels.scale(stacked, sums, 1e-7)
    torch.testing.assert_close(stacked, expected / expected.norm(dim=(1, 2), keepdim=True))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's sum, in the interpreter
@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-8, 1e12, 1e18, 1e30])
@pytest.mark.parametrize("ns_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_and_huge_matrices_are_divided_as_by_torch_operations(
    kernels: ModuleType, size: float, ns_dtype: torch.dtype
) -> None:
    """If a square overflows, the norm is infinite and the matrix zero, as with torch operations."""
    values = gradients_like(matrices((5, 7)), 1)[0][0] * size
    stacked = torch.empty(1, 5, 7, dtype=ns_dtype)
    sums = kernels.gather([values], [values.clone()], stacked, mu=0.5, is_nesterov=True, grad_factor=None)
    expected = orthogonalised(stacked.clone(), (1.0, 0.0, 0.0), 1, 1e-7)  # only divided
    kernels.scale(stacked, sums, 1e-7)
    torch.testing.assert_close(stacked, expected, rtol=1e-6 if ns_dtype == torch.float32 else 2**-7, atol=0)
    assert bool(stacked.any()) == (size not in (0.0, 1e30))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_nan_spoils_its_own_matrix_and_no_other(kernels: ModuleType) -> None:
    params = matrices((3, 4), (3, 4), (3, 3))
    steps = gradients_like(params, 1)
    steps[0][0][1, 2], steps[0][2][0, 0] = math.nan, math.inf
    run(BatchedMuon(params), params, steps)
    assert params[0].isnan().all()
    assert params[1].isfinite().all()
    assert params[2].isnan().all()


def test_matrices_without_a_gradient_with_a_zero_gradient_or_without_elements(kernels: ModuleType) -> None:
    params = matrices((3, 4), (3, 4), (4, 3), (0, 4), (3, 0), (0, 0))
    starts = [p.detach().clone() for p in params]
    optimizer = BatchedMuon(params, lr=0.1, weight_decay=0.0)
    for i in (0, 3, 4, 5):
        params[i].grad = torch.zeros_like(params[i])
    params[2].grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(params[0], starts[0])
    assert not optimizer.state[params[1]]
    assert not torch.equal(params[2], starts[2])
    assert all(params[i].numel() == 0 for i in (3, 4, 5))


def test_two_runs_are_bitwise_equal_and_gradients_are_not_modified(kernels: ModuleType) -> None:
    runs = []
    for _ in range(2):
        params = matrices((17, 67), (53, 17))
        steps = gradients_like(params, 1)
        run(BatchedMuon(params, lr=0.02), params, steps)
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(params, steps[0], strict=True))
        runs.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def test_kernels_are_only_used_for_plain_matrices_with_real_memory(kernels: ModuleType) -> None:
    class Wrapped(Tensor):
        pass

    def chosen(**changes: Tensor) -> ModuleType | None:
        p = matrices((3, 4))[0]
        parts = {"param": p, "local": p, "grad": torch.ones(3, 4), "momentum": torch.ones(3, 4)}
        return muon_step.kernels_for([muon_step.MuonMatrix(p, p, p, p), muon_step.MuonMatrix(**(parts | changes))])

    assert chosen() is kernels
    double, empty = torch.ones(3, 4, dtype=torch.float64), torch.ones(0, 4)
    assert chosen(grad=double, momentum=double) is None
    assert chosen(momentum=torch.ones(3, 4, device="meta")) is None
    assert chosen(param=torch.ones(3, 4).as_subclass(Wrapped)) is None
    assert chosen(grad=torch.ones(3, 4).as_subclass(Wrapped)) is None
    assert chosen(param=empty, local=empty, grad=empty, momentum=empty) is None


def test_matrices_on_the_cpu_use_torch_operations() -> None:
    p = matrices((3, 4))[0]
    assert muon_step.kernels_for([muon_step.MuonMatrix(p, p, p, p)]) is None
