"""The soft cap of the logits in the chunked loss, compared with a literal tanh in float64, and in the Triton kernel;
and the penalty on the mean embedding."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.evaluation.downstream.requests_file import TokenRequest
from coupled_adam.evaluation.downstream.scoring import score_requests
from coupled_adam.evaluation.hugging_face import require_class
from coupled_adam.models import loss_operations
from coupled_adam.models.initial import initialise
from coupled_adam.models.loss import linear_cross_entropy
from coupled_adam.models.model_config import ModelConfig, build_model

N, V, H = 37, 101, 16
CAP = 5.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU, Triton's interpreter


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with a bias and standard deviation 4: many are near the cap, some far beyond it."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def written_out(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float, reduction: str
) -> Tensor:
    logits = CAP * torch.tanh(F.linear(hidden, weight, bias) / CAP)
    kept = targets != -100
    log_z = logits.exp().sum(-1).log()
    losses = (log_z - logits[torch.arange(N), targets.where(kept, 0)] + z_loss * log_z**2) * kept
    return losses if reduction == "none" else losses.sum() / kept.sum()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_capped_loss_and_its_gradients_match_a_literal_tanh(
    dtype: torch.dtype, with_bias: bool, reduction: str, z_loss: float
) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    tensors = [hidden, weight, bias] if with_bias else [hidden, weight]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = written_out(exact[0], exact[1], exact[2] if with_bias else None, targets, z_loss, reduction)
    actual = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias if with_bias else None,
        z_loss=z_loss,
        logit_cap=CAP,
        reduction=reduction,
    )
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    token_weights = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * token_weights).sum().backward()
    (actual * token_weights.to(actual.dtype)).sum().backward()
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert (tensor.grad - reference.grad).norm() < 2 * tolerance * reference.grad.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_capped_gradients_match_finite_differences(reduction: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    small = [t.detach().clone().requires_grad_() for t in (hidden[:9, :5], weight[:9, :5], bias[:9])]
    targets = targets[:9].remainder(9)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, z_loss=0.05, logit_cap=2.0, reduction=reduction)

    assert torch.autograd.gradcheck(function, small)


def test_a_compiled_capped_loss_equals_the_eager_one() -> None:
    hidden, weight, bias, targets = inputs()

    def function(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, logit_cap=CAP)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), function(hidden), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [101, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("operations", ["kernels", "torch"])
def test_a_capped_chunk_gives_losses_and_gradients(
    operations: str, dtype: torch.dtype, rows: int, weighted: bool
) -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels") if operations == "kernels" else loss_operations
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, rows, generator=generator)).to(dtype).to(DEVICE)
    bias = torch.randn(rows, generator=generator).to(DEVICE)
    targets = torch.tensor([0, rows - 1, -100, 7, 50], device=DEVICE)
    token_weights = torch.tensor([1.0, -2.0, 3.0, 0.0, 0.5], device=DEVICE) if weighted else None
    exact = logits.double().requires_grad_()
    capped = CAP * torch.tanh((exact + bias.double()) / CAP)
    expected = F.cross_entropy(capped, targets, reduction="none")
    expected = expected + 0.01 * capped.logsumexp(-1).square() * (targets != -100)
    expected.backward(torch.ones_like(expected) if token_weights is None else token_weights.double())
    losses = torch.full((5,), float("nan"), device=DEVICE)
    kernels.cross_entropy(logits.clone(), targets, losses, token_weights, 0.01, -100, False, bias, CAP)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    kernels.cross_entropy(logits, targets, losses, token_weights, 0.01, -100, True, bias, CAP)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # Per element: bf16 has 8 bits, and Triton's interpreter truncates instead of rounding. Near the cap
    # 1 - tanh^2 is a difference of almost equal numbers.
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3 if DEVICE == "cuda" else 8e-3
    assert exact.grad is not None
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=2e-7)


def test_the_triton_kernel_caps_logits_of_any_size() -> None:
    kernels = pytest.importorskip("coupled_adam.models.loss_kernels")
    logits = torch.tensor([[0.0, 1e4, -1e4, 3.0]], device=DEVICE)
    losses = torch.empty(1, device=DEVICE)
    kernels.cross_entropy(logits, torch.tensor([1], device=DEVICE), losses, None, 0.0, -100, True, None, 30.0)
    capped = 30 * torch.tanh(torch.tensor([0.0, 1e4, -1e4, 3.0], dtype=torch.float64) / 30)
    torch.testing.assert_close(losses.double().cpu(), -torch.log_softmax(capped, 0)[1:2], rtol=1e-5, atol=1e-6)
    assert torch.isfinite(logits).all()


def capped_model(cap: float | None = 0.5) -> torch.nn.Module:
    config = ModelConfig("gpt2", layers=1, heads=2, width=16, context=8, vocabulary_size=64, logit_cap=cap)
    model = build_model(config)
    initialise(model, seed=0)
    torch.nn.init.normal_(model.get_parameter("wte.weight"), generator=torch.Generator().manual_seed(1))
    return model


def test_logits_loss_and_chunks_of_a_capped_model_agree_with_the_uncapped_one() -> None:
    model, plain = capped_model(), capped_model(None)
    tokens = torch.arange(16).view(2, 8)
    targets = tokens + 1
    expected = 0.5 * torch.tanh(plain(tokens).double() / 0.5)
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(list(model.logit_chunks(tokens))).double(), expected.flatten(0, 1))
    torch.testing.assert_close(
        model(tokens, targets).double(), F.cross_entropy(expected.flatten(0, 1), targets.flatten()), rtol=1e-6, atol=0
    )


def test_task_scores_use_capped_logits() -> None:
    model = capped_model()
    (score,) = score_requests(model, [TokenRequest(context=(1, 2), continuation=(3,))])
    expected = torch.log_softmax(model(torch.tensor([[1, 2]]))[0, -1].double(), 0)[3]
    assert score.log_likelihood == pytest.approx(expected.item(), rel=1e-5)


def test_a_capped_model_cannot_be_exported() -> None:
    config = ModelConfig("gpt2", layers=1, heads=1, width=8, logit_cap=30.0)
    with pytest.raises(UserError, match=r"model\.logit_cap = 30"):
        require_class(config)


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_a_cap_that_is_not_positive_is_refused(cap: float) -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(UserError, match="logit_cap"):
        linear_cross_entropy(hidden, weight, targets, logit_cap=cap)
    with pytest.raises(UserError, match="logit_cap"):
        ModelConfig("gpt2", layers=1, heads=1, width=8, logit_cap=cap)


@pytest.mark.parametrize("count", [None, 60])
@pytest.mark.parametrize("tied", [True, False])
def test_mu_loss_adds_the_squared_length_of_the_mean_output_embedding(count: int | None, tied: bool) -> None:
    config = ModelConfig("gpt2", layers=1, heads=2, width=16, context=8, vocabulary_size=64, tied=tied)
    model = build_model(config).double()
    initialise(model, seed=0)
    tokens = torch.arange(16).view(2, 8)
    targets = tokens + 1
    table = model.get_parameter(model.output_table_name)
    rows = table.detach()[:count]
    mean = sum(rows) / len(rows)
    plain = model(tokens, targets)
    (plain_gradient,) = torch.autograd.grad(plain, table)
    loss = model(tokens, targets, mu_loss=0.3, token_count=count)
    (gradient,) = torch.autograd.grad(loss, table)
    torch.testing.assert_close(loss, plain.detach() + 0.3 * float(mean @ mean))
    # Every row except padding gets the same gradient, 2 lambda mu / V.
    push = torch.zeros_like(table)
    push[:count] = 2 * 0.3 * mean / len(rows)
    torch.testing.assert_close(gradient - plain_gradient, push)


def test_without_a_cap_the_logits_are_those_of_the_head(tmp_path: Path) -> None:
    model = capped_model(None)
    hidden = torch.randn(3, 16)
    assert torch.equal(model.logits(hidden), model.lm_head(hidden))
