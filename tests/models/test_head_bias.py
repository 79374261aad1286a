"""The bias of the logits in the chunked loss, compared with F.cross_entropy and F.linear; and in the Triton kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.models import loss_operations
from coupled_adam.models.loss import linear_cross_entropy

N, V, H = 37, 101, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, Triton's interpreter


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias that require gradients, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    # Like the logarithms of unigram probabilities: large, and different.
    bias = (-10 + 3 * torch.randn(V, generator=generator, dtype=dtype)).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, z_loss: float, reduction: str) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + z_loss * (logits.logsumexp(-1).square() * (targets != -100))
    return losses if reduction == "none" else losses.sum() / (targets != -100).sum()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_float32_equals_the_plain_head_to_rounding(reduction: str, z_loss: float, compiled: bool) -> None:
    *tensors, targets = inputs()
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = plain(*exact, targets, z_loss, reduction)  # type: ignore[call-arg]

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, z_loss=z_loss, reduction=reduction)

    actual = (torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours)(*tensors)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)
    token_weights = torch.randn(N, generator=torch.Generator().manual_seed(1))
    ((3.0 * expected * token_weights).sum()).backward()
    ((3.0 * actual * token_weights).sum()).backward()
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert (tensor.grad - reference.grad).norm() < 3e-6 * reference.grad.norm()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_match_finite_differences(reduction: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    small = [t.detach().clone().requires_grad_() for t in (hidden[:9, :5], weight[:9, :5], bias[:9])]
    targets = targets[:9].remainder(9)
    targets[2] = -100

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, z_loss=0.05, reduction=reduction)

    assert torch.autograd.gradcheck(function, small)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_fixed_bias_has_no_gradient_but_is_added(reduction: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    fixed = bias.detach()
    expected = plain(hidden, weight, fixed, targets, 0.0, reduction).sum()
    wanted = torch.autograd.grad(expected, (hidden, weight))
    actual = linear_cross_entropy(hidden, weight, targets, bias=fixed, reduction=reduction).sum()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, (hidden, weight)), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_bias_can_be_trained_alone(reduction: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    frozen = hidden.detach(), weight.detach()
    expected = torch.autograd.grad(plain(*frozen, bias, targets, 0.0, reduction).sum(), bias)
    actual = linear_cross_entropy(*frozen, targets, bias=bias, reduction=reduction).sum()
    torch.testing.assert_close(torch.autograd.grad(actual, bias), expected)
    with torch.no_grad():
        assert not linear_cross_entropy(*frozen, targets, bias=bias, reduction=reduction).requires_grad


@pytest.mark.usefixtures("chunks")
def test_under_autocast_the_bias_is_not_rounded() -> None:
    """With zero hidden states the loss depends on the bias alone; bf16 would change it by a hundredth."""
    _, weight, bias, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_cross_entropy(torch.zeros(N, H), weight, targets, bias=bias)
    actual.backward()
    exact = bias.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.expand(N, V), targets)
    expected.backward()
    assert actual.item() == pytest.approx(expected.item(), abs=1e-6)
    assert bias.grad is not None
    assert exact.grad is not None
    assert bias.grad.dtype == torch.float32
    # Each token's gradient is rounded to bf16 before it is added in float32.
    assert (bias.grad - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_a_zero_bias_is_bitwise_equal_to_no_bias() -> None:
    hidden, weight, _, targets = inputs()
    zeros = torch.zeros(V)
    for reduction in ("mean", "none"):
        without = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        with_zeros = linear_cross_entropy(hidden, weight, targets, bias=zeros, reduction=reduction)
        assert torch.equal(without, with_zeros)
        gradients = [torch.autograd.grad(loss.sum(), (hidden, weight)) for loss in (without, with_zeros)]
        assert all(map(torch.equal, *gradients))


def test_a_fixed_bias_costs_no_extra_pass_for_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias, targets = inputs()
    passes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        loss_operations, "add_column_sums", lambda total, matrix, first: passes.append(tuple(matrix.shape))
    )
    linear_cross_entropy(hidden, weight, targets, bias=bias.detach())
    assert passes == []
    linear_cross_entropy(hidden, weight, targets, bias=bias)
    assert passes == [(N, V)]


def test_without_tokens_gradients_are_zero() -> None:
    hidden, weight, bias, targets = inputs()
    linear_cross_entropy(hidden[:0], weight, targets[:0], bias=bias, reduction="none").sum().backward()
    assert bias.grad is not None
    assert not bias.grad.any()


def test_a_bias_of_another_length_is_refused() -> None:
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match=r"bias\b.*\(100,\).*\(101,\)"):
        linear_cross_entropy(hidden, weight, targets, bias=bias[1:])


def test_the_operators_of_the_loss_are_well_behaved_with_a_bias() -> None:
    """torch's own checks: the schema, the shapes and dtypes that the compiler assumes, no aliases."""
    for dtype, needs_grad, needs_bias_grad in (
        (torch.float32, True, True),
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, False),
    ):
        hidden, weight, bias, targets = (tensor.detach() for tensor in inputs())
        options, operators = (0.1, -100, dtype), torch.ops.coupled_adam
        torch.library.opcheck(
            operators.summed_loss.default, (hidden, weight, targets, *options, needs_grad, bias, needs_bias_grad)
        )
        torch.library.opcheck(operators.token_losses.default, (hidden, weight, targets, *options, bias))
        torch.library.opcheck(
            operators.token_gradients.default,
            (hidden, weight, targets, torch.rand(N), *options, bias, needs_bias_grad),
        )


@pytest.mark.parametrize("rows", [101, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("operations", ["kernels", "torch"])
def test_a_chunk_with_a_bias_gives_losses_and_gradients(
    operations: str, dtype: torch.dtype, rows: int, weighted: bool
) -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels") if operations == "kernels" else loss_operations
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, rows, generator=generator)).to(dtype).to(DEVICE)
    bias = (-10 + 3 * torch.randn(rows, generator=generator)).to(DEVICE)
    targets = torch.tensor([0, rows - 1, -100, 7, 50], device=DEVICE)
    token_weights = torch.tensor([1.0, -2.0, 3.0, 0.0, 0.5], device=DEVICE) if weighted else None
    exact = (logits.double() + bias.double()).requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected = expected + 0.01 * exact.logsumexp(-1).square() * (targets != -100)
    expected.backward(torch.ones_like(expected) if token_weights is None else token_weights.double())
    losses = torch.full((5,), float("nan"), device=DEVICE)
    kernels.cross_entropy(logits.clone(), targets, losses, token_weights, 0.01, -100, False, bias)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    kernels.cross_entropy(logits, targets, losses, token_weights, 0.01, -100, True, bias)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # Per element: bf16 has 8 bits, and Triton's interpreter truncates instead of rounding.
    tolerance = 3e-5 if dtype == torch.float32 else 4e-3 if DEVICE == "cuda" else 8e-3
    assert exact.grad is not None
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=1e-9)


def test_the_triton_kernel_survives_a_bias_far_above_the_targets() -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels")
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    bias = torch.zeros(50, device=DEVICE)
    bias[49] = 1000.0
    targets = torch.tensor([0, 1, 49], device=DEVICE)
    exact = (logits.double() + bias.double()).requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = torch.empty(3, device=DEVICE)
    kernels.cross_entropy(logits, targets, losses, None, 0.0, -100, True, bias)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)
