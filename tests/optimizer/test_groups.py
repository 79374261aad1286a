"""The groups that `param_groups` builds: by role, by pattern and by weight decay.

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
from group_models import GPT, H, Headless, Parts, T, V, Wrapper, coupled_names, found_by, names
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import groups as groups_module
from coupled_adam.optimizer.groups import param_groups


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
    [(name, (role, rule))] = found_by(groups).items()
    assert (name, role) == ("wte.weight", "tied")
    assert re.search(r"Linear\b.*nn\.Embedding 'wte'", rule)


def test_groups_contain_every_tensor_of_the_model_once() -> None:
    model = GPT(tied=True)
    pairs = [pair for group in param_groups(model) for pair in group["params"]]
    assert len(pairs) == len(list(model.parameters()))
    for name, tensor in pairs:
        assert tensor is model.get_parameter(name)


def test_untied_model_has_its_head_and_its_input_table_in_two_groups() -> None:
    groups = param_groups(GPT(tied=False))
    assert names(groups)["output_embeddings"] == ["lm_head.weight"]
    assert names(groups)["input_embeddings"] == ["wte.weight"]
    found = found_by(groups)
    assert {name: role for name, (role, _) in found.items()} == {"lm_head.weight": "output", "wte.weight": "input"}
    assert "nn.Embedding 'wte'" in found["lm_head.weight"][1]
    assert "Linear 'lm_head'" in found["wte.weight"][1]


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
def test_partition_is_the_same_for_every_value_of_couple(tied: bool) -> None:
    model = GPT(tied=tied)
    partitions = [names(param_groups(model, couple=word)) for word in ("output", "input", "all", "none")]
    assert partitions == [partitions[0]] * 4


def test_adamw_accepts_the_groups_and_keeps_names_and_decay() -> None:
    groups = param_groups(GPT(tied=False), weight_decay=0.1, couple="none")
    expected = names(groups)
    optimizer = torch.optim.AdamW(groups)
    assert {group["name"]: group["param_names"] for group in optimizer.param_groups} == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.1, 0.0]


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


@pytest.mark.parametrize("pattern", ["places.weight", "fc.weight"])
def test_a_head_is_never_decayed_whatever_the_pattern(pattern: str) -> None:
    model = Parts(chars=nn.Embedding(65, H), places=nn.Embedding(256, H), fc=nn.Linear(H, 40), lm_head=nn.Linear(H, 65))
    groups = param_groups(model, weight_decay=0.1, couple=[pattern])
    decayed = [name for group in groups if group["weight_decay"] for name, _ in group["params"]]
    assert decayed == ([] if pattern == "fc.weight" else ["fc.weight"])


@pytest.mark.parametrize("name", ["fc_out", "lm_head", "score"])
@pytest.mark.parametrize("outputs", [65, 96, 40])
def test_a_head_of_any_name_is_never_decayed_whatever_the_pattern(name: str, outputs: int) -> None:
    """As tall as the embedding, padded, or shorter."""
    model = Parts(chars=nn.Embedding(65, H), fc=nn.Linear(H, 200))
    setattr(model, name, nn.Linear(H, outputs))
    groups = param_groups(model, weight_decay=0.1, couple=["chars.weight"])
    assert names(groups)["decay"] == ["fc.weight"]
    model.places = nn.Embedding(256, H)
    groups = param_groups(model, weight_decay=0.1, couple=["places.weight"])
    assert f"{name}.weight" not in names(groups).get("decay", [])


def test_pattern_without_match_names_similar_parameters() -> None:
    with pytest.raises(ValueError, match=r"'lm_heads\.\*'.*'lm_head\.weight'"):
        param_groups(GPT(tied=False), couple=["wte.weight", "lm_heads.*"])


def test_pattern_that_matches_a_vector_names_it_and_its_shape() -> None:
    with pytest.raises(ValueError, match=r"'ln_f\*'.*'ln_f\.weight'.*\(16,\).*\(V, H\)"):
        param_groups(GPT(tied=True), couple=["ln_f*"])


@pytest.mark.parametrize("couple", [[], (), None, 3, ["wte.weight", 3], b"wte"])
def test_couple_of_another_type_is_refused(couple: Any) -> None:
    with pytest.raises(ValueError, match=rf"couple\b.* {re.escape(repr(couple))}.*'output', 'input', 'all'"):
        param_groups(GPT(tied=True), couple=couple)


def test_error_for_a_single_string_pattern_suggests_a_list() -> None:
    with pytest.raises(ValueError, match=r"couple=\['lm_head\.\*'\]"):
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
    with pytest.raises(ValueError, match=rf"'{table}\.\*'.*'{table}\.weight'.*requires_grad=True"):
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
        "position_embedding_table",
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


def test_position_table_in_its_own_module_is_not_decayed_but_a_network_is() -> None:
    model = Headless(tokens=V)
    model.pos_emb = nn.Module()
    model.pos_emb.weight = nn.Parameter(torch.zeros(T, H))
    model.pos_emb.network = nn.Linear(1, H, bias=False)
    groups = param_groups(model)
    assert names(groups)["no_decay"] == ["pos_emb.weight"]
    assert names(groups)["decay"] == ["fc.weight", "pos_emb.network.weight"]


def test_norms_of_any_shape_are_not_decayed_but_the_modules_they_wrap_are() -> None:
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


def test_parameters_next_to_a_wrapped_module_are_kept_and_names_stay_unique() -> None:
    model = Wrapper(Headless(tokens=V))
    model.fc = nn.Linear(H, 40, bias=False)
    assert names(param_groups(model))["decay"] == ["module.fc.weight", "fc.weight"]


def test_summary_shows_tables_groups_and_the_saved_bytes() -> None:
    model = GPT(tied=False).bfloat16()
    groups = param_groups(model, weight_decay=0.1)
    lines = [re.split(r"  +", line) for line in str(groups).splitlines()]
    rule = found_by(groups)["lm_head.weight"][1]
    assert ["lm_head.weight", "(100, 16)", "bfloat16", "output", "yes", rule] in lines
    assert any(line[:5] == ["wte.weight", "(100, 16)", "bfloat16", "input", "no"] for line in lines)
    assert ["output_embeddings", "1", "1,600", "0.0"] in lines
    assert ["decay", "4", "2,560", "0.1"] in lines

    adamw = 2 * 2 * sum(parameter.numel() for parameter in model.parameters())
    saving = 2 * V * H - 4 * H  # one bfloat16 (V, H) tensor is replaced by H float32 numbers
    assert ["these groups", f"{adamw - saving:,}"] in lines
    assert ["AdamW", f"{adamw:,}"] in lines
    assert ["saving", f"{saving:,} ({saving / adamw:.0%})"] in lines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.0, 0.99)},
        {"row_exponent": 0.25},
        {"row_exponent": 1.0, "betas": (0.0, 0.99), "state_dtype": torch.bfloat16},
        {"state_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_summary_counts_the_bytes_of_the_true_state(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = GPT(tied=True).to(dtype)
    groups = param_groups(model, options={"output_embeddings": options})
    optimizer = CoupledAdamW(groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [state for state in optimizer.state.values() if state]
    size = sum(moment.nbytes for state in states for key, moment in state.items() if key != "step")
    assert f"these groups     {size:,}" in str(groups)


def test_groups_can_be_used_by_several_coupled_optimizers_with_their_own_options() -> None:
    groups = param_groups(GPT(tied=False))
    before = [dict(group) for group in groups]
    first = CoupledAdamW(groups, lr=1e-3)
    second = CoupledAdamW(groups, lr=5e-4, max_grad_norm=1.0)
    assert {group["lr"] for group in first.param_groups} == {1e-3}
    assert {group["lr"] for group in second.param_groups} == {5e-4}
    assert list(groups) == before
    assert torch.optim.AdamW(groups, lr=3e-4).param_groups[0]["lr"] == 3e-4


def test_groups_with_options_written_by_torch_are_refused() -> None:
    groups = param_groups(GPT(tied=False))
    torch.optim.AdamW(groups, lr=0.125)
    with pytest.raises(ValueError, match=r"group 0: .*lr=0\.125.*param_groups\(model\)"):
        CoupledAdamW(groups, lr=5e-4)


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


def test_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model\b.*\blist\b.*torch\.nn\.Module"):
        param_groups([nn.Parameter(torch.zeros(V, H))])  # type: ignore[arg-type]


def test_flattened_parameters_are_refused() -> None:
    model = GPT(tied=True)
    model.wte.weight._fsdp_flattened = True
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
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
