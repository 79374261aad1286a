"""Refusals of `coupled-adam recentre`: models without an exact result, hostile folders, full disks; no files remain."""

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from recentred_models import LLAMA, H, V, change_config, config_of, gpt2, llama, log_probabilities, off_centre, save
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.inspection.recentring import recentre_model


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["recentre", *map(str, arguments)])


def refused(source: Path, *options: str) -> str:
    """Return the message, after checking everything that must be true of a refusal."""
    out = source.parent / "refused"
    result = run(source, out, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit)
    assert not out.exists()
    assert list(source.parent.glob(".*")) == []
    return result.stderr


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(gpt2(), folder / "gpt2")
    save(llama(tie_word_embeddings=False), folder / "llama")
    save(gpt2(), folder / "sharded", max_shard_size="60KB")
    return folder


@pytest.fixture
def tied(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "gpt2", tmp_path / "model"))


@pytest.fixture
def untied(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "llama", tmp_path / "model"))


def add_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_bare_tensor_file_cannot_be_verified(tied: Path) -> None:
    assert "config.json" in refused(tied / "model.safetensors")
    (tied / "config.json").unlink()
    assert "config.json" in refused(tied)


def test_a_final_soft_cap_is_refused_with_its_value(tmp_path: Path) -> None:
    sizes = LLAMA | {"head_dim": 16, "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "pad_token_id": 0}
    model = off_centre(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)))
    source = save(model, tmp_path / "model")
    assert "final_logit_softcapping = 30.0" in refused(source, "--untie")
    change_config(source, final_logit_softcapping=None)  # a soft cap in the attention does not matter
    assert run(source, tmp_path / "out", "--untie").exit_code == 0


