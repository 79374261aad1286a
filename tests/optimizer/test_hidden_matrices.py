"""Parameters for Muon in many model families, listed by hand; and the check that Muon gets no others.

Letters: V vocabulary rows, H hidden size, E experts.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_models import Block, Parts, Wrapper
from test_model_families import (
    GROUPED,
    HEADLESS,
    HUGGING_FACE,
    MLP,
    SIZES,
    VISION,
    H,
    V,
    bigram,
    build,
    functional_tie,
    nano_chat,
    nano_gpt,
    recurrent,
    torch_transformer,
    torchtitan_llama,
    translation,
)
from torch import nn

from coupled_adam import BatchedMuon, CoupledAdamW, check_muon, hidden_matrices, param_groups

Muon = getattr(torch.optim, "Muon", BatchedMuon)  # torch has one from 2.9 on

# By config class: the matrices that every layer has and that occur only in layers.
GPT2 = "h.*.attn.c_attn h.*.attn.c_proj h.*.mlp.c_fc h.*.mlp.c_proj"
ATTENTION = "layers.*.self_attn.q_proj layers.*.self_attn.k_proj layers.*.self_attn.v_proj"
LLAMA = f"{ATTENTION} layers.*.self_attn.o_proj layers.*.mlp.gate_proj layers.*.mlp.up_proj layers.*.mlp.down_proj"
OPT = f"{ATTENTION} layers.*.self_attn.out_proj layers.*.fc1 layers.*.fc2"
CROSS = " ".join(f"layers.*.encoder_attn.{name}_proj" for name in ("q", "k", "v", "out"))
BLOOM = "h.*.self_attention.query_key_value h.*.self_attention.dense h.*.mlp.dense_h_to_4h h.*.mlp.dense_4h_to_h"
BERT = (
    "layer.*.attention.self.query layer.*.attention.self.key layer.*.attention.self.value "
    "layer.*.attention.output.dense layer.*.intermediate.dense layer.*.output.dense"
)
MODERN_BERT = "layers.*.attn.Wqkv layers.*.attn.Wo layers.*.mlp.Wi layers.*.mlp.Wo"
T5_ATTENTION = " ".join(f"block.*.layer.*.SelfAttention.{name}" for name in "qkvo")
T5_MLP = "block.*.layer.*.DenseReluDense.wi block.*.layer.*.DenseReluDense.wo"
T5_CROSS = " ".join(f"block.*.layer.*.EncDecAttention.{name}" for name in "qkvo")


def under(prefix: str, matrices: str) -> set[str]:
    return {f"{prefix}{name}.weight" for name in matrices.split()}


ENCODER_DECODER = under("model.encoder.", OPT) | under("model.decoder.", f"{OPT} {CROSS}")
EXPECTED: dict[str, set[str]] = {
    "GPT2LMHeadModel": under("transformer.", GPT2),
    "GPT2DoubleHeadsModel": under("transformer.", GPT2),
    **{
        f"{family}ForCausalLM": under("model.", LLAMA)
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
    },
    # Its router and its three-dimensional experts stay with the other optimizer.
    "MixtralForCausalLM": under("model.", f"{ATTENTION} layers.*.self_attn.o_proj"),
    "PhiForCausalLM": under("model.", f"{ATTENTION} layers.*.self_attn.dense layers.*.mlp.fc1 layers.*.mlp.fc2"),
    "GPTNeoXForCausalLM": under(
        "gpt_neox.layers.*.",
        "attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h",
    ),
    "OPTForCausalLM": under("model.decoder.", OPT),
    "BloomForCausalLM": under("transformer.", BLOOM),
    "FalconForCausalLM": under("transformer.", BLOOM),
    "MptForCausalLM": under("transformer.blocks.*.", "attn.Wqkv attn.out_proj ffn.up_proj ffn.down_proj"),
    "MambaForCausalLM": under("backbone.layers.*.mixer.", "in_proj x_proj out_proj"),
    "BertForMaskedLM": under("bert.encoder.", BERT),
    "BertForPreTraining": under("bert.encoder.", BERT),
    "RobertaForMaskedLM": under("roberta.encoder.", BERT),
    "ElectraForMaskedLM": under("electra.encoder.", BERT),
    "ModernBertForMaskedLM": under("model.", MODERN_BERT),
    "T5ForConditionalGeneration": under("encoder.", f"{T5_ATTENTION} {T5_MLP}")
    | under("decoder.", f"{T5_ATTENTION} {T5_CROSS} {T5_MLP}"),
    "BartForConditionalGeneration": ENCODER_DECODER,
    "MarianMTModel": ENCODER_DECODER,
    "WhisperForConditionalGeneration": ENCODER_DECODER,
    "GPT2Model": under("", GPT2),
    "LlamaModel": under("", LLAMA),
    "LlamaForSequenceClassification": under("model.", LLAMA),
    "BertModel": under("encoder.", BERT),
    "BertForSequenceClassification": under("bert.encoder.", BERT),
    "BertForTokenClassification": under("bert.encoder.", BERT),
    "BertForQuestionAnswering": under("bert.encoder.", BERT),
    "ElectraForPreTraining": under("electra.encoder.", BERT),
    "ModernBertForSequenceClassification": under("model.", MODERN_BERT),
    "T5EncoderModel": under("encoder.", f"{T5_ATTENTION} {T5_MLP}"),
    "BartForSequenceClassification": ENCODER_DECODER,
    "CLIPModel": {
        f"{tower}_model.encoder.{name}"
        for tower in ("text", "vision")
        for name in under("", OPT.replace("fc", "mlp.fc"))
    },
}


def starred(model: nn.Module) -> set[str]:
    return {re.sub(r"\.\d+\.", ".*.", name) for name, _ in hidden_matrices(model)}


@pytest.mark.parametrize(("model", "config", "options", "tables"), HUGGING_FACE + HEADLESS)
def test_matrices_of_a_hugging_face_model(model: str, config: str, options: dict[str, Any], tables: Any) -> None:
    built = build(model, config, options)
    matrices = hidden_matrices(built)
    assert starred(built) == EXPECTED[model]
    parameters = dict(built.named_parameters())
    assert all(parameters[name] is tensor and tensor.ndim == 2 for name, tensor in matrices)
    assert set(tables if isinstance(tables, dict) else [tables]) <= matrices.left_out.keys()


@pytest.mark.parametrize(("model", "config", "options", "tables"), HUGGING_FACE)
def test_all_other_parameters_go_to_coupled_adamw(
    model: str, config: str, options: dict[str, Any], tables: dict[str, str]
) -> None:
    built = build(model, config, options)
    matrices = hidden_matrices(built)
    muon, coupled = Muon(matrices), CoupledAdamW(built, exclude=matrices)
    check_muon(built, muon, coupled)
    mine = {name for group in coupled.param_groups for name in group["param_names"]}
    trainable = {name for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert mine == trainable - {name for name, _ in matrices}
    assert [group["name"] for group in coupled.param_groups if group["coupled"]] == ["output_embeddings"]


@pytest.mark.parametrize(("model", "config", "options", "tables"), HUGGING_FACE)
def test_tables_in_muon_are_detected(model: str, config: str, options: dict[str, Any], tables: dict[str, str]) -> None:
    """torch's own example gives Muon every two-dimensional parameter."""
    built = build(model, config, options)
    muon = Muon([p for p in built.parameters() if p.ndim == 2])
    with pytest.raises(ValueError, match="Muon has") as raised:
        check_muon(built, muon)
    for name in tables:
        assert repr(name) in str(raised.value)
    assert not any(repr(name) in str(raised.value) for name, _ in hidden_matrices(built))


