"""The residual stream in bfloat16: the kernels and torch's operations against float64, and where it is narrow."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.models import fused
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, Triton's interpreter
# bf16 has 8 bits, and Triton's interpreter cuts the others off instead of rounding.
ROUNDING = 4e-3 if DEVICE == "cuda" else 8e-3
MODELS = [("gpt2", False), ("gpt2", True), ("llama", False)]


def drawn(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """x, branch and the gradients of the sum and of its norm, all in bfloat16; and the weight, in float32."""
    generator = torch.Generator().manual_seed(0)
    x, branch, grad_total, grad_y = (torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for _ in "1234")
    return 3 * x + 1, branch, 3 * grad_total, grad_y, torch.randn(shape[-1], generator=generator).to(DEVICE)


def in_float64(total: Tensor, weight: Tensor, grad_total: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of a sum, and the gradients of the sum and of the weight."""
    total, weight = (tensor.detach().double().requires_grad_() for tensor in (total, weight))
    y = F.layer_norm(total, weight.shape, weight, eps=1e-5)
    torch.autograd.backward([total, y], [grad_total.double(), grad_y.double()])
    assert total.grad is not None
    assert weight.grad is not None
    return y.detach(), total.grad, weight.grad


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 9, 64), (1, 5, 1000)])
def test_kernels_round_only_what_they_store(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    x, branch, grad_total, grad_y, weight = drawn(shape)
    operators = torch.ops.coupled_adam
    total, y, mean, rstd = operators.add_norm(x, branch, weight, 1e-5)
    results = operators.add_norm_backward(grad_total, grad_y, total, weight, mean, rstd)
    assert total.dtype == y.dtype == torch.bfloat16
    assert mean.dtype == rstd.dtype == torch.float32
    assert [tensor.dtype for tensor in results] == [torch.bfloat16, torch.bfloat16, torch.float32]
    torch.testing.assert_close(total.double(), x.double() + branch.double(), rtol=ROUNDING, atol=0)
    # Everything after the sum is that of the stored sum, so it is rounded once more at most.
    exact = total.double()
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), (exact.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-4, atol=0)
    expected_y, expected_grad, expected_weight_grad = in_float64(total, weight, grad_total, grad_y)
    torch.testing.assert_close(y.double(), expected_y, rtol=ROUNDING, atol=1e-5)
    torch.testing.assert_close(results[0].double(), expected_grad, rtol=ROUNDING, atol=1e-5)
    assert results[1].numel() == 0  # both summands have this gradient
    torch.testing.assert_close(results[2].double(), expected_weight_grad, rtol=1e-4, atol=1e-4)


def test_fused_and_plain_sum_agree() -> None:
    """The operator as autograd calls it, and what runs without a GPU, both as near to float64 as bfloat16 allows."""
    pytest.importorskip("triton")
    x, branch, grad_total, grad_y, weight = drawn((2, 7, 96))
    norm = nn.LayerNorm(96, bias=False, device=DEVICE)
    norm.weight = nn.Parameter(weight)

    def results(is_fused: bool) -> list[Tensor]:
        norm.weight.grad = None
        leaves = [x.clone().requires_grad_(), branch.clone().requires_grad_()]
        if is_fused:
            total, y, _, _ = torch.ops.coupled_adam.add_norm(*leaves, norm.weight, norm.eps)
        else:
            with pytest.MonkeyPatch.context() as patch, torch.autocast(DEVICE, torch.bfloat16):
                patch.setattr(fused, "HAS_TRITON", False)
                total, y = fused.add_norm(*leaves, norm)
        torch.autograd.backward([total, y], [grad_total, grad_y.to(y.dtype)])
        assert total.dtype == torch.bfloat16
        gradients = [tensor.grad for tensor in (*leaves, norm.weight)]
        return [total.detach(), y.detach(), *(gradient for gradient in gradients if gradient is not None)]

    ours, plain = results(is_fused=True), results(is_fused=False)
    assert [tensor.dtype for tensor in plain[2:]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for total, y, grad_x, grad_branch, grad_weight in (ours, plain):
        assert torch.equal(grad_x, grad_branch)
        expected_y, expected_grad, expected_weight_grad = in_float64(total, weight, grad_total, grad_y)
        torch.testing.assert_close(total.double(), x.double() + branch.double(), rtol=ROUNDING, atol=0)
        torch.testing.assert_close(y.double(), expected_y, rtol=ROUNDING, atol=1e-5)
        # The plain gradient is rounded before it is added to that of the sum, too.
        torch.testing.assert_close(grad_x.double(), expected_grad, rtol=ROUNDING, atol=2e-2)
        torch.testing.assert_close(grad_weight.double(), expected_weight_grad, rtol=1e-4, atol=1e-4)
    for a, b in zip(ours[2:4], plain[2:4], strict=True):
        torch.testing.assert_close(a, b, rtol=2 * ROUNDING, atol=4e-2)


def test_operators_are_well_behaved_in_bfloat16() -> None:
    """torch's own checks: the schema, what the compiler believes of shapes and dtypes, no aliases."""
    pytest.importorskip("triton")
    x, weight = torch.randn(2, 3, 16, device=DEVICE).bfloat16(), torch.ones(16, device=DEVICE)
    statistics = torch.ones(2, 3, device=DEVICE)
    operators = torch.ops.coupled_adam
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operators.add_norm.default, (x, x.clone(), weight, 1e-5), test_utils=checks)
    arguments = x, x.clone(), x.clone(), weight, statistics, statistics
    torch.library.opcheck(operators.add_norm_backward.default, arguments, test_utils=checks)


