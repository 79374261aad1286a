"""`coupled-adam recentre` on Hugging Face folders that transformers writes and reads.

Legend: V vocabulary rows, H hidden size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from recentred_models import (  # fmt: skip
    GPT2,
    TOKENS,
    H,
    V,
    change_config,
    config_of,
    gpt2,
    llama,
    log_probabilities,
    off_centre,
    save,
    write_tokenizer,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from coupled_adam.cli import app

# For a float32 table, whose entries have seven digits.
ROUNDING = 1e-4


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["recentre", *map(str, arguments)])


def recentre(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def changed_names(before: Path, after: Path) -> set[str]:
    old, new = weights(before), weights(after)
    return {name for name in new if name not in old or not torch.equal(old[name], new[name])}


def mean_ratio(table: torch.Tensor, rows: int = V) -> float:
    table = table.double()[:rows]
    return float(table.mean(0).norm() / table.norm(dim=1).mean())


def test_a_tied_gpt2_moves_its_mean_to_the_positions(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    done = recentre(source, out)
    assert (done["changed"], done["method"]) == (True, "positions")
    assert changed_names(source, out) == {"transformer.wte.weight", "transformer.wpe.weight"} == set(done["tensors"])
    old, new = weights(source), weights(out)
    mean = old["transformer.wte.weight"].double().mean(0)
    torch.testing.assert_close(
        new["transformer.wte.weight"].double(), old["transformer.wte.weight"].double() - mean, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        new["transformer.wpe.weight"].double(), old["transformer.wpe.weight"].double() + mean, rtol=0, atol=1e-6
    )
    assert mean_ratio(old["transformer.wte.weight"]) > 0.5
    assert mean_ratio(new["transformer.wte.weight"]) < 1e-6
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert done["unrounded"][0]["largest"] < 1e-11
    assert 0 < done["stored"][0]["largest"] < ROUNDING
    assert done["added_bytes"] == 0


def test_only_the_head_of_an_untied_gpt2_changes(tmp_path: Path) -> None:
    source, out = save(gpt2(tie_word_embeddings=False), tmp_path / "model"), tmp_path / "out"
    done = recentre(source, out)
    assert done["method"] == "head"
    assert changed_names(source, out) == {"lm_head.weight"}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING
    assert mean_ratio(weights(out)["lm_head.weight"]) < 1e-6


def test_only_the_head_of_an_untied_llama_changes(tmp_path: Path) -> None:
    source, out = save(llama(tie_word_embeddings=False), tmp_path / "model"), tmp_path / "out"
    assert recentre(source, out)["tensors"] == ["lm_head.weight"]
    assert changed_names(source, out) == {"lm_head.weight"}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING


def test_a_tied_llama_is_refused_without_untie_and_the_message_names_the_cost(tmp_path: Path) -> None:
    source = save(llama(tie_word_embeddings=True), tmp_path / "model")
    result = run(source, tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--untie" in result.stderr
    assert "41.0 KB" in result.stderr  # 320 x 32 numbers of 4 bytes
    assert not (tmp_path / "out").exists()


def test_a_tied_llama_gets_its_own_head_with_untie(tmp_path: Path) -> None:
    source, out = save(llama(tie_word_embeddings=True), tmp_path / "model"), tmp_path / "out"
    done = recentre(source, out, "--untie")
    assert (done["method"], done["added_bytes"]) == ("untie", V * H * 4)
    assert changed_names(source, out) == {"lm_head.weight"}
    assert config_of(out) == config_of(source) | {"tie_word_embeddings": False}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight


def test_a_tied_gpt2_can_be_untied_instead(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    assert recentre(source, out, "--untie")["method"] == "untie"
    assert changed_names(source, out) == {"lm_head.weight"}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING


@pytest.mark.parametrize("prefixed", [True, False])
def test_files_without_the_prefix_of_the_class_keep_their_names(tmp_path: Path, prefixed: bool) -> None:
    """As in GPT-2 on the hub, including the masks of old versions."""
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    prefix = "transformer." if prefixed else ""
    tensors = {prefix + name.removeprefix("transformer."): each for name, each in weights(source).items()}
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    tensors[f"{prefix}h.1.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    recentre(source, out)
    assert changed_names(source, out) == {f"{prefix}wte.weight", f"{prefix}wpe.weight"}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING
    recentre(source, tmp_path / "untied", "--untie")
    assert (log_probabilities(tmp_path / "untied") - log_probabilities(source)).abs().max() < ROUNDING


def test_a_tied_table_that_is_stored_twice_changes_twice(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    tensors = weights(source)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    recentre(source, out)
    new = weights(out)
    assert torch.equal(new["lm_head.weight"], new["transformer.wte.weight"])
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING


@pytest.mark.parametrize("untie", [False, True])
def test_only_the_shards_with_a_changed_tensor_are_rewritten(tmp_path: Path, untie: bool) -> None:
    source, out = save(gpt2(), tmp_path / "model", max_shard_size="60KB"), tmp_path / "out"
    shards = {path.name: path.read_bytes() for path in source.glob("*.safetensors")}
    assert len(shards) > 2
    recentre(source, out, *(["--untie"] if untie else []))
    old_index, new_index = (json.loads((each / "model.safetensors.index.json").read_text()) for each in (source, out))
    changed = changed_names(source, out)
    different = {name for name, content in shards.items() if (out / name).read_bytes() != content}
    if untie:
        assert changed == {"lm_head.weight"}
        assert different == set()
        (added,) = {path.name for path in out.glob("*.safetensors")} - shards.keys()
        assert new_index["weight_map"] == old_index["weight_map"] | {"lm_head.weight": added}
        assert new_index["metadata"]["total_size"] == old_index["metadata"]["total_size"] + V * H * 4
    else:
        assert different == {old_index["weight_map"][name] for name in changed}
        assert new_index == old_index
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING


def test_bfloat16_stays_bfloat16_and_its_rounding_is_measured(tmp_path: Path) -> None:
    source, out = save(gpt2().to(torch.bfloat16), tmp_path / "model"), tmp_path / "out"
    done = recentre(source, out)
    assert {tensor.dtype for tensor in weights(out).values()} == {torch.bfloat16}
    assert done["dtype"] == "bfloat16"
    assert done["unrounded"][0]["largest"] < 1e-11
    largest = (log_probabilities(out) - log_probabilities(source)).abs().max()
    assert 1e-4 < largest < 1
    assert 1e-4 < done["stored"][0]["largest"] < 1
    assert (out / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size


def test_table_and_positions_each_keep_their_own_type(tmp_path: Path) -> None:
    source, out = save(gpt2().to(torch.bfloat16), tmp_path / "model"), tmp_path / "out"
    tensors = weights(source)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    recentre(source, out)
    assert {name: each.dtype for name, each in weights(out).items()} == {
        name: each.dtype for name, each in tensors.items()
    }
    recentre(source, tmp_path / "float32", "--dtype", "float32")
    assert weights(tmp_path / "float32")["transformer.wte.weight"].dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_float32_rounds_less_and_is_loaded_as_float32(tmp_path: Path, tied: bool) -> None:
    source, out = save(llama(tie_word_embeddings=tied).to(torch.bfloat16), tmp_path / "model"), tmp_path / "out"
    done = recentre(source, out, "--dtype", "float32", *(["--untie"] if tied else []))
    types = {name: tensor.dtype for name, tensor in weights(out).items()}
    assert types.pop("lm_head.weight") == torch.float32
    assert set(types.values()) == {torch.bfloat16}
    assert done["stored"][0]["largest"] < ROUNDING
    assert done["added_bytes"] == V * H * (4 if tied else 2)
    assert transformers.AutoModelForCausalLM.from_pretrained(out).lm_head.weight.dtype == torch.float32
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < ROUNDING


def test_a_second_call_reports_that_nothing_is_left_to_do(tmp_path: Path) -> None:
    for number, model in enumerate((gpt2(), gpt2().to(torch.bfloat16), gpt2().half())):
        first, second = tmp_path / f"first{number}", tmp_path / f"second{number}"
        recentre(save(model, tmp_path / f"model{number}"), first)
        done = recentre(first, second)
        assert (done["changed"], done["out"], done["tensors"]) == (False, None, [])
        assert not second.exists()
    result = run(first, second)
    assert result.exit_code == 0
    assert "Nothing to do" in result.stdout


def test_padding_rows_move_but_do_not_count(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[TOKENS:] = 100.0
    source, out = save(model, tmp_path / "model"), tmp_path / "out"
    write_tokenizer(source)
    done = recentre(source, out)
    assert (done["rows"], done["padding_rows"]) == (TOKENS, V - TOKENS)
    assert [table["shape"] for table in done["after"]["tables"]] == [[TOKENS, H]] * 2
    assert done["after"]["tables"][1]["mu_norm_ratio"] < 1e-6
    old, new = weights(source)["lm_head.weight"].double(), weights(out)["lm_head.weight"].double()
    torch.testing.assert_close(old - new, old[:TOKENS].mean(0).expand(V, H), rtol=1e-5, atol=1e-5)
    assert mean_ratio(new, TOKENS) < 1e-6


def test_text_is_compared_if_there_is_a_tokenizer(tmp_path: Path) -> None:
    source = save(gpt2(), tmp_path / "model")
    result = run(source, tmp_path / "without", "--json")
    assert [each["tokens"] for each in json.loads(result.stdout)["stored"]] == ["random tokens"]
    assert "Note: " in result.stderr
    (tmp_path / "elsewhere").mkdir()
    write_tokenizer(tmp_path / "elsewhere")
    done = recentre(source, tmp_path / "given", "--tokenizer", tmp_path / "elsewhere")
    assert [each["tokens"] for each in done["stored"]] == ["random tokens", "text"]
    assert run(source, tmp_path / "wrong", "--tokenizer", "no-such").exit_code == 2
    write_tokenizer(source)
    result = run(source, tmp_path / "with", "--json")
    assert [each["tokens"] for each in json.loads(result.stdout)["stored"]] == ["random tokens", "text"]
    assert "Note: " not in result.stderr


def test_everything_else_is_copied_and_other_weights_are_left_out(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    write_tokenizer(source)
    (source / "README.md").write_text("a card\n")
    (source / "more" / "notes").mkdir(parents=True)
    (source / "more" / "notes" / "a.txt").write_text("deep\n")
    (source / "pytorch_model.bin").write_bytes(b"old weights")
    (source / "model.gguf").write_bytes(b"old weights")
    result = run(source, out)
    assert result.exit_code == 0, result.output
    for name in ("README.md", "more/notes/a.txt", "tokenizer.json", "generation_config.json", "config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / "model.gguf").exists()
    assert "pytorch_model.bin" in result.stderr
    assert "model.gguf" in result.stderr
    with safe_open(out / "model.safetensors", "pt") as new, safe_open(source / "model.safetensors", "pt") as old:
        assert new.metadata() == old.metadata()
    assert list(tmp_path.glob(".*")) == []


def test_measures_before_and_after_are_shown_side_by_side(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    result = run(source, out)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if "mean-embedding ratio" in line)
    before, after = (float(cell) for cell in line.split("│")[2:4])
    assert before == pytest.approx(mean_ratio(weights(source)["transformer.wte.weight"]), rel=1e-3)
    assert after < 1e-6
    done = recentre(source, tmp_path / "again")
    assert done["before"]["path"] == str(source)
    assert done["after"]["path"] == str(tmp_path / "again")
    assert done["before"]["tables"][0]["mu_norm_ratio"] == pytest.approx(done["mu_norm_ratio"])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPTNeo", {"hidden_size": H, "num_layers": 2, "attention_types": [[["global"], 2]], "num_heads": 2}),
        ("GPTBigCode", {"n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 48}),
        ("OpenAIGPT", {"n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 48}),
        ("OPT", {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 64,
                 "word_embed_proj_dim": H, "max_position_embeddings": 48}),
    ],
)  # fmt: skip
def test_other_families_with_learned_positions(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=None, **settings
    )
    source = save(off_centre(transformers.AutoModelForCausalLM.from_config(config)), tmp_path / "model")
    done = recentre(source, tmp_path / "out")
    assert done["method"] == "positions"
    assert done["unrounded"][0]["largest"] < 1e-6
    assert (log_probabilities(tmp_path / "out") - log_probabilities(source)).abs().max() < ROUNDING


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma", {"tie_word_embeddings": True}),  # scales its input
        ("Cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
        ("Granite", {"tie_word_embeddings": False, "logits_scaling": 8.0}),
        ("Phi", {"tie_word_embeddings": False}),  # a bias of the head and of the last norm
    ],
)
def test_biases_multipliers_and_scaled_inputs_are_exact(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    sizes = {key: value for key, value in LLAMA_SIZES.items() if name != "Phi" or key != "num_key_value_heads"}
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    source = save(off_centre(transformers.AutoModelForCausalLM.from_config(config)), tmp_path / "model")
    done = recentre(source, tmp_path / "out", *(["--untie"] if changes["tie_word_embeddings"] else []))
    assert max(each["largest"] for each in done["unrounded"]) < 1e-6
    assert (log_probabilities(tmp_path / "out") - log_probabilities(source)).abs().max() < ROUNDING


LLAMA_SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def test_overwrite_replaces_an_older_model(tmp_path: Path) -> None:
    source, out = save(gpt2(), tmp_path / "model"), tmp_path / "out"
    recentre(source, out)
    assert run(source, out).exit_code == 2
    change_config(out, n_layer=99)
    recentre(source, out, "--overwrite")
    assert config_of(out)["n_layer"] == GPT2["n_layer"]
