"""Which tensors `param_groups` recognises as vocabulary tables.

Letters: V vocabulary rows, H hidden size, T positions.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_models import GPT, H, Headless, Parts, T, V, Wrapper, coupled_names, found_by, names
from torch import nn

from coupled_adam.optimizer.groups import param_groups


def test_value_embeddings_are_input_tables() -> None:
    model = GPT(tied=False)
    model.value_embeds = nn.ModuleDict({"0": nn.Embedding(V, 8)})
    groups = param_groups(model)
    assert names(groups)["input_embeddings"] == ["wte.weight", "value_embeds.0.weight"]


def test_value_embeddings_of_a_tied_model_are_input_tables() -> None:
    model = GPT(tied=True)
    model.value_embeds = nn.ModuleDict({"0": nn.Embedding(V, 8)})
    groups = param_groups(model)
    assert names(groups)["output_embeddings"] == ["wte.weight"]
    assert names(groups)["input_embeddings"] == ["value_embeds.0.weight"]


def test_a_tied_linear_wins_over_one_that_only_matches_in_size() -> None:
    groups = param_groups(GPT(tied=True, width=T))
    assert coupled_names(groups) == ["wte.weight"]
    assert "h.0.fc.weight" in names(groups)["decay"]


def test_the_only_embedding_of_a_plain_model_counts_as_tied_because_its_code_may_use_it_as_the_head() -> None:
    groups = param_groups(Headless(tokens=V))
    assert names(groups) == {"output_embeddings": ["tokens.weight"], "decay": ["fc.weight"]}
    (role, rule) = found_by(groups)["tokens.weight"]
    assert role == "tied"
    assert re.search(r"nn\.Embedding\b.*\bhead\b", rule)


@pytest.mark.parametrize("name", ["wpe", "position_embeddings", "embed_positions", "relative_position_embedding"])
def test_a_position_table_with_a_usual_name_leaves_one_embedding(name: str) -> None:
    groups = param_groups(Headless(**{name: 2 * V}, tokens=V), couple="input")
    assert coupled_names(groups) == ["tokens.weight"]
    assert names(groups)["no_decay"] == [f"{name}.weight"]
    assert re.search(r"nn\.Embedding\b.*\bposition tables\b", found_by(groups)["tokens.weight"][1])


@pytest.mark.parametrize("name", ["pos", "positions", "pe", "position_encoding", "types"])
@pytest.mark.parametrize("rows", [T, V, 256])
def test_several_embeddings_without_a_head_are_ambiguous(name: str, rows: int) -> None:
    model = Parts(tok=nn.Embedding(65, H), **{name: nn.Embedding(rows, H)})
    with pytest.raises(ValueError, match="ambiguous") as error:
        param_groups(model)
    assert "'tok.weight' (65, 16)" in str(error.value)
    assert f"'{name}.weight' ({rows}, 16)" in str(error.value)
    assert "couple=['tok.weight']" in str(error.value)
    assert coupled_names(param_groups(model, couple=["tok.weight"])) == ["tok.weight"]


def test_two_largest_embeddings_without_a_head_are_ambiguous() -> None:
    with pytest.raises(ValueError, match=r"'left\.weight' \(100, 16\); 'right\.weight' \(100, 16\)"):
        param_groups(Headless(left=V, right=V, positions=T))


def test_mlp_as_wide_as_the_position_table_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="ambiguous") as error:
        param_groups(GPT(tied=False, width=T))
    assert "'h.*.fc.weight' (12, 16) with 'wpe.weight' (12, 16)" in str(error.value)
    assert "'lm_head.weight' (100, 16) with 'wte.weight' (100, 16)" in str(error.value)
    assert "couple=['lm_head.weight']" in str(error.value)


def test_matrices_as_tall_as_a_byte_vocabulary_are_ambiguous() -> None:
    with pytest.raises(ValueError, match=r"'h\.\*\.proj\.weight' \(16, 40\) with 'wte.weight' \(16, 16\)"):
        param_groups(GPT(tied=False, vocabulary=H))


def test_two_tied_sizes_are_ambiguous() -> None:
    model = GPT(tied=True)
    model.position_head = nn.Linear(H, T, bias=False)
    model.position_head.weight = model.wpe.weight
    with pytest.raises(ValueError, match=r"'wte\.weight' \(100, 16\); 'wpe\.weight' \(12, 16\)"):
        param_groups(model)


def test_model_without_embedding_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"nn\.Embedding\b.*couple=\[patterns\].*coupled=True"):
        param_groups(nn.Sequential(nn.Linear(H, V)))


class Accessors(GPT):
    """A model with Hugging Face's two accessors, which return or raise the given objects."""

    def __init__(self, source: str, head: str | Exception | None, *, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.source, self.head = source, head

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule(self.source)

    def get_output_embeddings(self) -> nn.Module | None:
        if isinstance(self.head, Exception):
            raise self.head
        return None if self.head is None else self.get_submodule(self.head)


def test_accessors_win_over_sizes() -> None:
    groups = param_groups(Accessors("wpe", "h.0.fc"))
    assert found_by(groups) == {
        "h.0.fc.weight": ("output", "Hugging Face get_output_embeddings()"),
        "wpe.weight": ("input", "Hugging Face get_input_embeddings()"),
    }


@pytest.mark.parametrize("head", [None, NotImplementedError(), AttributeError(), TypeError()])
def test_accessor_without_a_head_leaves_an_input_table(head: Exception | None) -> None:
    model = Accessors("wpe", head)
    del model.lm_head
    found = {"wpe.weight": ("input", "Hugging Face get_input_embeddings()")}
    assert found_by(param_groups(model, couple="none")) == found
    assert coupled_names(param_groups(model, couple="input")) == ["wpe.weight"]
    assert coupled_names(param_groups(model, couple="all")) == ["wpe.weight"]
    with pytest.raises(ValueError, match=r"'wpe\.weight'.*couple='input'.*couple=\['wpe\.weight'\]"):
        param_groups(model)


@pytest.mark.parametrize("width", [V, 2 * V])
def test_layers_as_tall_as_the_embedding_are_not_heads_of_a_hugging_face_model(width: int) -> None:
    model = Accessors("wte", None)
    del model.lm_head
    model.h = nn.ModuleList([Parts(fc=nn.Linear(H, width))])
    assert names(param_groups(model, couple="input"))["decay"] == ["h.0.fc.weight"]
    with pytest.raises(ValueError, match=r"couple='output': Accessors .*'wte\.weight'"):
        param_groups(model)


def test_a_head_inside_a_layer_is_ambiguous_if_there_is_no_other() -> None:
    """A tied model may have no head module, and a layer may happen to have as many outputs as there are tokens."""
    model = Parts(tokens=nn.Embedding(V, H), layers=nn.ModuleList([Parts(fc=nn.Linear(H, V))]))
    with pytest.raises(ValueError, match=r"ambiguous.*'tokens.weight' \(100, 16\); 'layers\.\*\.fc\.weight'"):
        param_groups(model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_in_a_list_is_not_a_layer(tied: bool) -> None:
    model = GPT(tied=tied)
    listed = nn.ModuleList([nn.Linear(H, H), model])
    assert coupled_names(param_groups(listed)) == [f"1.{name}" for name in coupled_names(param_groups(model))]
    del model.lm_head
    model.out = nn.Linear(H, 128)
    with pytest.raises(ValueError, match=r"ambiguous.*'1.out.weight' \(128, 16\)"):
        param_groups(listed)


def test_accessors_of_a_model_inside_another_module_are_used() -> None:
    module = Parts(backbone=Accessors("wte", None), classifier=nn.Linear(H, 3))
    del module.backbone.lm_head
    with pytest.raises(ValueError, match=r"couple='output': Parts .*'backbone\.wte\.weight'"):
        param_groups(module)
    module.own_head = nn.Linear(H, V)
    assert coupled_names(param_groups(module)) == ["own_head.weight"]


def test_accessors_of_an_inner_model_do_not_hide_the_tables_around_it() -> None:
    """Such as a text encoder that conditions a language model."""
    module = Parts(condition=Accessors("wte", None), tokens=nn.Embedding(2 * V, H), out=nn.Linear(H, 2 * V, bias=False))
    del module.condition.lm_head
    assert coupled_names(param_groups(module)) == ["out.weight"]


def test_padded_head_that_the_accessors_do_not_know_is_a_candidate() -> None:
    model = Accessors("wte", None)
    del model.lm_head
    model.output = nn.Linear(H, V + 28)
    with pytest.raises(ValueError, match=r"ambiguous.*'wte.weight' \(100, 16\).*'output.weight' \(128, 16\)"):
        param_groups(model)


def test_head_that_the_accessors_do_not_know_is_found_by_its_size() -> None:
    assert coupled_names(param_groups(Accessors("wte", None))) == ["lm_head.weight"]


@pytest.mark.parametrize("wrong", ["ln_f", "h"])
def test_accessors_that_return_no_table_are_ignored(wrong: str) -> None:
    assert coupled_names(param_groups(Accessors(wrong, "wpe"))) == ["lm_head.weight"]
    assert coupled_names(param_groups(Accessors("wpe", wrong))) == ["lm_head.weight"]


def test_an_accessor_that_returns_a_table_of_another_model_is_ignored() -> None:
    model = Accessors("wpe", "h.0.fc")
    foreign = nn.Embedding(V, H)
    model.get_input_embeddings = lambda: foreign  # type: ignore[method-assign]
    assert coupled_names(param_groups(model)) == ["lm_head.weight"]


def test_accessors_are_found_inside_wrappers() -> None:
    groups = param_groups(Wrapper(torch.compile(Accessors("wpe", "h.0.fc"))))
    assert coupled_names(groups) == ["h.0.fc.weight"]


def hf_gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=T, **options)
    return transformers.GPT2LMHeadModel(config)


def hf_llama(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": H, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes, **options))


@pytest.mark.parametrize(
    ("build", "table"),
    [(hf_gpt2, "transformer.wte.weight"), (hf_llama, "model.embed_tokens.weight")],
    ids=["gpt2", "llama"],
)
def test_hugging_face_models_are_read_through_their_accessors(build: Callable[..., nn.Module], table: str) -> None:
    tied, untied = (param_groups(build(tie_word_embeddings=tie)) for tie in (True, False))
    assert found_by(tied) == {table: ("tied", "Hugging Face get_output_embeddings()")}
    assert found_by(untied) == {
        "lm_head.weight": ("output", "Hugging Face get_output_embeddings()"),
        table: ("input", "Hugging Face get_input_embeddings()"),
    }


def test_hugging_face_norms_and_positions_are_not_decayed_and_conv1d_is() -> None:
    groups = names(param_groups(hf_gpt2()))
    assert groups["decay"] == [
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert "transformer.wpe.weight" in groups["no_decay"]
    llama = names(param_groups(hf_llama()))
    assert {name.rsplit(".")[-2] for name in llama["no_decay"]} == {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }


def test_all_rows_of_a_sharded_table_count(tmp_path: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = GPT(tied=False)
        plain = param_groups(model)
        sharded = param_groups(fully_shard(model, mesh=mesh))
        assert type(sharded.tables[0].weight).__name__ == "DTensor"
        assert names(sharded) == names(plain)
        assert sharded.summary() == plain.summary()
    finally:
        torch.distributed.destroy_process_group()


def test_a_classifier_next_to_a_type_table_is_not_mistaken_for_the_vocabulary() -> None:
    model = Parts(words=nn.Embedding(100, 8), types=nn.Embedding(2, 8), classifier=nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"ambiguous.*'words.weight' \(100, 8\).*'classifier.weight' \(2, 8\)"):
        param_groups(model)


def test_a_padded_head_is_never_silently_left_to_adamw() -> None:
    model = Parts(wte=nn.Embedding(100, 8), wpe=nn.Embedding(128, 8), fc=nn.Linear(8, 40), lm_head=nn.Linear(8, 128))
    with pytest.raises(ValueError, match=r"ambiguous.*'wte.weight' \(100, 8\).*'lm_head.weight' \(128, 8\)"):
        param_groups(model)
    del model.wpe
    with pytest.raises(ValueError, match=r"ambiguous.*'wte.weight' \(100, 8\).*'lm_head.weight' \(128, 8\)"):
        param_groups(model)
    groups = param_groups(model, couple=["lm_head.weight"])
    assert [name for name, _ in groups[0]["params"]] == ["lm_head.weight"]


def test_further_heads_of_a_tied_model_are_heads_too() -> None:
    model = Parts(
        wte=nn.Embedding(100, 8), lm_head=nn.Linear(8, 100, bias=False), mtp_head=nn.Linear(8, 100, bias=False)
    )
    model.lm_head.weight = model.wte.weight
    groups = param_groups(model, weight_decay=0.1)
    assert [(group["name"], [name for name, _ in group["params"]]) for group in groups] == [
        ("output_embeddings", ["wte.weight", "mtp_head.weight"])
    ]


def character_model() -> nn.Module:
    """Fewer characters than positions, as in Karpathy's lecture."""
    return Parts(
        token_embedding_table=nn.Embedding(65, H),
        position_embedding_table=nn.Embedding(256, H),
        blocks=nn.ModuleList([nn.Linear(H, 40)]),
        lm_head=nn.Linear(H, 65),
    )


def byte_model(context: int = 1024) -> nn.Module:
    """Uses the names of x-transformers."""
    return Parts(
        token_emb=Parts(emb=nn.Embedding(256, H)),
        pos_emb=Parts(emb=nn.Embedding(context, H)),
        attn_layers=nn.ModuleList([nn.Linear(H, 40)]),
        to_logits=nn.Linear(H, 256, bias=False),
    )


@pytest.mark.parametrize(
    ("build", "head", "embedding"),
    [
        (character_model, "lm_head.weight", "token_embedding_table.weight"),
        (byte_model, "to_logits.weight", "token_emb.emb.weight"),
    ],
)
def test_a_context_longer_than_the_vocabulary_is_not_ambiguous(
    build: Callable[[], nn.Module], head: str, embedding: str
) -> None:
    groups = names(param_groups(build()))
    assert groups["output_embeddings"] == [head]
    assert groups["input_embeddings"] == [embedding]
    assert [name for name in groups["no_decay"] if "pos" in name and name.endswith("weight")]


@pytest.mark.parametrize("tied", [True, False])
def test_a_position_table_with_as_many_rows_as_tokens_is_not_a_vocabulary_table(tied: bool) -> None:
    model = byte_model(context=256)
    if tied:
        model.to_logits.weight = model.token_emb.emb.weight
    groups = param_groups(model, couple="all")
    assert "pos_emb.emb.weight" in names(groups)["no_decay"]
    assert "pos_emb.emb.weight" not in found_by(groups)


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"chars": (65, None), "places": (256, None), "lm_head": (None, 65)}, "lm_head.weight"),
        ({"tokens": (65, None), "places": (256, None), "last": (None, 65)}, "last.weight"),
        ({"words": (100, None), "types": (2, None), "classifier": (None, 2)}, "words.weight"),
        ({"tok_embeddings": (100, None), "output": (None, 128)}, "output.weight"),
    ],
    ids=["head by its name", "head by its embedding", "no head", "padded head"],
)
def test_the_example_in_the_error_is_the_most_likely_table(
    parts: dict[str, tuple[int | None, int | None]], advice: str
) -> None:
    modules = {n: nn.Embedding(rows, H) if rows else nn.Linear(H, outputs) for n, (rows, outputs) in parts.items()}
    with pytest.raises(ValueError, match=rf"couple=\['{advice}'\]"):
        param_groups(Parts(**modules))


