"""The chunked loss compared with F.cross_entropy of all logits: values, gradients, memory; and its Triton kernel."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.models import loss as loss_module
from coupled_adam.models import loss_operations
from coupled_adam.models.loss import chunk_rows, linear_cross_entropy

N, V, H = 37, 101, 16


def inputs(dtype: torch.dtype = torch.float32, ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    if ignored:
        targets[::5] = -100
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + z_loss * (logits.logsumexp(-1).square() * (targets != -100))
    return losses if reduction == "none" else losses.sum() / (targets != -100).sum()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float32_equals_the_plain_head_to_rounding(reduction: str, z_loss: float) -> None:
    hidden, weight, targets = inputs()
    token_weights = torch.randn(N, generator=torch.Generator().manual_seed(1))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = plain(exact[0], exact[1], targets, z_loss, reduction)
    actual = linear_cross_entropy(hidden, weight, targets, z_loss=z_loss, reduction=reduction)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)
    ((3.0 * expected * token_weights).sum()).backward()
    ((3.0 * actual * token_weights).sum()).backward()
    for tensor, reference in zip((hidden, weight), exact, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert (tensor.grad - reference.grad).norm() < 2e-6 * reference.grad.norm()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_match_finite_differences(reduction: str) -> None:
    hidden, weight, targets = inputs(torch.float64)
    small = [t.detach()[:9, :5].clone().requires_grad_() for t in (hidden, weight)]
    targets = targets[:9].remainder(9)
    targets[2] = -100

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, z_loss=0.05, reduction=reduction)

    assert torch.autograd.gradcheck(function, small)


def test_every_row_of_the_weight_gets_a_gradient() -> None:
    hidden, weight, targets = inputs()
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is not None
    assert (weight.grad.abs().sum(dim=1) > 0).all()
    assert weight.grad.layout == torch.strided


def test_a_tied_weight_gets_both_gradients() -> None:
    _, weight, targets = inputs(torch.float64)
    tokens = targets.clamp(min=0)
    expected = torch.autograd.grad(plain(F.embedding(tokens, weight), weight, targets, 0.0, "mean"), weight)[0]
    actual = torch.autograd.grad(linear_cross_entropy(F.embedding(tokens, weight), weight, targets), weight)[0]
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("chunks")
def test_under_autocast_products_are_bf16_and_sums_are_float32() -> None:
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_cross_entropy(hidden, weight, targets)
    actual.backward()
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight)]
    expected = plain(rounded[0], rounded[1], targets, 0.0, "mean")
    expected.backward()
    assert actual.dtype == torch.float32
    # The logits, here of size 4 or more, are rounded to bf16.
    assert actual.item() == pytest.approx(expected.item(), abs=2e-2)
    for tensor, reference in zip((hidden, weight), rounded, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad - reference.grad).norm() < 1e-2 * reference.grad.norm()


def test_the_weight_gradient_adds_up_in_float32_over_many_bf16_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bf16 sum, the thousandth chunk would no longer change the total."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda N, row_bytes, budget: 1)
    hidden = torch.ones(2000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    _, _, gradient, _ = torch.ops.coupled_adam.summed_loss(
        hidden, weight, torch.zeros(2000, dtype=torch.int64), 0.0, -100, torch.bfloat16, True
    )
    assert gradient.tolist() == [[-1000.0], [1000.0]]


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a gradient was computed")

    hidden, weight, targets = inputs()
    expected = linear_cross_entropy(hidden, weight, targets)
    monkeypatch.setattr(loss_operations, "add_product", fail)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets), expected)
    assert torch.equal(linear_cross_entropy(hidden.detach(), weight.detach(), targets), expected)


def test_without_targets_the_mean_is_nan_as_in_torch() -> None:
    hidden, weight, targets = inputs()
    assert linear_cross_entropy(hidden, weight, torch.full_like(targets, -100)).isnan()
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]).isnan()
    other = linear_cross_entropy(hidden, weight, targets.where(targets != -100, 7), ignore_index=7)
    without_seven = targets.where(targets != 7, -100)
    torch.testing.assert_close(other, F.cross_entropy(hidden @ weight.T, without_seven))


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = inputs()
    actual = linear_cross_entropy(1000 * hidden, weight, targets)
    torch.testing.assert_close(actual, F.cross_entropy(1000 * hidden @ weight.T, targets))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: str) -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy\b.*F\.cross_entropy\(.*create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_backward_can_run_twice_through_a_retained_graph() -> None:
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    peak = [0]
    with torch.profiler.profile(profile_memory=True) as profile:
        yield peak
    allocated = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak[0] = max(peak[0], allocated)


def test_memory_is_one_chunk_and_the_gradients() -> None:
    tokens, rows, width = 4096, 8192, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(rows, width, requires_grad=True)
    targets = torch.randint(0, rows, (tokens,))
    with counted_bytes() as peak:
        linear_cross_entropy(hidden, weight, targets).backward()
    gradients = 4 * width * (tokens + rows)
    chunk = loss_module.CHUNK_BYTES["cpu"]
    in_forward = chunk + gradients + 2**20
    assert chunk <= peak[0] < in_forward < 4 * tokens * rows / 5


def test_backward_allocates_only_the_scaled_gradients() -> None:
    hidden, weight, targets = torch.randn(1000, 64), torch.randn(1000, 64), torch.randint(0, 1000, (1000,))
    loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    with counted_bytes() as peak:
        loss.backward()
    assert peak[0] < 4 * 64 * (1000 + 1000) + 2**14


@pytest.mark.parametrize("N", [1, 255, 256, 257, 1024, 16384, 98304, 98305])
@pytest.mark.parametrize("row_bytes", [4, 2 * 50304, 4 * 262144, 2**31])
def test_chunks_fit_the_budget_if_a_row_does(N: int, row_bytes: int) -> None:
    budget = 2**30
    rows = chunk_rows(N, row_bytes, budget)
    assert rows >= 1
    assert rows * row_bytes <= budget or rows <= max(256, budget // row_bytes)
    if N * row_bytes <= budget:
        assert rows >= N


@pytest.mark.parametrize(
    ("shapes", "options", "named"),
    [
        (((4, 3), (5, 2), (4,)), {}, r"hidden\b.*\(4, 3\).*weight\b.*\(5, 2\).*\(N, H\).*\(V, H\)"),
        (((4, 3), (5, 3), (2, 2)), {}, r"targets\b.*\(2, 2\).*\(4,\)"),
        (((4, 3), (5, 3), (4,)), {"reduction": "sum"}, "reduction.*'sum'.*'mean'.*'none'"),
    ],
)
def test_bad_arguments_are_refused(shapes: tuple[tuple[int, ...], ...], options: Any, named: str) -> None:
    hidden, weight = torch.zeros(shapes[0]), torch.zeros(shapes[1])
    with pytest.raises(ValueError, match=named):
        linear_cross_entropy(hidden, weight, torch.zeros(shapes[2], dtype=torch.int64), **options)


def test_the_operators_of_the_loss_are_well_behaved() -> None:
    """torch's own checks: the schema, the shapes and dtypes that the compiler assumes, no aliases."""
    for dtype, needs_grad in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        hidden, weight, targets = (tensor.detach() for tensor in inputs())
        operators = torch.ops.coupled_adam
        torch.library.opcheck(operators.summed_loss.default, (hidden, weight, targets, 0.1, -100, dtype, needs_grad))
        torch.library.opcheck(operators.token_losses.default, (hidden, weight, targets, 0.1, -100, dtype))
        token_weights = torch.rand(N)
        torch.library.opcheck(
            operators.token_gradients.default, (hidden, weight, targets, token_weights, 0.1, -100, dtype)
        )


