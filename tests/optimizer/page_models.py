"""The models of docs/models.md, built from transformers configs with random weights, and a batch for each.

Legend: V vocabulary rows, H hidden size, B batch, T positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_model_families import BART, BERT, GPT2, GROUPED, MODERN_BERT, SIZES, T5, VISION, WHISPER, H, V
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SEEN, PREDICTED = (10, 11, 12, 13), 90
"""Tokens of every text, and one that is in none."""
IMAGE_TOKEN, IMAGE_TOKENS = 100, 9
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODED = SPECIAL | {"decoder_start_token_id": 1}
EXPERTS = GROUPED | SPECIAL | {"num_experts_per_tok": 2, "head_dim": 8}

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class PageModel:
    """A row of the page: how to build the model, and its input."""

    build: Callable[[], nn.Module]
    text: Callable[[], Batch]
    """A batch that contains only the tokens in SEEN."""
    extra: Callable[[], Batch] = dict
    """Further inputs that give every parameter a gradient."""


def words() -> Tensor:
    return torch.tensor([SEEN])  # (B, T)


def decoder_batch() -> Batch:
    return {"input_ids": words(), "labels": words()}


def encoder_decoder_batch() -> Batch:
    return decoder_batch() | {"decoder_input_ids": words()}


def speech_batch() -> Batch:
    features = torch.randn(1, WHISPER["num_mel_bins"], 2 * WHISPER["max_source_positions"])
    return {"input_features": features, "decoder_input_ids": words(), "labels": words()}


def picture() -> Batch:
    tokens = torch.tensor([[*SEEN, *[IMAGE_TOKEN] * IMAGE_TOKENS]])
    return {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(1, 3, 12, 12)}


def from_config(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return built

    return build


def llava() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    built: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return built


def lora(*targets: str, saved: tuple[str, ...] = (), tied: bool = False, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=list(targets), modules_to_save=list(saved) or None, **options)
        llama = from_config("LlamaForCausalLM", "LlamaConfig", **SIZES, tie_word_embeddings=tied)()
        adapted: nn.Module = peft.get_peft_model(llama, config)
        return adapted

    return build


CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | SPECIAL),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8}),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "Phi": ("PhiForCausalLM", "PhiConfig", GROUPED),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | SPECIAL),
    "BERT": ("BertForMaskedLM", "BertConfig", BERT),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", BERT | MODERN_BERT),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS | {"num_local_experts": 4}),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", EXPERTS | {"num_experts": 4}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        EXPERTS | {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    ),
}
MODELS: dict[str, PageModel] = {
    name: PageModel(from_config(model, config, **options), decoder_batch)
    for name, (model, config, options) in CAUSAL.items()
} | {
    "T5": PageModel(
        from_config("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0), encoder_decoder_batch
    ),
    "BART": PageModel(
        from_config("BartForConditionalGeneration", "BartConfig", **BART | ENCODED, max_position_embeddings=24),
        encoder_decoder_batch,
    ),
    "Whisper": PageModel(
        from_config("WhisperForConditionalGeneration", "WhisperConfig", **BART | WHISPER), speech_batch
    ),
    "LLaVA": PageModel(llava, decoder_batch, picture),
    "LoRA, trained tables": PageModel(lora("q_proj", saved=("lm_head", "embed_tokens")), decoder_batch),
    "LoRA, trained tied table": PageModel(
        lora("q_proj", saved=("embed_tokens",), tied=True, ensure_weight_tying=True), decoder_batch
    ),
}
FROZEN: dict[str, Callable[[], nn.Module]] = {
    "LoRA, frozen tables": lora("q_proj"),
    "LoRA on the tables": lora("q_proj", "lm_head", "embed_tokens"),
    "LoRA, half of a tie": lora("q_proj", saved=("embed_tokens",), tied=True),
}

__all__ = ["FROZEN", "MODELS", "PREDICTED", "SEEN", "H", "PageModel", "V", "from_config"]