HEAD_NAMES = [
    "output",
    "output_layer",
    "head",
    "to_logits",
    "decoder",
    "proj_out",
    "lm_head",
    "out",
    "fc_out",
    "logits",
    "vocab_proj",
    "generator",
    "final",
    "classifier",
    "out_proj",
    "prediction_head",
    "output_proj",
    "to_vocab",
    "W_U",
    "score",
]


@pytest.mark.parametrize("name", HEAD_NAMES)
@pytest.mark.parametrize(("rows", "outputs"), [(100, 128), (128, 100)], ids=["head", "embedding"])
def test_padding_of_head_or_embedding_never_leaves_the_head_silently_to_adamw(
    name: str, rows: int, outputs: int
) -> None:
    model = Parts(tok_embeddings=nn.Embedding(rows, 8), layers=nn.ModuleList([nn.Linear(8, 40)]))
    setattr(model, name, nn.Linear(8, outputs, bias=False))
    candidates = rf"'tok_embeddings.weight' \({rows}, 8\); '{name}.weight' \({outputs}, 8\)"
    with pytest.raises(ValueError, match=candidates) as error:
        param_groups(model)
    assert f"couple=['{name}.weight']" in str(error.value)
    groups = names(param_groups(model, couple=["tok_embeddings.weight"]))
    assert groups["decay"] == ["layers.0.weight"]


