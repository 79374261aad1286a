"""GELU and residual sum with LayerNorm: the Triton kernels compared with float64, and the code without them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.models import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, Triton's interpreter
# bf16 has 8 bits, and Triton's interpreter truncates instead of rounding.
ROUNDING = 4e-3 if DEVICE == "cuda" else 8e-3


@pytest.fixture
def kernels() -> Any:
    return pytest.importorskip("coupled_adam.models.fused_kernels")


def test_gelu_is_exact_in_float32(kernels: Any) -> None:
    x = torch.linspace(-12, 12, 10_001, device=DEVICE)
    exact = x.double().requires_grad_()
    expected = F.gelu(exact)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    kernels.gelu(x, y)
    kernels.gelu_backward(x, torch.ones_like(x), slope)
    expected.sum().backward()
    assert exact.grad is not None
    assert (y - expected).abs().max() < 5e-7
    assert (slope - exact.grad).abs().max() < 5e-7
    # Here erf is so close to -1 that torch's float32 loses most digits.
    tail = (x > -4.5) & (x < -1)
    assert ((y - expected) / expected)[tail].abs().max() < 2e-3


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 4096), (7, 11, 96)])
def test_gelu_of_any_shape_in_bf16(kernels: Any, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    exact = x.double().requires_grad_()
    F.gelu(exact).backward(grad.double())
    y = torch.ops.coupled_adam.gelu(x)
    grad_x = torch.ops.coupled_adam.gelu_backward(x, grad)
    torch.testing.assert_close(y.double(), F.gelu(x.double()), rtol=ROUNDING, atol=1e-6)
    torch.testing.assert_close(grad_x.double(), exact.grad, rtol=ROUNDING, atol=1e-6)


def sum_and_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, F.layer_norm(total, weight.shape, weight, eps=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 5, 96), (2, 70, 64), (1, 9, 1000)])
def test_residual_sum_and_norm_give_values_and_gradients(kernels: Any, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad_total = (3 * torch.randn(shape, generator=generator).to(DEVICE) + 1 for _ in range(2))
    branch, grad_y = (torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(DEVICE)
    exact = [tensor.double().requires_grad_() for tensor in (x, branch, weight)]
    expected_total, expected_y = sum_and_norm(*exact)
    torch.autograd.backward([expected_total, expected_y], [grad_total.double(), grad_y.double()])

    total, y, mean, rstd = torch.ops.coupled_adam.add_norm(x, branch, weight, 1e-5)
    grad_x, grad_branch, grad_weight = torch.ops.coupled_adam.add_norm_backward(
        grad_total, grad_y, total, weight, mean, rstd
    )
    assert total.dtype == grad_x.dtype == grad_weight.dtype == torch.float32
    assert y.dtype == grad_branch.dtype == torch.bfloat16
    torch.testing.assert_close(total.double(), expected_total.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y.double(), expected_y.detach(), rtol=ROUNDING, atol=1e-5)
    torch.testing.assert_close(grad_x.double(), exact[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_branch.double(), exact[1].grad, rtol=ROUNDING, atol=1e-5)
    torch.testing.assert_close(grad_weight.double(), exact[2].grad, rtol=1e-4, atol=1e-4)


def test_the_operators_are_well_behaved(kernels: Any) -> None:
    """torch's own checks: the schema, the shapes and dtypes that the compiler assumes, no aliases."""
    x = torch.randn(2, 3, 16, device=DEVICE)
    branch, weight = x.bfloat16(), torch.ones(16, device=DEVICE)
    operators = torch.ops.coupled_adam
    torch.library.opcheck(operators.gelu.default, (branch,))
    torch.library.opcheck(operators.gelu_backward.default, (branch, branch))
    torch.library.opcheck(operators.add_norm.default, (x, branch, weight, 1e-5))
    statistics = torch.ones(2, 3, device=DEVICE)
    torch.library.opcheck(operators.add_norm_backward.default, (x, branch, x, weight, statistics, statistics))


def test_without_a_gpu_torch_does_the_same() -> None:
    x, branch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    norm = nn.LayerNorm(8, bias=False)
    total, y = fused.add_norm(x, branch, norm)
    assert torch.equal(total, x + branch)
    assert torch.equal(y, norm(x + branch))
    same, y = fused.add_norm(x, None, norm)
    assert same is x
    assert torch.equal(y, norm(x))
    assert torch.equal(fused.gelu(x), F.gelu(x))