def test_matrices_of_a_vision_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**VISION)
    options = {"text_config": text, "vision_config": vision, "image_token_index": 100}
    tower = under("model.vision_tower.encoder.", OPT.replace("fc", "mlp.fc"))
    model = build("LlavaForConditionalGeneration", "LlavaConfig", options)
    assert starred(model) == tower | under("model.language_model.", LLAMA)


def test_routers_experts_in_one_tensor_and_gates_of_one_output_are_left_out() -> None:
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    model = build("Qwen2MoeForCausalLM", "Qwen2MoeConfig", GROUPED | sizes)
    attention = under("model.", f"{ATTENTION} layers.*.self_attn.o_proj")
    assert starred(model) == attention | under("model.layers.*.mlp.shared_expert.", "gate_proj up_proj down_proj")


BLOCK = under("h.*.", "fc proj")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nano_gpt, {f"transformer.{name}" for name in BLOCK}),
        (nano_chat, {f"transformer.{name}" for name in BLOCK}),
        (functional_tie, BLOCK),
        (torchtitan_llama, under("layers.*.", "fc proj")),
        (
            torch_transformer,
            under("encoder.layers.*.", "self_attn.out_proj linear1 linear2")
            | {"encoder.layers.*.self_attn.in_proj_weight"},
        ),
        (
            translation,
            under("transformer.encoder.layers.*.", "self_attn.out_proj linear1 linear2")
            | under("transformer.decoder.layers.*.", "self_attn.out_proj multihead_attn.out_proj linear1 linear2")
            | {
                f"transformer.{part}_proj_weight"
                for part in (
                    "encoder.layers.*.self_attn.in",
                    "decoder.layers.*.self_attn.in",
                    "decoder.layers.*.multihead_attn.in",
                )
            },
        ),
        (bigram, {"1.weight"}),  # it has no numbered layers that contain linear layers
    ],
)
def test_matrices_of_a_hand_written_model(model: Callable[[], nn.Module], expected: set[str]) -> None:
    assert starred(model()) == expected


