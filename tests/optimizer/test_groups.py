"""Which tensors `param_groups` takes for vocabulary tables, and the groups it builds from them.

Letters: V vocabulary rows, H hidden size, T positions.
"""

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from coupled_adam.optimizer import groups as groups_module
from coupled_adam.optimizer.groups import ParamGroups, param_groups

V, H, T = 100, 16, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.fc = nn.Linear(H, width)
        self.proj = nn.Linear(width, H, bias=False)


class GPT(nn.Module):
    """GPT-2's parameters without its forward pass; `width` is the width of the MLP."""

    def __init__(self, *, tied: bool, width: int = 40, vocabulary: int = V) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, H)
        self.wpe = nn.Embedding(T, H)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(H)
        self.lm_head = nn.Linear(H, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Headless(nn.Module):
    def __init__(self, **rows: int) -> None:
        super().__init__()
        for name, count in rows.items():
            setattr(self, name, nn.Embedding(count, H))
        self.fc = nn.Linear(H, 40, bias=False)


class Wrapper(nn.Module):
    """What DDP is to the names: the model under `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def names(groups: ParamGroups) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def coupled_names(groups: ParamGroups) -> list[str]:
    return [name for group in groups if group.get("coupled") for name, _ in group["params"]]


def found_by(groups: ParamGroups) -> dict[str, tuple[str, str]]:
    return {table.name: (table.role, table.rule) for table in groups.tables}


def test_tied_model_is_split_into_its_table_matrices_and_the_rest() -> None:
    groups = param_groups(GPT(tied=True), weight_decay=0.1)
    assert names(groups) == {
        "output_embeddings": ["wte.weight"],
        "decay": ["h.0.fc.weight", "h.0.proj.weight", "h.1.fc.weight", "h.1.proj.weight"],
        "no_decay": [
            "wpe.weight",
            *(f"h.{layer}.{name}" for layer in (0, 1) for name in ("norm.weight", "norm.bias", "fc.bias")),
            "ln_f.weight",
            "ln_f.bias",
        ],
    }
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1, 0.0]
    assert found_by(groups) == {"wte.weight": ("tied", "Linear tied to nn.Embedding 'wte'")}


def test_params_are_the_tensors_of_the_model_each_once() -> None:
    model = GPT(tied=True)
    pairs = [pair for group in param_groups(model) for pair in group["params"]]
    assert len(pairs) == len(list(model.parameters()))
    for name, tensor in pairs:
        assert tensor is model.get_parameter(name)


def test_untied_model_has_its_head_and_its_input_table_in_two_groups() -> None:
    groups = param_groups(GPT(tied=False))
    assert names(groups)["output_embeddings"] == ["lm_head.weight"]
    assert names(groups)["input_embeddings"] == ["wte.weight"]
    assert found_by(groups) == {
        "lm_head.weight": ("output", "Linear with as many outputs as nn.Embedding 'wte' has rows"),
        "wte.weight": ("input", "nn.Embedding with as many rows as Linear 'lm_head' has outputs"),
    }


@pytest.mark.parametrize(
    ("tied", "couple", "expected"),
    [
        (True, "output", ["wte.weight"]),
        (True, "input", ["wte.weight"]),
        (True, "all", ["wte.weight"]),
        (True, "none", []),
        (False, "output", ["lm_head.weight"]),
        (False, "input", ["wte.weight"]),
        (False, "all", ["lm_head.weight", "wte.weight"]),
        (False, "none", []),
    ],
)
def test_couple_marks_the_tables_it_names(tied: bool, couple: str, expected: list[str]) -> None:
    assert coupled_names(param_groups(GPT(tied=tied), couple=couple)) == expected


def test_groups_that_are_not_coupled_have_no_such_key() -> None:
    for group in param_groups(GPT(tied=False)):
        assert ("coupled" in group) == (group["name"] == "output_embeddings")


@pytest.mark.parametrize("tied", [True, False])
def test_partition_is_the_same_for_every_word(tied: bool) -> None:
    model = GPT(tied=tied)
    partitions = [names(param_groups(model, couple=word)) for word in ("output", "input", "all", "none")]
    assert partitions == [partitions[0]] * 4


def test_adamw_accepts_the_groups_and_keeps_names_and_decay() -> None:
    groups = param_groups(GPT(tied=False), weight_decay=0.1, couple="none")
    expected = names(groups)
    optimizer = torch.optim.AdamW(groups)
    assert {group["name"]: group["param_names"] for group in optimizer.param_groups} == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.1, 0.0]


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


def test_tied_linear_wins_over_one_that_only_has_the_size_of_a_table() -> None:
    groups = param_groups(GPT(tied=True, width=T))
    assert coupled_names(groups) == ["wte.weight"]
    assert "h.0.fc.weight" in names(groups)["decay"]


def test_headless_model_couples_its_only_embedding() -> None:
    groups = param_groups(Headless(tokens=V))
    assert names(groups) == {"output_embeddings": ["tokens.weight"], "decay": ["fc.weight"]}
    assert found_by(groups) == {"tokens.weight": ("tied", "only nn.Embedding")}


def test_headless_model_couples_its_largest_embedding() -> None:
    groups = param_groups(Headless(positions=T, tokens=V), couple="input")
    assert coupled_names(groups) == ["tokens.weight"]
    assert names(groups)["no_decay"] == ["positions.weight"]
    assert found_by(groups) == {"tokens.weight": ("tied", "largest nn.Embedding")}


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
    with pytest.raises(ValueError, match=r"no vocabulary table found.*couple=\[patterns\].*coupled=True"):
        param_groups(nn.Sequential(nn.Linear(H, V)))


def test_patterns_form_a_first_group_and_leave_the_other_tables_undecayed() -> None:
    groups = param_groups(GPT(tied=False), weight_decay=0.1, couple=["wte.*", "h.1.fc.w*", "*te.weight"])
    assert list(names(groups)) == ["coupled", "output_embeddings", "decay", "no_decay"]
    assert coupled_names(groups) == ["wte.weight", "h.1.fc.weight"]
    assert names(groups)["output_embeddings"] == ["lm_head.weight"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.0, 0.1, 0.0]
    assert found_by(groups)["wte.weight"] == ("input", "pattern 'wte.*'")


def test_pattern_matches_a_tied_table_by_any_of_its_names() -> None:
    assert coupled_names(param_groups(GPT(tied=True), couple=["lm_head.*"])) == ["wte.weight"]


def test_patterns_need_no_embedding() -> None:
    groups = param_groups(nn.Sequential(nn.Linear(H, V)), couple=["0.weight"])
    assert names(groups) == {"coupled": ["0.weight"], "no_decay": ["0.bias"]}


def test_patterns_settle_an_ambiguity() -> None:
    groups = param_groups(GPT(tied=False, width=T), couple=["lm_head.weight"])
    assert coupled_names(groups) == ["lm_head.weight"]
    assert names(groups)["input_embeddings"] == ["wte.weight"]
    assert "h.0.fc.weight" in names(groups)["decay"]


def test_all_candidates_stay_undecayed_when_patterns_settle_nothing() -> None:
    groups = param_groups(GPT(tied=False, width=T), couple=["h.0.proj.weight"])
    assert names(groups)["decay"] == ["h.1.proj.weight"]


def test_pattern_without_match_names_near_parameters() -> None:
    with pytest.raises(ValueError, match=r"'lm_heads\.\*' matches no trainable.*'lm_head\.weight'"):
        param_groups(GPT(tied=False), couple=["wte.weight", "lm_heads.*"])


def test_pattern_that_matches_a_vector_names_it_and_its_shape() -> None:
    with pytest.raises(ValueError, match=r"'ln_f\*'.*'ln_f\.weight' has shape \(16,\), expected \(V, H\)"):
        param_groups(GPT(tied=True), couple=["ln_f*"])


@pytest.mark.parametrize("couple", [[], (), None, 3, ["wte.weight", 3], b"wte"])
def test_couple_of_another_kind_is_refused(couple: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Invalid couple value: {couple!r}; expected 'output'")):
        param_groups(GPT(tied=True), couple=couple)


def test_single_string_pattern_is_told_to_go_into_a_list() -> None:
    with pytest.raises(ValueError, match=r"put a name pattern into a list: couple=\['lm_head\.\*'\]"):
        param_groups(GPT(tied=True), couple="lm_head.*")


def test_frozen_parameters_are_left_out() -> None:
    model = GPT(tied=False)
    model.wte.requires_grad_(False)
    model.h[0].requires_grad_(False)
    groups = param_groups(model, couple="all")
    assert coupled_names(groups) == ["lm_head.weight"]
    everything = [name for group in groups for name, _ in group["params"]]
    assert not any(name.startswith(("wte", "h.0")) for name in everything)
    assert re.search(r"^wte\.weight .* no \(frozen\) ", groups.summary(), re.MULTILINE)


@pytest.mark.parametrize(("couple", "table"), [("output", "lm_head"), ("input", "wte")])
def test_frozen_tables_cannot_be_coupled(couple: str, table: str) -> None:
    model = GPT(tied=False)
    model.get_submodule(table).requires_grad_(False)
    with pytest.raises(ValueError, match=rf"frozen \('{table}\.weight'\)"):
        param_groups(model, couple=couple)
    with pytest.raises(ValueError, match=rf"'{table}\.\*' matches frozen parameters only"):
        param_groups(model, couple=[f"{table}.*"])
    assert coupled_names(param_groups(model, couple="none")) == []


@pytest.mark.parametrize(
    "name",
    [
        "wpe",
        "pos_emb",
        "pos_embed",
        "pos_embedding",
        "position_embedding",
        "position_embeddings",
        "positional_embedding",
    ],
)
def test_raw_position_table_is_not_decayed(name: str) -> None:
    model = Headless(tokens=V)
    model.encoder = nn.Module()
    model.encoder.register_parameter(name, nn.Parameter(torch.zeros(1, T, H)))
    for other in (f"not_{name}", f"{name}_projection"):
        model.register_parameter(other, nn.Parameter(torch.zeros(T, H)))
    groups = param_groups(model)
    assert names(groups)["no_decay"] == [f"encoder.{name}"]
    assert names(groups)["decay"] == [f"not_{name}", f"{name}_projection", "fc.weight"]


def test_norms_are_not_decayed_whatever_their_shape_but_what_they_wrap_is() -> None:
    class PreNormBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1, H))
            self.fn = nn.Linear(H, H, bias=False)

    model = Headless(tokens=V)
    model.block = PreNormBlock()
    groups = param_groups(model)
    assert names(groups)["no_decay"] == ["block.gain"]
    assert names(groups)["decay"] == ["fc.weight", "block.fn.weight"]


@pytest.mark.parametrize(
    "wrap",
    [
        Wrapper,
        torch.compile,
        lambda model: Wrapper(torch.compile(model)),
        lambda model: torch.compile(Wrapper(model)),
    ],
    ids=["module", "compiled", "compiled inside", "compiled outside"],
)
@pytest.mark.parametrize("couple", ["all", ["lm_head.weight"]])
def test_wrappers_leave_no_trace_in_names_or_groups(
    wrap: Callable[[nn.Module], nn.Module], couple: str | list[str]
) -> None:
    model = GPT(tied=False)
    plain, wrapped = param_groups(model, couple=couple), param_groups(wrap(model), couple=couple)
    assert names(wrapped) == names(plain)
    assert found_by(wrapped) == found_by(plain)


def test_only_whole_components_are_stripped_from_names() -> None:
    model = nn.Module()
    model.submodule = Headless(tokens=V)
    model._checkpoint_wrapped_module = nn.Linear(H, 40, bias=False)
    groups = param_groups(model)
    assert names(groups)["output_embeddings"] == ["submodule.tokens.weight"]
    assert names(groups)["decay"] == ["submodule.fc.weight", "weight"]


def test_parameters_beside_a_wrapped_module_are_kept_and_names_stay_unique() -> None:
    model = Wrapper(Headless(tokens=V))
    model.fc = nn.Linear(H, 40, bias=False)
    assert names(param_groups(model))["decay"] == ["module.fc.weight", "fc.weight"]


def test_summary_shows_tables_groups_and_the_saved_bytes() -> None:
    model = GPT(tied=False).bfloat16()
    groups = param_groups(model, weight_decay=0.1)
    lines = [re.split(r"  +", line) for line in str(groups).splitlines()]
    rule = "Linear with as many outputs as nn.Embedding 'wte' has rows"
    assert ["lm_head.weight", "(100, 16)", "bfloat16", "output", "yes", rule] in lines
    assert any(line[:5] == ["wte.weight", "(100, 16)", "bfloat16", "input", "no"] for line in lines)
    assert ["output_embeddings", "1", "1,600", "0.0"] in lines
    assert ["decay", "4", "2,560", "0.1"] in lines

    adamw = 2 * 2 * sum(parameter.numel() for parameter in model.parameters())
    saving = 2 * V * H - 4 * H  # one bfloat16 (V, H) tensor gives way to H float32 numbers
    assert ["these groups", f"{adamw - saving:,}"] in lines
    assert ["AdamW", f"{adamw:,}"] in lines
    assert ["saving", f"{saving:,} ({100 * saving / adamw:.1f} %)"] in lines


def test_summary_is_the_same_after_torch_has_rewritten_the_groups() -> None:
    groups = param_groups(GPT(tied=True))
    before = groups.summary()
    torch.optim.AdamW(groups)
    assert groups.summary() == before


def test_groups_can_be_copied_with_their_summary() -> None:
    groups = param_groups(GPT(tied=True))
    assert copy.deepcopy(groups).summary() == groups.summary()


@pytest.mark.parametrize("weight_decay", [-1, math.nan, math.inf, "0.1", None])
def test_invalid_weight_decay_is_refused(weight_decay: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid weight_decay value: {weight_decay}"):
        param_groups(GPT(tied=True), weight_decay=weight_decay)


def test_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model is a list; pass the torch\.nn\.Module"):
        param_groups([nn.Parameter(torch.zeros(V, H))])  # type: ignore[arg-type]


def test_flattened_parameters_are_refused() -> None:
    model = GPT(tied=True)
    model.wte.weight._fsdp_flattened = True
    with pytest.raises(ValueError, match=r"flattened parameters have no rows; use .*fully_shard"):
        param_groups(model)


def test_module_wrapped_by_fsdp1_is_refused() -> None:
    class FullyShardedDataParallel(Wrapper):
        pass

    class Subclass(FullyShardedDataParallel):
        pass

    with pytest.raises(ValueError, match="FSDP1"):
        param_groups(Wrapper(Subclass(GPT(tied=True))))


def test_file_does_not_import_fsdp() -> None:
    code = "import runpy, sys, torch; before = set(sys.modules); runpy.run_path(sys.argv[1]); "
    code += "sys.exit('torch.distributed.fsdp' in set(sys.modules) - before)"
    assert subprocess.run([sys.executable, "-c", code, groups_module.__file__]).returncode == 0


class Accessors(GPT):
    """A model with Hugging Face's two accessors, which return what they are told or raise it."""

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
def test_accessor_without_a_head_makes_the_input_table_tied(head: Exception | None) -> None:
    groups = param_groups(Accessors("wpe", head))
    assert found_by(groups) == {"wpe.weight": ("tied", "Hugging Face get_input_embeddings()")}


def test_head_that_the_accessors_do_not_know_is_found_by_its_size() -> None:
    assert coupled_names(param_groups(Accessors("wte", None))) == ["lm_head.weight"]


@pytest.mark.parametrize("wrong", ["ln_f", "h"])
def test_accessors_that_return_no_table_are_passed_over(wrong: str) -> None:
    assert coupled_names(param_groups(Accessors(wrong, "wpe"))) == ["lm_head.weight"]
    assert coupled_names(param_groups(Accessors("wpe", wrong))) == ["lm_head.weight"]


def test_accessor_that_returns_a_table_of_another_model_is_passed_over() -> None:
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


@pytest.mark.parametrize("build", [hf_gpt2, hf_llama], ids=["gpt2", "llama"])
def test_hugging_face_base_model_couples_its_only_table(build: Callable[..., nn.Module]) -> None:
    base = build().base_model
    groups = param_groups(base)
    (table,) = groups.tables
    assert table.weight is base.get_input_embeddings().weight
    assert (table.role, table.rule) == ("tied", "Hugging Face get_input_embeddings()")
    assert coupled_names(groups) == [table.name]


def test_sharded_tables_count_with_all_their_rows(tmp_path: Any) -> None:
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


class Parts(nn.Module):
    """Modules under names of the test's choosing."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_a_classifier_beside_a_type_table_is_not_taken_for_the_vocabulary() -> None:
    model = Parts(words=nn.Embedding(100, 8), types=nn.Embedding(2, 8), classifier=nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"ambiguous.*'classifier.weight' \(2, 8\).*'words.weight' \(100, 8\)"):
        param_groups(model)


def test_a_padded_head_is_never_silently_left_to_adamw() -> None:
    model = Parts(wte=nn.Embedding(100, 8), wpe=nn.Embedding(128, 8), fc=nn.Linear(8, 40), lm_head=nn.Linear(8, 128))
    with pytest.raises(ValueError, match=r"ambiguous.*'lm_head.weight' \(128, 8\).*'wte.weight' \(100, 8\)"):
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
