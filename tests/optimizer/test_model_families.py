"""The tables of many model families, from transformers and hand-written, listed by hand.

Letters: V vocabulary rows, H hidden size, T positions.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_models import Block, Parts, found_by
from torch import nn

from coupled_adam.optimizer.groups import param_groups

V, H, T = 128, 16, 24
MLP = 4 * H  # half of V: outside the layers it would be taken for a padded head

GPT2 = {"vocab_size": V, "n_embd": H, "n_layer": 2, "n_head": 2, "n_positions": T}
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 1, "pad_token_id": 0}
BERT = SIZES | {"max_position_embeddings": T}
T5 = {"vocab_size": V, "d_model": H, "d_ff": MLP, "d_kv": 8, "num_layers": 2, "num_heads": 2}
BART = {
    "vocab_size": V,
    "d_model": H,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": MLP,
    "decoder_ffn_dim": MLP,
}
VISION = {
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
}
WHISPER = {"max_source_positions": T, "max_target_positions": T, "num_mel_bins": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MODERN_BERT = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}

LLAMA_TABLES = {"lm_head.weight": "output", "model.embed_tokens.weight": "input"}
GEMMA_TABLES = {"model.embed_tokens.weight": "tied"}

# (class, config, options of the config, tables with their roles)
HUGGING_FACE: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("GPT2LMHeadModel", "GPT2Config", GPT2, {"transformer.wte.weight": "tied"}),
    (
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT2 | UNTIED,
        {"lm_head.weight": "output", "transformer.wte.weight": "input"},
    ),
    ("GPT2DoubleHeadsModel", "GPT2Config", GPT2, {"transformer.wte.weight": "tied"}),
    ("LlamaForCausalLM", "LlamaConfig", SIZES, LLAMA_TABLES),
    ("LlamaForCausalLM", "LlamaConfig", SIZES | TIED, GEMMA_TABLES),
    ("MistralForCausalLM", "MistralConfig", GROUPED, LLAMA_TABLES),
    ("MixtralForCausalLM", "MixtralConfig", GROUPED, LLAMA_TABLES),
    ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, LLAMA_TABLES),
    ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}, LLAMA_TABLES),
    ("PhiForCausalLM", "PhiConfig", GROUPED, LLAMA_TABLES),
    ("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 8}, GEMMA_TABLES),
    ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 8}, GEMMA_TABLES),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8}, GEMMA_TABLES),
    ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES, {"lm_head.weight": "output", "gpt_neox.embed_in.weight": "input"}),
    (
        "OPTForCausalLM",
        "OPTConfig",
        {k: v for k, v in BERT.items() if k != "intermediate_size"} | {"ffn_dim": MLP, "word_embed_proj_dim": 8},
        {"model.decoder.embed_tokens.weight": "tied"},
    ),
    (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": V, "hidden_size": H, "n_layer": 2, "n_head": 2},
        {"transformer.word_embeddings.weight": "tied"},
    ),
    (
        "FalconForCausalLM",
        "FalconConfig",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"},
        {"transformer.word_embeddings.weight": "tied"},
    ),
    (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": V, "d_model": H, "n_heads": 2, "n_layers": 2},
        {"transformer.wte.weight": "tied"},
    ),
    (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 2},
        {"backbone.embeddings.weight": "tied"},
    ),
    ("BertForMaskedLM", "BertConfig", BERT, {"bert.embeddings.word_embeddings.weight": "tied"}),
    ("BertForPreTraining", "BertConfig", BERT, {"bert.embeddings.word_embeddings.weight": "tied"}),
    ("RobertaForMaskedLM", "RobertaConfig", BERT, {"roberta.embeddings.word_embeddings.weight": "tied"}),
    (
        "ElectraForMaskedLM",
        "ElectraConfig",
        BERT | {"embedding_size": 8},
        {"electra.embeddings.word_embeddings.weight": "tied"},
    ),
    (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        BERT | MODERN_BERT,
        {"model.embeddings.tok_embeddings.weight": "tied"},
    ),
    ("T5ForConditionalGeneration", "T5Config", T5, {"shared.weight": "tied"}),
    ("BartForConditionalGeneration", "BartConfig", BART, {"model.shared.weight": "tied"}),
    (
        "MarianMTModel",
        "MarianConfig",
        BART | {"pad_token_id": 1, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 140},
        {"model.decoder.embed_tokens.weight": "tied", "model.encoder.embed_tokens.weight": "input"},
    ),
    (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        BART | WHISPER,
        {"model.decoder.embed_tokens.weight": "tied"},
    ),
]

# Models without an output layer over the vocabulary, with their input table
HEADLESS: list[tuple[str, str, dict[str, Any], str]] = [
    ("GPT2Model", "GPT2Config", GPT2, "wte.weight"),
    ("LlamaModel", "LlamaConfig", SIZES, "embed_tokens.weight"),
    ("LlamaForSequenceClassification", "LlamaConfig", SIZES, "model.embed_tokens.weight"),
    ("BertModel", "BertConfig", BERT, "embeddings.word_embeddings.weight"),
    ("BertModel", "BertConfig", BERT | {"hidden_size": 64}, "embeddings.word_embeddings.weight"),
    ("BertForSequenceClassification", "BertConfig", BERT, "bert.embeddings.word_embeddings.weight"),
    ("BertForTokenClassification", "BertConfig", BERT, "bert.embeddings.word_embeddings.weight"),
    ("BertForQuestionAnswering", "BertConfig", BERT, "bert.embeddings.word_embeddings.weight"),
    ("ElectraForPreTraining", "ElectraConfig", BERT, "electra.embeddings.word_embeddings.weight"),
    (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        BERT | MODERN_BERT,
        "model.embeddings.tok_embeddings.weight",
    ),
    ("T5EncoderModel", "T5Config", T5, "shared.weight"),
    ("BartForSequenceClassification", "BartConfig", BART, "model.shared.weight"),
    (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": BERT, "vision_config": VISION},
        "text_model.embeddings.token_embedding.weight",
    ),
]


def build(model_class: str, config_class: str, options: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config_class)(**options)
    with torch.device("meta"):  # only names and shapes matter
        model = getattr(transformers, model_class)(config)
    model.tie_weights()
    return model


def roles(model: nn.Module, couple: str) -> dict[str, str]:
    return {name: role for name, (role, _) in found_by(param_groups(model, couple=couple)).items()}


@pytest.mark.parametrize(("model", "config", "options", "tables"), HUGGING_FACE)
def test_tables_of_a_hugging_face_language_model(
    model: str, config: str, options: dict[str, Any], tables: dict[str, str]
) -> None:
    assert roles(build(model, config, options), "output") == tables


@pytest.mark.parametrize(("model", "config", "options", "table"), HEADLESS)
def test_a_hugging_face_model_without_a_head_has_an_input_table_only(
    model: str, config: str, options: dict[str, Any], table: str
) -> None:
    built = build(model, config, options)
    with pytest.raises(ValueError, match=rf"couple='output': {type(built).__name__} .*'{re.escape(table)}'"):
        param_groups(built)
    assert roles(built, "none") == roles(built, "input") == {table: "input"}
    (group,) = (group for group in param_groups(built, couple="input") if group.get("coupled"))
    assert [name for name, _ in group["params"]] == [table]


@pytest.mark.parametrize("tied", [True, False])
def test_tables_of_a_vision_language_model(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**VISION)
    options = {"text_config": text, "vision_config": vision, "image_token_index": 100, "tie_word_embeddings": tied}
    embedding = "model.language_model.embed_tokens.weight"
    tables = {embedding: "tied"} if tied else {"lm_head.weight": "output", embedding: "input"}
    assert roles(build("LlavaForConditionalGeneration", "LlavaConfig", options), "output") == tables


def test_tables_of_an_encoder_and_a_decoder_put_together() -> None:
    transformers = pytest.importorskip("transformers")
    encoder = transformers.BertModel(transformers.BertConfig(**BERT))
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True))
    assert roles(transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder), "output") == {
        "decoder.bert.embeddings.word_embeddings.weight": "tied",
        "encoder.embeddings.word_embeddings.weight": "input",
    }


def nano_gpt() -> nn.Module:
    parts = Parts(
        wte=nn.Embedding(V, H),
        wpe=nn.Embedding(T, H),
        drop=nn.Dropout(0.1),
        h=nn.ModuleList(Block(MLP) for _ in range(2)),
        ln_f=nn.LayerNorm(H),
    )
    model = Parts(transformer=parts, lm_head=nn.Linear(H, V, bias=False))
    model.transformer.wte.weight = model.lm_head.weight
    return model


def nano_chat() -> nn.Module:
    """Untied, with value embeddings and numbers per layer."""
    model = Parts(
        transformer=Parts(wte=nn.Embedding(V, H), h=nn.ModuleList(Block(MLP) for _ in range(2))),
        lm_head=nn.Linear(H, V, bias=False),
        value_embeds=nn.ModuleDict({"1": nn.Embedding(V, H)}),
    )
    model.resid_lambdas = nn.Parameter(torch.ones(2))
    return model


def functional_tie() -> nn.Module:
    """Logits are `F.linear(x, wte.weight)`: no module reveals it."""
    return Parts(wte=nn.Embedding(V, H), wpe=nn.Embedding(T, H), h=nn.ModuleList(Block(MLP) for _ in range(2)))


def torchtitan_llama() -> nn.Module:
    return Parts(
        tok_embeddings=nn.Embedding(V, H),
        layers=nn.ModuleDict({str(i): Block(MLP) for i in range(2)}),
        norm=nn.RMSNorm(H),
        output=nn.Linear(H, V, bias=False),
    )


def recurrent() -> nn.Module:
    """PyTorch's word_language_model example."""
    return Parts(encoder=nn.Embedding(V, H), rnn=nn.LSTM(H, 32, 2), decoder=nn.Linear(32, V))


