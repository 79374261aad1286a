"""The optimizers of a run: their parameters and learning rates, and gradient clipping."""

import math

import pytest
import torch
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.training.optimizers import build_optimizers, centre

V, H = 37, 8


def small_model(tied: bool = True) -> LanguageModel:
    model = build_model(ModelConfig("gpt2", layers=1, heads=2, width=H, context=16, vocabulary_size=V, tied=tied))
    initialise(model, seed=3)
    return model


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    tokens = torch.randint(0, V, (4, 17), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def section(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"lr": 1e-2, **values})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def grad_norm(model: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


@pytest.mark.parametrize("name", ["adamw", "coupled", "sgd"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_the_norm_is_that_of_all_gradients_before_clipping(name: str, max_grad_norm: float) -> None:
    model = small_model()
    optimizers = build_optimizers(
        model, section(embeddings=name, max_grad_norm=max_grad_norm, sgd_factor=10.0 if name == "sgd" else None)
    )
    loss_of(model).backward()
    expected = grad_norm(model)
    assert float(optimizers.step()) == pytest.approx(expected, rel=1e-5)
    assert expected > 0.1  # otherwise nothing would be clipped


def test_adamw_equals_torchs_adamw_with_clipping_and_decay_only_on_linear_layers() -> None:
    model, reference = small_model(), small_model()
    optimizers = build_optimizers(model, section(embeddings="adamw", max_grad_norm=0.1, weight_decay=0.5))
    linear = [p for n, p in reference.named_parameters() if "c_" in n and n.endswith("weight")]
    others = [p for n, p in reference.named_parameters() if not ("c_" in n and n.endswith("weight"))]
    torch_adamw = torch.optim.AdamW(
        [{"params": linear, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(3):
        for net in (model, reference):
            net.zero_grad()
            loss_of(net, step).backward()
        optimizers.step()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch_adamw.step()
    for name, expected in weights(reference).items():
        torch.testing.assert_close(weights(model)[name], expected, rtol=1e-5, atol=1e-7)


def test_sgd_trains_only_the_table_with_momentum_and_its_learning_rate_factor() -> None:
    model = small_model()
    optimizers = build_optimizers(model, section(embeddings="sgd", sgd_factor=30.0, max_grad_norm=0.0))
    optimizers.set_lr(2e-3)
    expected = model.get_parameter("wte.weight").detach().double().clone()
    momentum = torch.zeros_like(expected)
    for step in range(3):
        optimizers.zero_grad()
        loss_of(model, step).backward()
        gradient = model.get_parameter("wte.weight").grad
        assert gradient is not None
        momentum = 0.9 * momentum + gradient.double()
        expected -= 30.0 * 2e-3 * momentum
        optimizers.step()
    torch.testing.assert_close(model.get_parameter("wte.weight").detach().double(), expected, rtol=1e-5, atol=1e-6)
    sgd, adamw = optimizers.optimizers
    assert isinstance(adamw, torch.optim.AdamW)
    assert [p.shape for group in sgd.param_groups for p in group["params"]] == [(V, H)]


@pytest.mark.parametrize(("couple", "coupled"), [("output", {"lm_head.weight"}), ("input", {"wte.weight"})])
def test_couple_selects_the_table_of_an_untied_model(couple: str, coupled: set[str]) -> None:
    model = small_model(tied=False)
    optimizer = build_optimizers(model, section(embeddings="coupled", couple=couple)).optimizers[0]
    assert isinstance(optimizer, CoupledAdamW)
    names = {p: n for n, p in model.named_parameters()}
    found = {names[p] for group in optimizer.param_groups if group["coupled"] for p in group["params"]}
    assert found == coupled


@pytest.mark.parametrize("name", ["adamw", "coupled"])
def test_centring_removes_the_mean_embedding_and_moves_every_row_equally(name: str) -> None:
    plain, centred = small_model(), small_model()
    for model, wanted in ((plain, False), (centred, True)):
        optimizers = build_optimizers(model, section(embeddings=name, centre=wanted))
        loss_of(model).backward()
        optimizers.step()
    table, reference = weights(centred)["wte.weight"], weights(plain)["wte.weight"]
    assert reference.mean(dim=0).abs().max() > 1e-4
    torch.testing.assert_close(table, reference - reference.double().mean(dim=0).float(), rtol=0, atol=1e-8)
    assert table.mean(dim=0).abs().max() < 1e-8
    for other in weights(plain).keys() - {"wte.weight"}:
        assert torch.equal(weights(plain)[other], weights(centred)[other])


def test_centring_a_table_again_changes_nothing() -> None:
    table = torch.randn(V, H, generator=torch.Generator().manual_seed(0)) + 5
    centre(table)
    once = table.clone()
    centre(table)
    torch.testing.assert_close(table, once, rtol=0, atol=1e-6)
