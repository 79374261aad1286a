"""Map our models to Hugging Face `transformers`: class, config and tensor names.

GPT-2 becomes a GPT2LMHeadModel, and the Llama-style model a StableLmForCausalLM, because Llama's own class uses RMSNorm
and StableLM uses LayerNorm. If their layers have a bias and ours do not, the bias is zero. Nothing here needs
`transformers`.

Letters: V vocabulary rows, H width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import setting
from coupled_adam.config.toml_writing import toml_value
from coupled_adam.models import gpt2, llama
from coupled_adam.models.initial import STANDARD_DEVIATION
from coupled_adam.models.model_config import ModelConfig, build_model

# Prefixes of their names, by prefixes of ours.
PREFIXES = {
    "gpt2": {"blocks.": "transformer.h.", "lm_head.": "lm_head.", "": "transformer."},
    "llama": {"blocks.": "model.layers.", "lm_head.": "lm_head.", "": "model."},
}
# Layers that always have a bias there.
BIASED = {
    "gpt2": ("ln_1", "ln_2", "ln_f", "c_attn", "c_proj", "c_fc"),
    "llama": ("input_layernorm", "post_attention_layernorm", "norm"),
}
# Their GPT-2 has `Conv1D` layers, whose weight is (inputs, outputs).
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def hugging_face_config(config: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """Make the content of config.json.

    Args:
        config: our model.
        dtype: of the stored weights, "float32" or "bfloat16".
        end_of_text: the token between documents, used as both bos and eos; None if unknown.

    Example:
        >>> config = ModelConfig("llama", layers=1, heads=2, width=8, context=16, vocabulary_size=32)
        >>> hugging_face_config(config, "float32", end_of_text=0)["architectures"]
        ['StableLmForCausalLM']
    """
    shape = _gpt2_config(config) if config.architecture == "gpt2" else _stablelm_config(config)
    return {
        **shape,
        "vocab_size": config.vocabulary_size,
        "tie_word_embeddings": config.tied,
        "initializer_range": STANDARD_DEVIATION,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        # Not the end of text: StableLM gives the row of the padding token no gradient.
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # name in transformers 4
    }


def _gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp_width,
        "activation_function": "gelu",  # the exact one; their default is an approximation
        "layer_norm_epsilon": gpt2.NORM_EPS,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _stablelm_config(config: ModelConfig) -> dict[str, Any]:
    rope = {"rope_theta": llama.ROPE_BASE, "partial_rotary_factor": 1.0}
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "hidden_act": "silu",
        "layer_norm_eps": llama.NORM_EPS,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **rope,  # for transformers 4
        "rope_parameters": {"rope_type": "default", **rope},
    }


def hugging_face_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map our weights to their names: views, transposed where theirs are, and zeros for biases we do not have.

    Args:
        config: our model.
        weights: as in `model.named_parameters()`; a tied table appears once.

    Example:
        >>> config = ModelConfig("gpt2", layers=1, heads=2, width=8, context=16, vocabulary_size=32)
        >>> theirs = hugging_face_weights(config, dict(build_model(config).named_parameters()))
        >>> theirs["transformer.h.0.attn.c_attn.weight"].shape, theirs["transformer.h.0.attn.c_attn.bias"].shape
        (torch.Size([8, 24]), torch.Size([24]))
    """
    require_class(config)
    _check_weights(config, weights)
    theirs = {}
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        theirs[hugging_face_name(config, name)] = weight.detach().T if name.endswith(TRANSPOSED) else weight.detach()
        if kind == "weight" and layer.endswith(BIASED[config.architecture]) and f"{layer}.bias" not in weights:
            theirs[hugging_face_name(config, f"{layer}.bias")] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return theirs


def require_class(config: ModelConfig) -> None:
    """Raise if none of their classes can represent the model."""
    if config.output_bias != "none":
        raise UserError(
            f"the model has an output bias (model.output_bias = {toml_value(config.output_bias)}), which neither "
            "GPT2LMHeadModel nor StableLmForCausalLM supports, so it cannot be exported; use `coupled-adam eval` on "
            'the run, or train with model.output_bias = "none"'
        )
    if config.logit_cap is not None:
        raise UserError(
            f"the model caps its logits (model.logit_cap = {setting(config.logit_cap)}), which neither GPT2LMHeadModel "
            "nor StableLmForCausalLM supports, so it cannot be exported; use `coupled-adam eval` on the run, or train "
            'with model.logit_cap = "none"'
        )


def hugging_face_name(config: ModelConfig, name: str) -> str:
    """Map the name of a parameter to theirs.

    Example:
        >>> hugging_face_name(ModelConfig("gpt2", layers=1, heads=1, width=8), "blocks.0.ln_1.weight")
        'transformer.h.0.ln_1.weight'
    """
    prefixes = PREFIXES[config.architecture]
    ours = next(prefix for prefix in prefixes if name.startswith(prefix))  # the empty one is the last
    return prefixes[ours] + name.removeprefix(ours)


def _check_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        expected = {name: tuple(parameter.shape) for name, parameter in build_model(config).named_parameters()}
    for name, shape in expected.items():
        if name not in weights:
            raise UserError(f"weights: {name!r} is missing; pass all parameters of the {config.architecture} model")
        if tuple(weights[name].shape) != shape:
            raise UserError(f"weights: {name!r} has shape {tuple(weights[name].shape)}, expected {shape}")
    for name in weights:
        if name not in expected:
            raise UserError(f"weights: {name!r} is not a parameter of this {config.architecture} model; remove it")
