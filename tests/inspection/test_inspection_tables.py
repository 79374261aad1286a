"""Which tensors are recognised as tables, and when they are called tied.

Legend: V vocabulary rows, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coupled_adam.inspection.model_tables import read_model

V, H = 12, 4
ONE, OTHER = torch.arange(48.0).reshape(V, H), -torch.arange(48.0).reshape(V, H)


def save(path: Path, tensors: Mapping[str, Tensor]) -> str:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "a.safetensors")
    return str(path / "a.safetensors")


def roles(path: str, tensor: str | None = None) -> dict[str, str]:
    return {table.name: table.role for table in read_model(path, tensor).tables}


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("transformer.wte.weight", "lm_head.weight"),
        ("_orig_mod.module.transformer.wte.weight", "_orig_mod.module.lm_head.weight"),
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("tok_embeddings.weight", "output.weight"),
        ("token_embd.weight", "output.weight"),
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("model.shared.weight", "lm_head.weight"),
        ("language_model.embedding.word_embeddings.weight", "language_model.output_layer.weight"),
        ("backbone.embeddings.weight", "lm_head.weight"),
        ("emb.weight", "head.weight"),
    ],
)
def test_tables_are_found_by_the_names_of_the_usual_families(tmp_path: Path, embedding: str, head: str) -> None:
    noise = {
        "transformer.wpe.weight": torch.ones(9, H),
        "model.embeddings.position_embeddings.weight": torch.ones(9, H),
        "layers.0.attention.output.weight": torch.ones(H, H),
        "layers.61.embed_tokens.weight": torch.ones(V, H),
        "blk.0.attn_output.weight": torch.ones(H, H),
        "output.bias": torch.ones(V),
    }
    path = save(tmp_path, {embedding: ONE, head: OTHER, **noise})
    assert roles(path) == {embedding: "input", head: "output"}
    assert not read_model(path).tied


def test_tables_with_the_same_content_are_tied(tmp_path: Path) -> None:
    path = save(tmp_path, {"wte.weight": ONE, "lm_head.weight": ONE})
    assert roles(path) == {"wte.weight": "tied"}
    assert read_model(path).tied


def test_tables_that_differ_in_the_last_entry_only_are_not_tied(tmp_path: Path) -> None:
    rows = 5000  # more than one comparison block
    large = torch.ones(rows, H)
    other = large.clone()
    other[-1, -1] = 2.0
    assert len(roles(save(tmp_path, {"wte.weight": large, "lm_head.weight": other}))) == 2


def test_without_a_head_the_input_table_is_the_head(tmp_path: Path) -> None:
    assert roles(save(tmp_path, {"wte.weight": ONE, "h.0.c_attn.weight": OTHER})) == {"wte.weight": "tied"}


def test_a_head_without_an_input_table_is_an_output_table(tmp_path: Path) -> None:
    path = save(tmp_path, {"lm_head.weight": ONE, "h.11.c_attn.weight": OTHER})
    assert roles(path) == {"lm_head.weight": "output"}
    assert not read_model(path).tied


def test_one_table_under_several_names_is_one_table(tmp_path: Path) -> None:
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    torch.save(dict.fromkeys(names, ONE), tmp_path / "a.bin")
    assert roles(str(tmp_path / "a.bin")) == {"shared.weight": "tied"}


def test_several_different_tables_are_listed(tmp_path: Path) -> None:
    path = save(tmp_path, {"text.embed_tokens.weight": ONE, "sound.embed_tokens.weight": OTHER})
    with pytest.raises(ValueError, match=r"--tensor: .*sound.embed_tokens.weight \(12, 4\)") as error:
        read_model(path)
    assert "text.embed_tokens.weight (12, 4)" in str(error.value)
    assert roles(path, "sound.embed_tokens.weight") == {"sound.embed_tokens.weight": "input"}


def test_the_only_matrix_is_used_whatever_its_name(tmp_path: Path) -> None:
    assert roles(save(tmp_path, {"Q": ONE, "b": torch.ones(3)})) == {"Q": "tied"}


def test_several_matrices_without_a_usual_name_are_listed_largest_first(tmp_path: Path) -> None:
    path = save(tmp_path, {"small": torch.ones(2, H), "large": torch.ones(50, H), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"--tensor: large \(50, 4\), small \(2, 4\)$"):
        read_model(path)


@pytest.mark.parametrize("tensors", [{"wte.weight": torch.ones(V)}, {"a": torch.ones(2, 3, 4)}, {}])
def test_without_a_matrix_the_message_lists_the_tensors(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="2-D") as error:
        read_model(save(tmp_path, tensors))
    assert all(name in str(error.value) for name in tensors)


@pytest.mark.parametrize("wanted", ["model.embed_tokens.weight", "embed_tokens.weight", "embed_tokens"])
def test_a_tensor_is_chosen_by_its_name_or_the_end_of_it(tmp_path: Path, wanted: str) -> None:
    path = save(tmp_path, {"model.embed_tokens.weight": ONE, "lm_head.weight": OTHER})
    assert roles(path, wanted) == {"model.embed_tokens.weight": "input"}
    assert roles(path, "lm_head") == {"lm_head.weight": "output"}


@pytest.mark.parametrize("wanted", ["wte", "lm_head"])
def test_a_chosen_tensor_of_a_tied_model_is_called_tied(tmp_path: Path, wanted: str) -> None:
    model = read_model(save(tmp_path, {"wte.weight": ONE, "lm_head.weight": ONE}), wanted)
    assert model.tied
    assert [(table.name, table.role) for table in model.tables] == [(f"{wanted}.weight", "tied")]


@pytest.mark.parametrize("wanted", ["model.embed_token.weight", "embed_tokns", "embed"])
def test_similar_names_are_suggested_for_a_wrong_one(tmp_path: Path, wanted: str) -> None:
    path = save(tmp_path, {"model.embed_tokens.weight": ONE, "norm": torch.ones(3)})
    with pytest.raises(ValueError, match=rf"'{wanted}'.*: model\.embed_tokens\.weight$"):
        read_model(path, wanted)


def test_an_ending_that_matches_several_tensors_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {"a.wte.weight": ONE, "b.wte.weight": OTHER})
    with pytest.raises(ValueError, match=r"'wte': a\.wte\.weight, b\.wte\.weight;"):
        read_model(path, "wte")


def test_a_chosen_vector_is_refused_with_its_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'norm' .*\(3,\), .*\(V, H\)"):
        read_model(save(tmp_path, {"norm": torch.ones(3)}), "norm")


def test_an_empty_table_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((3, 0), np.float32))
    with pytest.raises(ValueError, match=r"a\.npy: "):
        read_model(str(tmp_path / "a.npy"))


@pytest.mark.parametrize(
    "path", ["missing.npy", "missing.json", "./missing", "./missing/model", "/missing/model", "runs/missing"]
)
def test_a_missing_path_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=f"^{path}: (?!.*Hugging Face)"):
        read_model(path)
