"""peft adapters: the adapted tables are vocabulary tables, the adapters' own matrices never are.

Letters: V vocabulary rows, H hidden size.
"""

from typing import Any

import pytest
import torch
from group_models import GPT, H, Parts, V, coupled_names, found_by, names
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.groups import param_groups

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted(config: Any, **options: Any) -> nn.Module:
    """A small Llama with adapters."""
    sizes = {"hidden_size": H, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes, **options))
    return peft.get_peft_model(model, config)


def lora(*targets: str, **options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=list(targets), **options)


BOTH = ("lm_head", "embed_tokens", "q_proj")


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_lora_factors_are_not_tables_and_the_tables_are_frozen(dora: bool) -> None:
    model = adapted(lora(*BOTH, use_dora=dora))
    for couple, table in (("output", "lm_head"), ("input", "embed_tokens")):
        with pytest.raises(ValueError, match=rf"frozen \('.*{table}\.base_layer\.weight'\).*Adapters"):
            CoupledAdamW(model, couple=couple)
    groups = names(param_groups(model, weight_decay=0.1, couple="none"))
    head, embedding = "base_model.model.lm_head.", "base_model.model.model.embed_tokens."
    query = "base_model.model.model.layers.0.self_attn.q_proj."
    assert set(groups["decay"]) == {
        f"{module}{factor}.default.weight" for module in (head, query) for factor in ("lora_A", "lora_B")
    }
    assert {f"{embedding}lora_embedding_A.default", f"{embedding}lora_embedding_B.default"} <= set(groups["no_decay"])
    magnitudes = [name for name in groups["no_decay"] if "magnitude" in name]
    assert len(magnitudes) == (3 if dora else 0)


@pytest.mark.parametrize("tied", [False, True])
def test_full_copies_that_peft_trains_are_the_tables(tied: bool) -> None:
    model = adapted(lora("q_proj", modules_to_save=["lm_head", "embed_tokens"]), tie_word_embeddings=tied)
    head = "base_model.model.lm_head.modules_to_save.default.weight"
    embedding = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name}
    groups = param_groups(model, couple="all")
    assert set(coupled_names(groups)) == trained  # one table if peft keeps the tie, otherwise two
    assert {name: role for name, (role, _) in found_by(groups).items()} == (
        {head: "output", embedding: "input"} if len(trained) == 2 else {embedding: "tied"}
    )
    tokens = torch.randint(0, V, (2, 5))
    optimizer = CoupledAdamW(model)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    (table,) = coupled_names(param_groups(model))
    assert optimizer.state[model.get_parameter(table)]["exp_avg_sq"].shape == (1, H)


def test_separately_trained_rows_are_neither_coupled_nor_decayed() -> None:
    model = adapted(lora("q_proj", trainable_token_indices={"embed_tokens": [1, 2]}))
    with pytest.raises(ValueError, match=r"frozen \('.*embed_tokens.*base_layer\.weight'\)"):
        param_groups(model, couple="input")
    no_decay = names(param_groups(model, weight_decay=0.1, couple="none"))["no_decay"]
    assert no_decay == ["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"]


@pytest.mark.parametrize(
    ("config", "undecayed"),
    [
        (lambda: peft.LoHaConfig(target_modules=["lm_head", "q_proj"]), []),
        (lambda: peft.AdaLoraConfig(target_modules=["lm_head", "q_proj"], total_step=9), ["lora_E"]),
        (lambda: peft.IA3Config(target_modules=["lm_head", "q_proj"], feedforward_modules=[]), ["ia3_l"]),
    ],
    ids=["LoHa", "AdaLoRA", "IA3"],
)
def test_other_kinds_of_adapters_are_not_tables(config: Any, undecayed: list[str]) -> None:
    """The first factor of LoHa has V rows; the vectors of IA3 are matrices with one column."""
    model = adapted(config())
    with pytest.raises(ValueError, match=r"frozen \('base_model\.model\.lm_head\.base_layer\.weight'\)"):
        CoupledAdamW(model)
    groups = names(param_groups(model, weight_decay=0.1, couple="none"))
    assert {name.split(".")[-2] for name in groups.get("no_decay", [])} == set(undecayed)


def test_adapters_of_a_plain_model_are_not_tables() -> None:
    model = GPT(tied=False)
    model = peft.get_peft_model(model, lora("lm_head", "fc", modules_to_save=["wte"]))
    with pytest.raises(ValueError, match=r"frozen \('base_model\.model\.lm_head\.base_layer\.weight'\)"):
        CoupledAdamW(model)
    assert coupled_names(param_groups(model, couple="input")) == ["base_model.model.wte.modules_to_save.default.weight"]


def test_factors_next_to_the_weight_of_their_module_are_not_tables() -> None:
    """As in torchtune: the factors are modules, and the frozen weight is a parameter next to them."""
    model = Parts(tokens=nn.Embedding(V, H), output=nn.Linear(H, V, bias=False))
    model.output.requires_grad_(False)
    model.output.lora_a, model.output.lora_b = nn.Linear(H, 4, bias=False), nn.Linear(4, V, bias=False)
    with pytest.raises(ValueError, match=r"frozen \('output\.weight'\)"):
        param_groups(model)
    assert names(param_groups(model, couple="none"))["decay"] == ["output.lora_a.weight", "output.lora_b.weight"]