def test_a_cap_without_a_config_key_is_found_by_the_comparison(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.LlamaForCausalLM.forward

    def capped(self: Any, *arguments: Any, **named: Any) -> Any:
        found = forward(self, *arguments, **named)
        found.logits = torch.tanh(found.logits)
        return found

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", capped)
    assert "0.0001" in refused(untied)


def test_quantised_weights_are_refused(untied: Path) -> None:
    add_tensor(untied, "model.layers.0.mlp.up_proj.weight", torch.ones(64, H, dtype=torch.int8))
    assert "quantised" in refused(untied)
    change_config(untied, quantization_config={"bits": 4})
    assert "quantization_config" in refused(untied)


def test_token_types_of_gpt2_are_refused_without_untie(tied: Path, tmp_path: Path) -> None:
    (tied / "tokenizer_config.json").write_text(json.dumps({"model_input_names": ["input_ids", "token_type_ids"]}))
    said = refused(tied)
    assert "token_type_ids" in said
    assert "--untie" in said
    assert run(tied, tmp_path / "out", "--untie").exit_code == 0
    assert (log_probabilities(tmp_path / "out") - log_probabilities(tied)).abs().max() < 1e-4


@pytest.mark.parametrize("tensor", ["mtp.fc.weight", "transformer.extra.weight"])
def test_other_users_of_a_tied_table_are_refused(tied: Path, tensor: str) -> None:
    add_tensor(tied, tensor, torch.ones(H, H))
    assert tensor in refused(tied)
    assert tensor in refused(tied, "--untie")


def test_heads_for_further_tokens_are_refused_when_tied(tied: Path) -> None:
    change_config(tied, num_nextn_predict_layers=1)
    assert "num_nextn_predict_layers" in refused(tied)


def test_heads_for_further_tokens_share_an_untied_head(untied: Path, tmp_path: Path) -> None:
    add_tensor(untied, "mtp.fc.weight", torch.ones(H, H))
    assert run(untied, tmp_path / "out").exit_code == 0


def test_other_heads_and_classes_are_refused(tied: Path) -> None:
    change_config(tied, architectures=["GPT2DoubleHeadsModel"])
    assert "GPT2DoubleHeadsModel" in refused(tied)
    change_config(tied, model_type="nothing")
    assert "'nothing'" in refused(tied)
    change_config(tied, model_type="t5", is_encoder_decoder=True)
    assert "encoder-decoder" in refused(tied)


def test_a_config_that_disagrees_with_the_files_is_refused(tied: Path) -> None:
    add_tensor(tied, "lm_head.weight", torch.rand(V, H))
    assert "tie_word_embeddings" in refused(tied)
    config = {key: value for key, value in config_of(tied).items() if key != "tie_word_embeddings"}
    (tied / "config.json").write_text(json.dumps(config))  # as in GPT-2 on the hub
    assert "tie_word_embeddings" in refused(tied)
    change_config(tied, tie_word_embeddings=False)
    assert run(tied, tied.parent / "out").exit_code == 0


def test_missing_tensors_are_refused(untied: Path) -> None:
    tensors = load_file(untied / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, untied / "model.safetensors")
    assert "model.norm.weight" in refused(untied)


def test_adapters_and_pickles_are_refused(tied: Path) -> None:
    (tied / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refused(tied)
    (tied / "adapter_config.json").unlink()
    (tied / "model.safetensors").unlink()
    (tied / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    assert "pytorch_model.bin" in refused(tied)


def test_code_in_the_folder_is_never_run(tied: Path, tmp_path: Path) -> None:
    proof = tmp_path / "code-was-run"
    (tied / "modeling_mine.py").write_text(f"open({str(proof)!r}, 'w')\nclass Mine: pass\nclass MineConfig: pass\n")
    change_config(
        tied, auto_map={"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    )
    assert "auto_map" in refused(tied)
    change_config(tied, auto_map={}, model_type="mine")
    refused(tied)
    assert not proof.exists()


@pytest.mark.parametrize(
    "config", ["[]", "{", '{"model_type": ["gpt2"]}', '{"model_type": "gpt2", "n_embd": "x"}', "[" * 9999]
)
def test_any_invalid_config_gives_one_line(tied: Path, config: str) -> None:
    (tied / "config.json").write_text(config)
    refused(tied)


@pytest.mark.parametrize("content", ["[]", "{}", '{"model": {"vocab": {"a": "b"}}}', "[" * 9999], ids=len)
def test_any_invalid_tokenizer_gives_one_line(tied: Path, content: str) -> None:
    (tied / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refused(tied)


def test_a_tokenizer_that_cannot_be_opened_gives_a_note(tied: Path, tmp_path: Path) -> None:
    (tied / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    result = run(tied, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert "Note: " in result.stderr
    assert json.loads(result.stdout)["padding_rows"] == V - 2


@pytest.mark.parametrize("shard", ["../model.safetensors", "..", "/etc/passwd", "", "missing.safetensors", 7, None])
def test_an_index_that_points_elsewhere_is_refused(models: Path, tmp_path: Path, shard: object) -> None:
    source = Path(shutil.copytree(models / "sharded", tmp_path / "model"))
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["transformer.wte.weight"] = shard
    index.write_text(json.dumps(content))
    assert "index.json" in refused(source)


def test_links_out_of_the_folder_are_refused_and_never_copied(tied: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    (tied / "notes.txt").symlink_to(tmp_path / "secret.txt")
    assert "secret.txt" in refused(tied)
    (tied / "notes.txt").unlink()
    (tied / "more").symlink_to(tmp_path, target_is_directory=True)
    refused(tied)
    (tied / "more").unlink()
    (tied / "gone").symlink_to(tied / "not-there")
    refused(tied)


def test_a_pipe_does_not_hang(tied: Path) -> None:
    os.mkfifo(tied / "pipe")
    assert "pipe" in refused(tied)


def test_a_snapshot_of_the_hub_cache_consists_of_links_and_is_accepted(tied: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(tied.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert run(snapshot, tmp_path / "out").exit_code == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_names_from_a_file_cannot_control_the_terminal(tied: Path) -> None:
    add_tensor(tied, "mtp.\x1b[2J.weight", torch.ones(H, H))
    assert "\x1b" not in refused(tied)


def test_a_full_disk_leaves_no_files(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(recentre_model.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "1.00 KB" in refused(tied)


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """Make the operating system refuse files as large as these models."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_while_writing_leaves_no_files(tied: Path) -> None:
    with little_room():
        assert "File too large" in refused(tied)


def test_an_older_model_is_kept_if_the_new_one_cannot_be_written(tied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tied, out).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with little_room():
        assert run(tied, out, "--overwrite").exit_code == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(tmp_path.glob(".*")) == []


def test_out_may_not_be_the_model_itself(tied: Path) -> None:
    for out in (tied, tied / "inside", tied.parent):
        result = run(tied, out, "--overwrite")
        assert (result.exit_code, result.stdout) == (2, "")
    assert (tied / "model.safetensors").is_file()


def test_entries_that_are_not_finite_are_refused(untied: Path) -> None:
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = torch.nan
    save_file(tensors, untied / "model.safetensors")
    assert "finite" in refused(untied)
