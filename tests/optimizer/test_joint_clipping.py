"""Clipping two optimizers by their joint gradient norm equals clip_grad_norm_ over all parameters before both steps."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import relative_error
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from coupled_adam import BatchedMuon, CoupledAdamW, clip_together, hidden_matrices

Muon = getattr(torch.optim, "Muon", BatchedMuon)  # torch has one from 2.9 on
IMPLEMENTATIONS = [{}, {"fused": True}, {"foreach": False}, {"foreach": True}, {"row_exponent": 0.5, "mean_free": True}]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 40, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(-1))


def two_optimizers(model: nn.Module, **options: Any) -> tuple[CoupledAdamW, torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    # Not Muon: it ignores the gradients' scale, and its bfloat16 products would hide a slightly wrong factor.
    return CoupledAdamW(model, lr=0.01, exclude=matrices, **options), torch.optim.SGD(matrices, lr=1.0, momentum=0.5)


def backward(model: nn.Module, step: int) -> Tensor:
    model.zero_grad()
    loss: Tensor = 20 * model(torch.randint(40, (30,), generator=torch.Generator().manual_seed(step)))
    loss.backward()
    return loss


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-6, name


def trained_with_clip_grad_norm(start: nn.Module, max_norm: float, steps: int = 4, **options: Any) -> nn.Module:
    model = copy.deepcopy(start)
    optimizers = two_optimizers(model, **options)
    for step in range(steps):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
    return model


@pytest.fixture
def start() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("options", IMPLEMENTATIONS, ids=str)
def test_clipping_together_equals_clip_grad_norm_before(
    path: ModuleType, start: nn.Module, options: dict[str, Any], max_norm: float
) -> None:
    model = copy.deepcopy(start)
    coupled, other = two_optimizers(model, **options)
    clip_together(coupled, other, max_norm=max_norm)
    for step in range(4):
        backward(model, step)
        gradients = [p.grad.clone() for p in model.parameters()]
        coupled.step()
        other.step()
        norm = nn.utils.get_total_norm(gradients)
        assert coupled.grad_norm is not None
        assert coupled.grad_factor is not None
        torch.testing.assert_close(coupled.grad_norm, norm)
        torch.testing.assert_close(coupled.grad_factor, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        assert (norm > max_norm) == (max_norm == 0.1)
    assert_same_weights(model, trained_with_clip_grad_norm(start, max_norm, **options))


def test_muon_beside_coupled_adamw_is_clipped_as_by_torch(start: nn.Module) -> None:
    """Muon's step hardly depends on the length of its gradients, its momentum does."""
    trained = []
    for together in (True, False):
        model = copy.deepcopy(start)
        matrices = hidden_matrices(model)
        coupled, muon = CoupledAdamW(model, lr=0.01, exclude=matrices), Muon(matrices, lr=0.02)
        if together:
            clip_together(coupled, muon, max_norm=0.1)
        for step in range(3):
            backward(model, step)
            if not together:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            coupled.step()
            muon.step()
        trained.append([muon.state[tensor]["momentum_buffer"] for _, tensor in matrices])
    for mine, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-4)  # bfloat16 in between
        assert mine.norm() < 0.2


def test_three_optimizers_share_one_norm(start: nn.Module) -> None:
    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        (_, first), *rest = matrices = hidden_matrices(model)
        coupled = CoupledAdamW(model, lr=0.01, exclude=matrices)
        return [coupled, torch.optim.SGD([first], lr=1.0), torch.optim.AdamW(rest, lr=0.01)]

    model, expected = copy.deepcopy(start), copy.deepcopy(start)
    optimizers, references = build(model), build(expected)
    clip_together(*optimizers, max_norm=0.1)
    for step in range(3):
        backward(model, step)
        backward(expected, step)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        for optimizer in optimizers + references:
            optimizer.step()
    assert_same_weights(model, expected)