@pytest.mark.parametrize("model", [recurrent, lambda: nn.Embedding(V, H)])
def test_a_model_without_hidden_matrices_is_an_error(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="no hidden matrix"):
        hidden_matrices(model())


@pytest.mark.parametrize("layer", ["gate", "router"])
def test_a_router_is_distinguished_from_a_gate_by_its_size(layer: str) -> None:
    def model(outputs: int) -> nn.Module:
        blocks = nn.ModuleList(Parts(fc=nn.Linear(H, MLP), **{layer: nn.Linear(H, outputs)}) for _ in range(2))
        return Parts(wte=nn.Embedding(V, H), h=blocks, lm_head=nn.Linear(H, V))

    assert starred(model(4)) == {"h.*.fc.weight"}
    assert starred(model(MLP)) == {"h.*.fc.weight", f"h.*.{layer}.weight"}


def test_frozen_matrices_and_adapters_are_left_out() -> None:
    peft = pytest.importorskip("peft")
    base = build("LlamaForCausalLM", "LlamaConfig", SIZES)
    base.requires_grad_(False)
    with pytest.raises(ValueError, match="no hidden matrix"):
        hidden_matrices(base)
    with torch.device("meta"):
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="part of an adapter"):
        hidden_matrices(adapted)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert hidden_matrices(Wrapper(nano_gpt()))[0][0] == "transformer.h.0.fc.weight"


def test_a_matrix_shared_by_layers_appears_once() -> None:
    first, second = Block(MLP), Block(MLP)
    second.fc.weight = first.fc.weight
    model = Parts(wte=nn.Embedding(V, H), h=nn.ModuleList([first, second]))
    assert [name for name, _ in hidden_matrices(model)] == ["h.0.fc.weight", "h.0.proj.weight", "h.1.proj.weight"]


def test_without_exclusions_the_groups_are_unchanged() -> None:
    model = nano_gpt()
    before = param_groups(model)
    hidden_matrices(model)
    assert [group["name"] for group in before] == ["output_embeddings", "decay", "no_decay"]
    assert {name for name, _ in hidden_matrices(model)} == {name for name, _ in before[1]["params"]}


def test_the_printed_summary_counts_the_matrices_and_gives_a_reason_for_the_rest() -> None:
    rows = [line.split() for line in str(hidden_matrices(nano_gpt())).splitlines()]
    assert ["transformer.h.*.fc.weight", "(64,", "16)", "2"] in rows
    assert ["transformer.wte.weight", "(128,", "16)", "1", "vocabulary", "table", "or", "head"] in rows


def test_a_parameter_in_two_optimizers_is_detected() -> None:
    model = nano_gpt()
    with pytest.raises(ValueError, match=r"'transformer\.h\.0\.fc\.weight' is in 2 optimizers"):
        check_muon(model, Muon(hidden_matrices(model)), CoupledAdamW(model))


def test_a_parameter_in_no_optimizer_is_detected_unless_it_is_frozen() -> None:
    model = nano_gpt()
    matrices = hidden_matrices(model)
    muon, coupled = Muon(matrices[1:]), CoupledAdamW(model, exclude=matrices)
    with pytest.raises(ValueError, match=rf"{re.escape(repr(matrices[0][0]))}.* no optimizer"):
        check_muon(model, muon, coupled)
    matrices[0][1].requires_grad_(False)
    check_muon(model, muon, coupled)


def test_a_tensor_that_the_model_no_longer_has_is_detected() -> None:
    model = nano_gpt()
    muon = Muon(hidden_matrices(model))
    model.transformer.h[0].fc.weight = nn.Parameter(torch.zeros(MLP, H))
    with pytest.raises(ValueError, match="not a parameter of the model"):
        check_muon(model, muon)


def test_matrices_outside_the_layers_may_be_added_by_hand() -> None:
    transformers_bert = build("BertModel", "BertConfig", SIZES | {"max_position_embeddings": 24})
    pooler = ("pooler.dense.weight", transformers_bert.pooler.dense.weight)
    check_muon(transformers_bert, Muon([*hidden_matrices(transformers_bert), pooler]))
