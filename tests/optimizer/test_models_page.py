"""docs/models.md: each row is compared with the groups of a small model, its gradients from autograd, and one step.

Legend: V vocabulary rows, H hidden size.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from group_models import Parts, coupled_names, found_by, names
from page_models import FROZEN, MODELS, PREDICTED, SEEN, H, V, from_config
from test_model_families import BART, BERT, GPT2, MODERN_BERT, SIZES, WHISPER
from torch import nn

from coupled_adam import CoupledAdamW, param_groups

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
# The logit of one token has gradients in its row of the head, in the rows of the input tokens, or in both.
ROWS_OF_ROLE = {
    "output": {PREDICTED},
    "input": set(SEEN),
    "tied": {PREDICTED, *SEEN},
}


def rows_under(heading: str) -> Iterator[list[str]]:
    """The cells of the table under a heading of the page, line by line."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("| ").split("|")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


TABLES = {cells[0]: cells for cells in rows_under("Tables")}
OTHERS = {cells[0]: [*cells, ""] for cells in rows_under("Everything else")}


def roles_on_page(model: str) -> dict[str, str]:
    _, _, coupled, inputs, _ = TABLES[model]
    if coupled == "error":
        return dict.fromkeys(quoted(inputs), "input")
    roles = dict.fromkeys(quoted(coupled), "tied" if coupled.endswith(", tied") else "output")
    return roles | dict.fromkeys(quoted(inputs), "input")


@cache
def model_of(name: str) -> nn.Module:
    return MODELS[name].build() if name in MODELS else FROZEN[name]()


def own_name(parameter: str) -> str:
    """The last component that is a name: 'c_attn' of 'h.0.attn.c_attn.weight', 'lora_A' of 'lora_A.default.weight'."""
    return [part for part in parameter.split(".") if part not in ("weight", "default")][-1]


def is_norm_or_bias(parameter: str, model: nn.Module) -> bool:
    module, _, attribute = parameter.rpartition(".")
    return attribute == "bias" or "Norm" in type(model.get_submodule(module)).__name__


def test_the_page_has_a_row_for_every_model_and_no_other() -> None:
    assert sorted(TABLES) == sorted(OTHERS) == sorted([*MODELS, *FROZEN])


@pytest.mark.parametrize("name", TABLES)
def test_class_matches_the_page(name: str) -> None:
    model = model_of(name)
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    assert quoted(TABLES[name][1]) == [type(inside).__name__]


@pytest.mark.parametrize("name", MODELS)
def test_tables_match_the_page(name: str) -> None:
    groups = param_groups(model_of(name))
    roles = roles_on_page(name)
    assert {table: role for table, (role, _) in found_by(groups).items()} == roles
    assert coupled_names(groups) == [table for table, role in roles.items() if role != "input"]
    assert names(groups).get("input_embeddings", []) == [table for table, role in roles.items() if role == "input"]


@pytest.mark.parametrize("name", MODELS)
def test_autograd_gives_the_tables_the_roles_of_the_page(name: str) -> None:
    """Of all matrices with V rows, only the tables have gradients in exactly these rows."""
    model = model_of(name).eval()
    model.zero_grad()
    model(**MODELS[name].text()).logits[..., PREDICTED].sum().backward()
    roles = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.ndim == 2 and parameter.shape[0] == V:
            touched = set(parameter.grad.abs().sum(dim=1).nonzero()[:, 0].tolist())
            for role, rows in ROWS_OF_ROLE.items():
                if rows == touched:
                    roles[parameter_name] = role
    assert roles == roles_on_page(name)


@pytest.mark.parametrize("name", TABLES)
def test_weight_decay_matches_the_page(name: str) -> None:
    model = model_of(name)
    groups = names(param_groups(model, weight_decay=0.1, couple="none"))
    _, decayed, undecayed, *_ = OTHERS[name]
    assert {own_name(parameter) for parameter in groups["decay"]} == set(quoted(decayed))
    others = {own_name(p) for p in groups.get("no_decay", []) if not is_norm_or_bias(p, model)}
    assert others == set(quoted(undecayed))