def test_the_norm_and_the_factor_can_be_passed_by_hand(start: nn.Module) -> None:
    """The steps of clip_together, for loops that do them by hand."""
    model = copy.deepcopy(start)
    coupled, other = two_optimizers(model, max_grad_norm=0.1)
    for step in range(4):
        backward(model, step)
        gradients = [p.grad for _, p in hidden_matrices(model)]
        coupled.other_square_norm = nn.utils.get_total_norm(gradients).square()
        coupled.step()
        torch._foreach_mul_(gradients, coupled.grad_factor)
        other.step()
    assert_same_weights(model, trained_with_clip_grad_norm(start, 0.1))


def test_a_step_is_clipped_even_if_only_the_others_have_gradients(start: nn.Module) -> None:
    coupled, other = two_optimizers(start)
    clip_together(coupled, other, max_norm=0.5)
    for _, matrix in hidden_matrices(start):
        matrix.grad = torch.ones_like(matrix)
    coupled.step()
    other.step()
    torch.testing.assert_close(coupled.grad_norm, torch.tensor(128.0).sqrt())
    torch.testing.assert_close(nn.utils.get_total_norm([p.grad for _, p in hidden_matrices(start)]), torch.tensor(0.5))


def test_others_without_gradients_do_not_count(start: nn.Module) -> None:
    coupled, other = two_optimizers(start)
    clip_together(coupled, other, max_norm=0.5)
    start.head.weight.grad = torch.ones_like(start.head.weight)
    coupled.step()
    other.step()
    torch.testing.assert_close(coupled.grad_norm, torch.tensor(320.0).sqrt())


def test_closures_are_called_before_the_norm_is_computed(start: nn.Module) -> None:
    model = copy.deepcopy(start)
    coupled, other = two_optimizers(model)
    clip_together(coupled, other, max_norm=0.1)

    def closure_of(step: int) -> Callable[[], float]:
        return lambda: backward(model, step).item()

    for step in range(4):
        loss = coupled.step(closure_of(step)) if step % 2 else coupled.step(closure=closure_of(step))
        assert isinstance(loss, float)
        assert other.step(lambda: 7.0) == 7.0
    assert_same_weights(model, trained_with_clip_grad_norm(start, 0.1))


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_compiled_step_is_clipped_together_too(start: nn.Module, by_hand: bool) -> None:
    """Most of the norm comes from the others and differs from step to step."""
    model, expected = copy.deepcopy(start), copy.deepcopy(start)
    (coupled, other), references = two_optimizers(model, max_grad_norm=0.1), two_optimizers(expected)
    if not by_hand:
        clip_together(coupled, other)
    torch._dynamo.reset()
    compiled_step = torch.compile(coupled.step)
    matrices = [p for _, p in hidden_matrices(model)]
    for step in range(3):
        backward(model, step)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            mine.grad *= 100 if any(mine is matrix for matrix in matrices) else 1
            theirs.grad = mine.grad.clone()
        gradients = [p.grad for p in matrices]
        if by_hand:
            coupled.other_square_norm = nn.utils.get_total_norm(gradients).square()
        compiled_step()
        if by_hand:
            torch._foreach_mul_(gradients, coupled.grad_factor)
        other.step()
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        for reference in references:
            reference.step()
        torch.testing.assert_close(coupled.grad_norm, norm)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # a step is about 1e-2 long


def test_schedulers_on_both_do_not_interfere(start: nn.Module) -> None:
    model, expected = copy.deepcopy(start), copy.deepcopy(start)
    optimizers, references = two_optimizers(model), two_optimizers(expected)
    clip_together(*optimizers, max_norm=0.1)
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in (*optimizers, *references)]
    for step in range(3):
        backward(model, step)
        backward(expected, step)
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        for optimizer in (*optimizers, *references):
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same_weights(model, expected)


def test_a_nonfinite_gradient_of_the_others_raises_before_anything_is_written(start: nn.Module) -> None:
    coupled, other = two_optimizers(start, error_if_nonfinite=True)
    clip_together(coupled, other, max_norm=0.1)
    backward(start, 0)
    hidden_matrices(start)[0][1].grad[0, 0] = float("nan")
    before = copy.deepcopy(start.state_dict())
    with pytest.raises(RuntimeError, match="non-finite"):
        coupled.step()
    with pytest.raises(RuntimeError, match="before CoupledAdamW"):
        other.step()
    for name, value in start.state_dict().items():
        assert torch.equal(value, before[name])
    backward(start, 1)
    coupled.step()
    other.step()


