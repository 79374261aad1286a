"""Both architectures compared with Hugging Face's models, the tables that the optimizer finds, and learning."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

V, T = 97, 24


def small(architecture: str, **options: Any) -> LanguageModel:
    config = ModelConfig(architecture, layers=2, heads=4, width=32, context=T, vocabulary_size=V, **options)
    model = build_model(config)
    initialise(model, seed=1)
    return model


def some_tokens(batch: int = 3, length: int = T) -> Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(0))


def spread_out(model: nn.Module) -> None:
    """Set large random weights, including norms and biases: GPT-2's initial q and k hardly affect attention."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 2 else 1.0))


def as_hugging_face_gpt2(model: LanguageModel) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=T, n_embd=32, n_layer=2, n_head=4, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=model.config.tied,
        attn_implementation="eager",
    )  # fmt: skip
    reference: nn.Module = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            ours = name.removeprefix("transformer.").replace("h.", "blocks.", 1 if ".h." in name else 0)
            found = dict(model.named_parameters()).get(ours)
            if found is None:
                assert name.endswith("bias")
                parameter.zero_()
            else:  # transformers stores the matrices of GPT-2's blocks transposed
                parameter.copy_(found.T if ".c_" in name and found.ndim == 2 else found)
    return reference.eval()


def as_hugging_face_stablelm(model: LanguageModel) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.StableLmConfig(
        vocab_size=V, intermediate_size=model.config.mlp_width, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=T, partial_rotary_factor=1.0,
        layer_norm_eps=1e-5, tie_word_embeddings=model.config.tied, attn_implementation="eager",
    )  # fmt: skip
    reference: nn.Module = transformers.StableLmForCausalLM(config)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            found = dict(model.named_parameters()).get(name.removeprefix("model.").replace("layers.", "blocks."))
            if found is None:
                assert name.endswith("bias")
                parameter.zero_()
            else:
                parameter.copy_(found)
    return reference.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gpt2_gives_the_logits_of_hugging_face(tied: bool, bias: bool) -> None:
    model = small("gpt2", tied=tied, bias=bias)
    spread_out(model)
    reference = as_hugging_face_gpt2(model)
    tokens = some_tokens()
    expected = reference(tokens).logits
    assert (model(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_llama_gives_the_logits_of_hugging_face(tied: bool) -> None:
    model = small("llama", tied=tied)
    spread_out(model)
    reference = as_hugging_face_stablelm(model)
    tokens = some_tokens()
    expected = reference(tokens).logits
    assert (model(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_loss_is_the_cross_entropy_of_the_logits(architecture: str) -> None:
    model, tokens = small(architecture), some_tokens()
    spread_out(model)
    targets = tokens.roll(-1, dims=1)
    targets[:, -1] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    losses = model(tokens, targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert (losses[:, -1] == 0).all()
    torch.testing.assert_close(model(tokens, targets), expected.sum() / (targets != -100).sum())
    lse = model(tokens).logsumexp(-1)[:, :-1]
    torch.testing.assert_close(model(tokens, targets, z_loss=0.1), model(tokens, targets) + 0.1 * lse.square().mean())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_gradients_equal_those_of_the_plain_head(architecture: str, tied: bool) -> None:
    model, tokens = small(architecture, tied=tied).double(), some_tokens()
    targets = tokens.roll(-1, dims=1)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens, targets).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_token_does_not_affect_earlier_positions(architecture: str) -> None:
    model, tokens = small(architecture), some_tokens()
    spread_out(model)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % V
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-5)
    assert (before[:, 10:] - after[:, 10:]).abs().amax(dim=(0, 2)).min() > 0.01


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_positions_matter(architecture: str) -> None:
    model = small(architecture)
    spread_out(model)
    tokens = some_tokens(1)
    swapped = tokens.clone()
    swapped[:, [2, 5]] = tokens[:, [5, 2]]  # without positions, the sum over keys at the end would not change
    assert tokens[0, 2] != tokens[0, 5]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 0.01


@pytest.mark.parametrize(("architecture", "table"), [("gpt2", "wte.weight"), ("llama", "embed_tokens.weight")])
def test_the_optimizer_finds_the_tables(architecture: str, table: str) -> None:
    tied = {group["name"]: dict(group["params"]) for group in param_groups(small(architecture), 0.1)}
    assert list(tied["output_embeddings"]) == [table]
    assert "input_embeddings" not in tied
    model = small(architecture, tied=False)
    groups = param_groups(model, 0.1, couple="all")
    untied = {group["name"]: dict(group["params"]) for group in groups}
    assert list(untied["output_embeddings"]) == [model.output_table_name] == ["lm_head.weight"]
    assert list(untied["input_embeddings"]) == [model.input_table_name] == [table]
    decayed = {group["name"] for group in groups if group["weight_decay"]}
    assert decayed == {"decay"}
    undecayed = set(untied["no_decay"])
    assert {"ln_f.weight", "wpe.weight"} <= undecayed if architecture == "gpt2" else "norm.weight" in undecayed
    assert all(".weight" in name and ("attn" in name or "mlp" in name) for name in untied["decay"])
    per_layer = 4 if architecture == "gpt2" else 7
    assert len(untied["decay"]) == 2 * per_layer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_batch_can_be_memorised(architecture: str, tied: bool) -> None:
    torch.manual_seed(0)
    model, tokens = small(architecture, tied=tied), some_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optimizer = CoupledAdamW(model, lr=1e-2, betas=(0.9, 0.95), max_grad_norm=1.0)
    first = model(inputs, targets).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    assert first == pytest.approx(torch.tensor(V).log().item(), abs=0.1)
    assert loss.item() < 0.1
    assert (model(inputs).argmax(-1) == targets).float().mean() > 0.95


def test_bf16_autocast_stays_close_to_float32() -> None:
    model, tokens = small("gpt2"), some_tokens()
    targets = tokens.roll(-1, dims=1)
    exact = model(tokens, targets)
    exact.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - expected[name]).norm() < 0.03 * expected[name].norm(), name


def test_sequences_that_do_not_fit_are_refused() -> None:
    model = small("gpt2")
    with pytest.raises(ValueError, match=r"tokens\b.*\(2, 25\).*\(B, T\).*\b24\b"):
        model(torch.zeros(2, T + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens\b.*\(24,\).*\(B, T\)"):
        model(torch.zeros(T, dtype=torch.int64))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_loss_and_gradients() -> None:
    model, tokens = small("gpt2"), some_tokens()
    targets = tokens.roll(-1, dims=1)
    expected = model(tokens, targets, z_loss=0.01)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(tokens, targets, z_loss=0.01)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens, targets, reduction="none").mean(), model(tokens, targets))