@pytest.mark.parametrize("name", MODELS)
def test_one_step_moves_every_table_with_a_second_moment_of_one_row(name: str) -> None:
    row, model = MODELS[name], MODELS[name].build()
    optimizer = CoupledAdamW(model, lr=0.01)
    before = {table: model.get_parameter(table).detach().clone() for table in roles_on_page(name)}
    model(**row.text() | row.extra()).loss.backward()
    optimizer.step()
    for table, role in roles_on_page(name).items():
        parameter = model.get_parameter(table)
        assert not torch.equal(parameter, before[table])
        rows = 1 if role != "input" else V
        assert optimizer.state[parameter]["exp_avg_sq"].shape == (rows, H)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_tables_are_an_error_that_names_them_and_adamw_still_works(name: str) -> None:
    model = model_of(name)
    head = model.get_base_model().get_output_embeddings()
    weight = getattr(head, "base_layer", head).weight
    frozen = next(n for n, p in model.named_parameters(remove_duplicate=False) if p is weight)
    with pytest.raises(ValueError, match=re.escape(frozen)) as error:
        CoupledAdamW(model)
    assert "modules_to_save" in str(error.value)
    assert "torch.optim.AdamW(param_groups(model, couple='none'))" in str(error.value)
    trained = [p for group in param_groups(model, couple="none") for _, p in group["params"]]
    assert set(trained) == {p for p in model.parameters() if p.requires_grad}


AS_MANY_POSITIONS_AS_TOKENS: list[tuple[str, str, dict[str, Any]]] = [
    ("GPT-2", "GPT2LMHeadModel GPT2Config", GPT2 | {"n_positions": V}),
    ("BERT", "BertForMaskedLM BertConfig", BERT | {"max_position_embeddings": V}),
    ("BART", "BartForConditionalGeneration BartConfig", BART | {"max_position_embeddings": V - 2}),  # and two more rows
    ("Whisper", "WhisperForConditionalGeneration WhisperConfig", BART | WHISPER | {"max_target_positions": V}),
]


@pytest.mark.parametrize(("name", "classes", "options"), AS_MANY_POSITIONS_AS_TOKENS)
def test_a_position_table_with_as_many_rows_as_the_vocabulary_is_not_a_table(
    name: str, classes: str, options: dict[str, Any]
) -> None:
    model = from_config(*classes.split(), **options)()
    assert V in [p.shape[0] for n, p in model.named_parameters() if "wpe" in n or "position" in n]
    assert coupled_names(param_groups(model, couple="all")) == list(roles_on_page(name))


@pytest.mark.parametrize(
    ("classes", "options"),
    [
        ("RobertaForMaskedLM RobertaConfig", BERT),
        ("BertForMaskedLM BertConfig", BERT),
        ("ModernBertForMaskedLM ModernBertConfig", BERT | MODERN_BERT),
    ],
)
def test_with_as_many_columns_as_rows_the_transform_before_the_decoder_is_not_a_head(
    classes: str, options: dict[str, Any]
) -> None:
    groups = param_groups(from_config(*classes.split(), **options | {"hidden_size": V})())
    assert [role for role, _ in found_by(groups).values()] == ["tied"]
    assert any(name.endswith(".dense.weight") for name in names(groups)["decay"])


class NamedHead(Parts):
    """A Hugging Face model with its own head, and further modules."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__(tokens=nn.Embedding(V, H), lm_head=nn.Linear(H, V, bias=False), **parts)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_next_to_a_named_head_a_projection_from_another_width_is_not_a_head() -> None:
    """Such as a projection of images to hidden states, if the hidden size equals the number of tokens."""
    model = NamedHead(projection=nn.Linear(40, V, bias=False), second=nn.Linear(H, V, bias=False))
    groups = names(param_groups(model))
    assert groups["output_embeddings"] == ["lm_head.weight", "second.weight"]
    assert groups["decay"] == ["projection.weight"]


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("cls_token", (1, 1, H), False),
        ("mask_token", (1, H), False),
        ("query_tokens", (1, 8, H), True),
        ("r_w_bias", (2, 8), False),
        ("gate_up_proj_bias", (4, 32), False),
        ("bias_u", (2, 8), False),
        ("biased", (2, 8), True),
        ("relative_position_bias_table", (49, 2), False),
        ("rel_pos_h", (49, 8), False),
        ("gated_positional_embedding", (49, H), False),
        ("weight", (1, H), True),
    ],
)
def test_vectors_biases_and_position_tables_of_any_shape_are_not_decayed(
    name: str, shape: tuple[int, ...], decayed: bool
) -> None:
    model = NamedHead(layer=nn.Module())
    model.layer.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    groups = names(param_groups(model))
    assert groups["decay" if decayed else "no_decay"] == [f"layer.{name}"]


def test_a_narrow_table_with_as_many_rows_is_an_input_table_too() -> None:
    """Like the per-layer table of Gemma 4."""
    model = from_config("LlamaForCausalLM", "LlamaConfig", **SIZES)()
    model.per_layer = nn.Embedding(V, 8)
    assert names(param_groups(model))["input_embeddings"] == ["model.embed_tokens.weight", "per_layer.weight"]