def test_a_step_of_the_others_before_coupled_adamw_is_refused(start: nn.Module) -> None:
    coupled, other = two_optimizers(start)
    clip_together(coupled, other, max_norm=0.1)
    backward(start, 0)
    with pytest.raises(RuntimeError, match="SGD takes a step before CoupledAdamW"):
        other.step()
    coupled.step()
    other.step()
    with pytest.raises(RuntimeError, match="SGD takes a step before CoupledAdamW"):
        other.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler_is_refused(start: nn.Module, fused: bool, unscaled: bool) -> None:
    coupled, other = two_optimizers(start, fused=fused)
    clip_together(coupled, other, max_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(start(torch.arange(30))).backward()
    before = copy.deepcopy(start.state_dict())
    if unscaled:
        scaler.unscale_(coupled)
        scaler.unscale_(other)
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(coupled)
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(other)
    for name, value in start.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_disabled_grad_scaler_is_ignored(start: nn.Module) -> None:
    """Loops that select the precision by an option keep a disabled scaler."""
    model = copy.deepcopy(start)
    coupled, other = two_optimizers(model)
    clip_together(coupled, other, max_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(4):
        backward(model, step)
        scaler.step(coupled)
        scaler.step(other)
        scaler.update()
    assert_same_weights(model, trained_with_clip_grad_norm(start, 0.1))


def test_without_a_limit_nothing_is_clipped(start: nn.Module) -> None:
    model = copy.deepcopy(start)
    coupled, other = two_optimizers(model)
    clip_together(coupled, other, max_norm=0.1)
    coupled.max_grad_norm = None
    for step in range(4):
        backward(model, step)
        coupled.step()
        other.step()
    assert_same_weights(model, trained_with_clip_grad_norm(start, float("inf")))


def test_the_limit_can_be_changed_during_training(start: nn.Module) -> None:
    coupled, other = two_optimizers(start, max_grad_norm=1.0)
    clip_together(coupled, other)
    coupled.max_grad_norm = 0.25
    backward(start, 0)
    matrices = [p for _, p in hidden_matrices(start)]
    share = nn.utils.get_total_norm([p.grad for p in matrices]).clone()
    coupled.step()
    other.step()
    clipped = nn.utils.get_total_norm([p.grad for p in matrices])
    torch.testing.assert_close(clipped, share * 0.25 / coupled.grad_norm)


def test_without_other_gradients_the_result_is_bitwise_unchanged(start: nn.Module) -> None:
    """The unused attribute changes nothing."""
    models = [copy.deepcopy(start) for _ in range(2)]
    plain = CoupledAdamW(models[0], lr=0.01, max_grad_norm=0.1)
    zero = CoupledAdamW(models[1], lr=0.01, max_grad_norm=0.1)
    zero.other_square_norm = torch.zeros(())
    for step in range(3):
        for model, optimizer in zip(models, (plain, zero), strict=True):
            backward(model, step)
            optimizer.step()
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_optimizers_that_cannot_be_clipped_together_are_refused(start: nn.Module) -> None:
    coupled, other = two_optimizers(start)
    with pytest.raises(ValueError, match="max_norm"):
        clip_together(coupled, other)
    with pytest.raises(ValueError, match="max_grad_norm value: -1"):
        clip_together(coupled, other, max_norm=-1)
    with pytest.raises(ValueError, match="another optimizer"):
        clip_together(coupled, max_norm=1.0)
    with pytest.raises(TypeError, match="SGD"):
        clip_together(other, coupled, max_norm=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in common"):
        clip_together(CoupledAdamW(start), other, max_norm=1.0)


def test_sparse_gradients_are_refused() -> None:
    sparse = nn.Embedding(4, 2, sparse=True)
    coupled = CoupledAdamW([{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True}], max_grad_norm=1.0)
    other = torch.optim.SGD(sparse.parameters(), lr=0.1)
    clip_together(coupled, other)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        coupled.step()
