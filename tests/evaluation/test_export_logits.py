"""The exported model, loaded by transformers, computes the same as ours."""

import json
from pathlib import Path

import pytest
import torch
from export_models import logits_of, small_config, some_tokens, trained_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from coupled_adam.evaluation.export import export_model
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig

KINDS = [
    pytest.param(small_config(architecture, tied=tied, bias=bias), id=f"{architecture}-tied={tied}-bias={bias}")
    for architecture, bias in (("gpt2", False), ("gpt2", True), ("llama", False))
    for tied in (True, False)
]
# StableLM uses the same operations as ours; GPT-2's linear layers use another one, with transposed weights.
BOUND = {"gpt2": 1e-6, "llama": 0.0}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "StableLmForCausalLM"}


def exported(model: LanguageModel, folder: Path, attention: str = "sdpa", **options: object) -> PreTrainedModel:
    export_model(model.config, dict(model.named_parameters()), None, folder, **options)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report  # nothing is missing, unexpected or of another shape
    return loaded.eval()


@torch.no_grad()
def difference(ours: LanguageModel, theirs: PreTrainedModel, tokens: torch.Tensor) -> float:
    """The largest difference of the logits, relative to the largest logit."""
    expected = logits_of(ours, tokens)
    return float((theirs(tokens).logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("config", KINDS)
def test_logits_are_equal_if_the_operations_are(config: ModelConfig, tmp_path: Path) -> None:
    model = trained_model(config)
    theirs = exported(model, tmp_path / "model")
    assert type(theirs).__name__ == CLASSES[config.architecture]
    assert difference(model, theirs, some_tokens(config)) <= BOUND[config.architecture]


@pytest.mark.parametrize("config", KINDS)
def test_logits_are_the_same_up_to_rounding_with_eager_attention(config: ModelConfig, tmp_path: Path) -> None:
    model = trained_model(config)
    assert difference(model, exported(model, tmp_path / "model", "eager"), some_tokens(config)) < 1e-5


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_logits_are_the_same_at_the_end_of_a_long_context(architecture: str, tmp_path: Path) -> None:
    # A RoPE angle grows with the position, and so does the effect of the last bit of its frequency.
    config = small_config(architecture, width=128, context=2048)
    model, tokens = trained_model(config), some_tokens(config, batch=1)
    assert difference(model, exported(model, tmp_path / "sdpa"), tokens) <= BOUND[architecture]
    assert difference(model, exported(model, tmp_path / "eager", "eager"), tokens) < 1e-5


@pytest.mark.parametrize("config", KINDS)
def test_tying_is_kept(config: ModelConfig, tmp_path: Path) -> None:
    theirs = exported(trained_model(config), tmp_path / "model")
    tables = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    assert (tables[0] is tables[1]) == theirs.config.tie_word_embeddings == config.tied


def test_bfloat16_weights_are_rounded_once_and_loaded_unchanged(tmp_path: Path) -> None:
    model = trained_model(small_config())
    theirs = exported(model, tmp_path / "model", dtype="bfloat16")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.transformer.wte.weight, model.wte.weight.to(torch.bfloat16))
    assert torch.equal(theirs.transformer.h[1].mlp.c_fc.weight.T, model.blocks[1].mlp.c_fc.weight.to(torch.bfloat16))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_generation_continues_like_our_model(architecture: str, tmp_path: Path) -> None:
    model = trained_model(small_config(architecture))
    theirs = exported(model, tmp_path / "model")
    tokens = some_tokens(model.config, batch=1)[:, :5]
    continued = tokens
    for _ in range(8):
        continued = torch.cat([continued, logits_of(model, continued)[:, -1:].argmax(-1)], dim=1)
    generated = theirs.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, continued)


def test_the_config_has_the_sizes_that_evaluation_programs_read(tmp_path: Path) -> None:
    for architecture in CLASSES:
        config = small_config(architecture)
        loaded = exported(trained_model(config), tmp_path / architecture, end_of_text=7).config
        assert loaded.vocab_size == config.vocabulary_size  # including the padding rows of the table
        assert loaded.max_position_embeddings == config.context
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (7, 7, None)
        written = json.loads((tmp_path / architecture / "config.json").read_text())
        assert written["partial_rotary_factor" if architecture == "llama" else "n_positions"] in (1.0, config.context)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    config = small_config()
    weights = dict(trained_model(config).named_parameters())
    without = {name: weight for name, weight in weights.items() if name != "ln_f.weight"}
    for wrong, message in (
        (without, r"'ln_f.weight' is missing"),
        (weights | {"ln_f.weight": torch.ones(3)}, r"'ln_f.weight' has shape \(3,\), expected \(16,\)"),
        (weights | {"lm_head.weight": weights["wte.weight"]}, r"'lm_head.weight' is not a parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model(config, wrong, None, tmp_path / "model")
    assert not list(tmp_path.iterdir())