def test_layers_with_the_name_of_a_head_are_not_heads() -> None:
    """In a numbered layer, or far too short."""
    block = Parts(output=nn.Linear(H, 300, bias=False))
    model = Parts(tokens=nn.Embedding(V, H), layers=nn.ModuleList([block]), head=nn.Linear(H, 10, bias=False))
    groups = names(param_groups(model))
    assert groups == {"output_embeddings": ["tokens.weight"], "decay": ["layers.0.output.weight", "head.weight"]}


def test_a_square_or_a_much_taller_or_shorter_linear_is_not_a_head() -> None:
    model = Parts(tokens=nn.Embedding(V, 64), pooler=nn.Linear(64, 64), up=nn.Linear(64, 256), down=nn.Linear(64, 49))
    groups = names(param_groups(model))
    assert groups["output_embeddings"] == ["tokens.weight"]
    assert groups["decay"] == ["pooler.weight", "up.weight", "down.weight"]


def test_a_head_in_its_own_numbered_place_is_a_candidate() -> None:
    model = nn.Sequential(nn.Embedding(V, H), nn.Linear(H, H), nn.Linear(H, 128))
    with pytest.raises(ValueError, match=r"ambiguous.*'0.weight' \(100, 16\); '2.weight' \(128, 16\)"):
        param_groups(model)