def torch_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(H, 2, dim_feedforward=MLP)
    return Parts(input_emb=nn.Embedding(V, H), encoder=nn.TransformerEncoder(layer, 2), decoder=nn.Linear(H, V))


def translation() -> nn.Module:
    """PyTorch's translation tutorial, with one vocabulary."""
    return Parts(
        transformer=nn.Transformer(H, 2, 1, 1, MLP),
        generator=nn.Linear(H, V),
        src_tok_emb=Parts(embedding=nn.Embedding(V, H)),
        tgt_tok_emb=Parts(embedding=nn.Embedding(V, H)),
    )


def bigram() -> nn.Module:
    return nn.Sequential(nn.Embedding(V, H), nn.Linear(H, MLP), nn.ReLU(), nn.Linear(MLP, V))


@pytest.mark.parametrize(
    ("build", "tables"),
    [
        (nano_gpt, {"transformer.wte.weight": "tied"}),
        (
            nano_chat,
            {"lm_head.weight": "output", "transformer.wte.weight": "input", "value_embeds.1.weight": "input"},
        ),
        (functional_tie, {"wte.weight": "tied"}),
        (torchtitan_llama, {"output.weight": "output", "tok_embeddings.weight": "input"}),
        (recurrent, {"decoder.weight": "output", "encoder.weight": "input"}),
        (torch_transformer, {"decoder.weight": "output", "input_emb.weight": "input"}),
        (
            translation,
            {
                "generator.weight": "output",
                "src_tok_emb.embedding.weight": "input",
                "tgt_tok_emb.embedding.weight": "input",
            },
        ),
        (bigram, {"3.weight": "output", "0.weight": "input"}),
        (lambda: nn.Embedding(V, H), {"weight": "tied"}),
    ],
)
def test_tables_of_a_hand_written_model(build: Callable[[], nn.Module], tables: dict[str, str]) -> None:
    assert roles(build(), "output") == tables