@pytest.mark.parametrize("rows", [101, 128, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_triton_kernel_gives_losses_and_gradients(dtype: torch.dtype, rows: int, weighted: bool) -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels")
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter
    logits = (3 * torch.randn(5, rows, generator=generator)).to(dtype).to(device)
    targets = torch.tensor([0, rows - 1, -100, 7, 50], device=device)
    token_weights = torch.tensor([1.0, -2.0, 3.0, 0.0, 0.5], device=device) if weighted else None
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected = expected + 0.01 * exact.logsumexp(-1).square() * (targets != -100)
    expected.backward(torch.ones_like(expected) if token_weights is None else token_weights.double())
    losses = torch.full((5,), float("nan"), device=device)
    untouched = logits.clone()
    kernels.cross_entropy(untouched, targets, losses, token_weights, 0.01, -100, False)
    assert torch.equal(untouched, logits)
    kernels.cross_entropy(logits, targets, losses, token_weights, 0.01, -100, True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # Per element: bf16 has 8 bits, and Triton's interpreter truncates instead of rounding.
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3 if device == "cuda" else 8e-3
    assert exact.grad is not None
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=1e-9)


def test_the_triton_kernel_survives_a_logit_far_above_the_targets() -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, 49] = torch.tensor([100.0, 1000.0, 1000.0])
    targets = torch.tensor([0, 1, 49], device=device)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = torch.empty(3, device=device)
    kernels.cross_entropy(logits, targets, losses, None, 0.0, -100, True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)