def test_an_embedding_bag_is_an_input_table() -> None:
    model = Parts(words=nn.EmbeddingBag(V, H), classifier=nn.Linear(H, 4))
    with pytest.raises(ValueError, match=r"couple='output': Parts .*'words\.weight'"):
        param_groups(model)
    assert names(param_groups(model, couple="input"))["decay"] == ["classifier.weight"]
    model.predict = nn.Linear(H, V)
    assert coupled_names(param_groups(model, couple="all")) == ["predict.weight", "words.weight"]


class RawHead(nn.Module):
    """A head that is a parameter, not an nn.Linear."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, H)
        self.W_U = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("rows", [V, 128])
def test_a_matrix_of_a_custom_module_may_be_the_head(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"ambiguous.*'tokens.weight' \(100, 16\); 'W_U' \({rows}, 16\)"):
        param_groups(RawHead(rows, H))
    assert names(param_groups(RawHead(rows, H), couple=["tokens.weight"]))["no_decay"] == ["W_U"]


def test_all_tables_of_an_untied_encoder_decoder_are_found() -> None:
    """T5 whose four tables got separate tensors after construction."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "d_model": H, "d_ff": 40, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    for module in (model.encoder.embed_tokens, model.decoder.embed_tokens, model.lm_head):
        module.weight = nn.Parameter(module.weight.detach().clone())
    groups = param_groups(model, couple="all")
    tables = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert set(coupled_names(groups)) == tables
    tokens = torch.randint(0, V, (2, 5))
    model(input_ids=tokens, labels=tokens).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.shape == (V, H)}
    assert with_gradient < tables
    assert names(groups)["output_embeddings"] == ["lm_head.weight"]
