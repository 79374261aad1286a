"""The recorded step is bitwise equal to the plain one, and recording changes nothing."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.optimizer import param_groups
from coupled_adam.training.optimizers import EmbeddingOptimizers, build_optimizers
from coupled_adam.training.train_step import TrainStep

pytestmark = pytest.mark.gpu
V, T = 512, 64
AUTOCAST = functools.partial(torch.autocast, "cuda", torch.bfloat16)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def small_model(layers: int = 2) -> LanguageModel:
    model = build_model(ModelConfig("gpt2", layers, heads=2, width=128, context=T, vocabulary_size=V)).cuda()
    initialise(model, seed=1)
    return model


def batch(step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(0, V, (size, T + 1), generator=generator).square().remainder(V).cuda()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def split(tokens_and_targets: tuple[Tensor, Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.chunk(parts) for part in tokens_and_targets), strict=True))


def optimizers_of(model: LanguageModel, embeddings: str, capturable: bool = True) -> EmbeddingOptimizers:
    factor = 100.0 if embeddings == "sgd" else None
    section = OptimizerSection(embeddings=embeddings, lr=1e-3, sgd_factor=factor, max_grad_norm=0.5)
    return build_optimizers(model, section, capturable=capturable)


def lr_of(step: int) -> float:
    return 1e-3 * (step + 1) / 4


def states(optimizers: EmbeddingOptimizers) -> list[Tensor]:
    values = [state.values() for optimizer in optimizers.optimizers for state in optimizer.state.values()]
    return [value for group in values for value in group if isinstance(value, Tensor)]


def assert_same(model: LanguageModel, optimizers: EmbeddingOptimizers, other: LanguageModel, others: Any) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    for value, expected in zip(states(optimizers), states(others), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("embeddings", ["coupled", "adamw", "sgd"])
def test_a_recorded_step_is_bitwise_equal_to_the_plain_one(embeddings: str, parts: int) -> None:
    plain, recorded = small_model(), small_model()
    plain_optimizers, recorded_optimizers = (optimizers_of(model, embeddings) for model in (plain, recorded))
    plain_step = TrainStep(plain, plain_optimizers, precision=AUTOCAST)
    recorded_step = TrainStep(recorded, recorded_optimizers, precision=AUTOCAST, cuda_graphs=True)
    kept = []
    for step in range(5):
        micro_batches = split(batch(step), parts)
        expected = plain_step(micro_batches, lr_of(step))
        kept.append((recorded_step(micro_batches, lr_of(step)), expected))
        assert_same(recorded, recorded_optimizers, plain, plain_optimizers)
    for actual, expected in kept:  # compared at the end: later steps must not write into earlier results
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
    assert {float(value) for value in states(recorded_optimizers) if value.ndim == 0} == {5.0}


@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_is_recorded_with_its_state() -> None:
    plain = small_model()
    plain_optimizers = optimizers_of(plain, "coupled")
    plain_step = TrainStep(plain, plain_optimizers, precision=AUTOCAST)
    for step in range(3):
        plain_step([batch(step)], lr_of(step))
    resumed = small_model()
    resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
    resumed_optimizers = optimizers_of(resumed, "coupled")
    for optimizer, saved in zip(resumed_optimizers.optimizers, plain_optimizers.optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    resumed_step = TrainStep(resumed, resumed_optimizers, precision=AUTOCAST, cuda_graphs=True)
    for step in range(3, 6):
        plain_step([batch(step)], lr_of(step))
        resumed_step([batch(step)], lr_of(step))
        assert_same(resumed, resumed_optimizers, plain, plain_optimizers)


def test_other_shapes_are_refused() -> None:
    model = small_model()
    train_step = TrainStep(model, optimizers_of(model, "coupled"), precision=AUTOCAST, cuda_graphs=True)
    train_step([batch(0)], 1e-3)
    with pytest.raises(ValueError, match=r"\b1 .*\(6, 64\).*\b2 .*\[\(3, 64\)\]"):
        train_step(split(batch(0), 2), 1e-3)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_step_does_not_wait_for_the_device(cuda_graphs: bool) -> None:
    model = small_model()
    optimizers = optimizers_of(model, "coupled", capturable=cuda_graphs)
    train_step = TrainStep(model, optimizers, precision=AUTOCAST, cuda_graphs=cuda_graphs)
    batches = [batch(step) for step in range(4)]
    train_step([batches[0]], 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens_and_targets in batches[1:]:
            train_step([tokens_and_targets], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def plain_losses(steps: int) -> list[Tensor]:
    """A plain torch loop: all logits, float32 weights, bf16 autocast, AdamW."""
    model = small_model(layers=4)
    optimizer = torch.optim.AdamW(param_groups(model, 0.1, "none"), betas=(0.9, 0.95), eps=1e-8, fused=True)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        tokens, targets = batch(step)
        with AUTOCAST():
            x = model.wte(tokens) + model.wpe(torch.arange(T, device="cuda"))
            for block in model.blocks:
                qkv = F.linear(block.ln_1(x), block.attn.c_attn.weight).chunk(3, dim=-1)
                q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in qkv)
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
                x = x + F.linear(attended, block.attn.c_proj.weight)
                hidden = F.gelu(F.linear(block.ln_2(x), block.mlp.c_fc.weight))
                x = x + F.linear(hidden, block.mlp.c_proj.weight)
            logits = F.linear(model.ln_f(x), model.wte.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_curve_matches_a_plain_loop(compiled: bool) -> None:
    model = small_model(layers=4)
    if compiled:
        model.compile(dynamic=False)
    train_step = TrainStep(model, optimizers_of(model, "adamw"), precision=AUTOCAST, cuda_graphs=True)
    losses = [train_step([batch(step)], 1e-3 * min(1.0, (step + 1) / 20))[0] for step in range(50)]
    actual, expected = torch.stack(losses), torch.stack(plain_losses(50))
    assert expected[-1] < expected[0] - 0.5  # it learns
    assert (actual - expected).abs().max() < 0.02, (actual - expected).abs()


def test_float32_without_autocast_can_be_recorded() -> None:
    plain, recorded = small_model(), small_model()
    plain_step = TrainStep(plain, optimizers_of(plain, "coupled"), precision=contextlib.nullcontext)
    recorded_step = TrainStep(
        recorded, optimizers_of(recorded, "coupled"), precision=contextlib.nullcontext, cuda_graphs=True
    )
    for step in range(4):
        expected, _ = plain_step([batch(step)], 1e-3)
        actual, _ = recorded_step([batch(step)], 1e-3)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-4)