def model_of(architecture: str, bias: bool, residual_dtype: str) -> LanguageModel:
    shape: dict[str, Any] = {"layers": 3, "heads": 2, "width": 32, "context": 16, "vocabulary_size": 64}
    model = build_model(ModelConfig(architecture, bias=bias, residual_dtype=residual_dtype, **shape)).to(DEVICE)
    initialise(model, seed=1)
    return model


def gradients(model: LanguageModel, autocast: bool) -> tuple[Tensor, dict[str, Tensor], set[torch.dtype]]:
    """Loss and gradients of a batch; and the dtypes of what the blocks get, of its gradient, and pass on."""
    dtypes: set[torch.dtype] = set()

    def look(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        for stream in (inputs[0], outputs[0]):
            dtypes.add(stream.dtype)
            stream.register_hook(lambda gradient: dtypes.add(gradient.dtype))

    for block in model.blocks:
        block.register_forward_hook(look)
    windows = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(windows[:, :-1], windows[:, 1:])
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), found, dtypes


@pytest.mark.parametrize(("architecture", "bias"), MODELS)
def test_stream_is_narrow_under_autocast_and_close_to_float64(architecture: str, bias: bool) -> None:
    exact_loss, exact, _ = gradients(model_of(architecture, bias, "float32").double(), autocast=False)

    def error(found: dict[str, Tensor]) -> float:
        flat, expected = (torch.cat([each[name].double().flatten() for name in exact]) for each in (found, exact))
        return float((flat - expected).norm() / expected.norm())

    loss, wide, dtypes = gradients(model_of(architecture, bias, "float32"), autocast=True)
    assert dtypes == {torch.float32}
    narrow_loss, narrow, narrow_dtypes = gradients(model_of(architecture, bias, "bfloat16"), autocast=True)
    assert narrow_dtypes == {torch.bfloat16}
    assert {gradient.dtype for gradient in narrow.values()} == {torch.float32}
    assert not torch.equal(narrow_loss, loss)
    assert abs(narrow_loss - exact_loss) < 5e-3
    assert error(narrow) < 0.02
    assert error(narrow) < 3 * error(wide)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_without_autocast_the_setting_changes_nothing(architecture: str) -> None:
    loss, expected, _ = gradients(model_of(architecture, False, "float32"), autocast=False)
    same_loss, found, dtypes = gradients(model_of(architecture, False, "bfloat16"), autocast=False)
    assert dtypes == {torch.float32}
    assert torch.equal(loss, same_loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UserError, match=r"residual_dtype.*'float16'"):
        ModelConfig("gpt2", layers=1, heads=1, width=8, residual_dtype="float16")
