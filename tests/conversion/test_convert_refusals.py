"""Input that `coupled-adam convert` refuses: one line with the reason, exit code 2, and nothing written."""

import errno
import json
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_runs import H, V, convert, llama, load, train_steps
from transformers import LlamaConfig, LlamaForCausalLM

from coupled_adam import CoupledAdamW
from coupled_adam.conversion import convert_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Trainer folder trained with AdamW; tests must not change it."""
    return write_checkpoint(tmp_path_factory.mktemp("runs") / "checkpoint-3")


def write_checkpoint(folder: Path, kind: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> Path:
    model = llama()
    optimizer = kind(model if kind is CoupledAdamW else model.parameters(), lr=1e-2, **options)
    train_steps(model, optimizer)
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")
    return folder


def refused(tmp_path: Path, source: Path, *options: object, to: str = "coupled", out: Path | None = None) -> str:
    """The error line of the command."""
    new = out is None
    out = out or tmp_path / "out"
    result = convert(source, out, "--to", to, *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    if new:
        assert not out.exists()
        assert not list(tmp_path.glob(".out*"))
    return result.stderr


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_files_without_an_optimizer(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "nowhere") in refused(tmp_path, tmp_path / "nowhere")
    assert "optimizer.pt" in refused(tmp_path, tmp_path / "empty")
    assert str(checkpoint) in refused(
        tmp_path, checkpoint.parent
    )  # the output_dir of a Trainer: the message names the folder to use
    assert "model, step" in refused(tmp_path, saved(tmp_path / "a.pt", {"model": {"w": torch.ones(2)}, "step": 3}))
    assert "safetensors" in refused(tmp_path, checkpoint / "model.safetensors")
    refused(tmp_path, saved(tmp_path / "b.pt", torch.ones(3)))


def test_files_with_several_optimizers_or_none_that_stepped(tmp_path: Path, checkpoint: Path) -> None:
    optimizer = load(checkpoint / "optimizer.pt")
    two = saved(tmp_path / "two.pt", {"generator": optimizer, "critics": [optimizer]})
    assert "generator, critics.0" in refused(tmp_path, two, "--model", checkpoint)
    fresh = saved(tmp_path / "fresh.pt", torch.optim.AdamW(llama().parameters()).state_dict())
    assert re.search(rf"{fresh}: .*\bstep\b", refused(tmp_path, fresh, "--model", checkpoint))


@pytest.mark.parametrize(
    "broken",
    [
        {"param_groups": []},
        {"param_groups": [3]},
        {"param_groups": [{"params": [0], "weight_decay": 0.0}]},
        {"param_groups": [{"params": 0, "lr": 1e-3, "weight_decay": 0.0}]},
        {"param_groups": [{"params": [0], "lr": 1e-3, "weight_decay": 0.0, "param_names": []}]},
        {"state": [1]},
        {"state": {0: 1}},
        {"state": {0: {"exp_avg": 1, "exp_avg_sq": 2}}},
    ],
    ids=str,
)
def test_state_dicts_that_no_optimizer_wrote(tmp_path: Path, checkpoint: Path, broken: dict[str, Any]) -> None:
    file = saved(tmp_path / "broken.pt", {**load(checkpoint / "optimizer.pt"), **broken})
    refused(tmp_path, file, "--model", checkpoint)


def test_damaged_files(tmp_path: Path, checkpoint: Path) -> None:
    whole = (checkpoint / "optimizer.pt").read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        message = refused(tmp_path, tmp_path / "cut.pt", "--model", checkpoint)
        assert f"{tmp_path / 'cut.pt'}: " in message
        assert "PyTorch" in message


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARM"],)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    torch.save({"optimizer": Harmful()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful()))
    for name in ("zip.pt", "plain.pt"):
        refused(tmp_path, tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_models_that_do_not_fit(tmp_path: Path, checkpoint: Path) -> None:
    size = {"vocab_size": V, "hidden_size": H, "num_attention_heads": 2}
    deeper = LlamaForCausalLM(LlamaConfig(**size, intermediate_size=16, num_hidden_layers=3))
    wider = LlamaForCausalLM(LlamaConfig(**size, intermediate_size=32, num_hidden_layers=2))
    for name, other in (("deeper", deeper), ("wider", wider)):
        other.save_pretrained(tmp_path / name)
        assert name in refused(tmp_path, checkpoint, "--model", tmp_path / name)
    assert "nowhere" in refused(tmp_path, checkpoint, "--model", tmp_path / "nowhere")
    assert "config.json" in refused(tmp_path, checkpoint, "--model", tmp_path)
    bare = saved(tmp_path / "bare.pt", load(checkpoint / "optimizer.pt"))
    assert "--model" in refused(tmp_path, bare)
    assert "[21]" in refused(tmp_path, checkpoint, "--adamw-groups", "matrices")  # it is one group of 21
    assert "nothing*" in refused(tmp_path, checkpoint, "--frozen", "nothing*")


@pytest.mark.parametrize("config", ["{", "[]", '{"architectures": []}', '{"architectures": ["NoSuchModel"]}'])
def test_configs_without_a_model(tmp_path: Path, checkpoint: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert "config.json" in refused(tmp_path, checkpoint, "--model", tmp_path / "config.json")


def test_code_that_a_config_names_is_not_run(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\nclass Own: pass\n")
    config = {"architectures": ["Own"], "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    for architecture in ("Own", "LlamaForCausalLM"):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        refused(tmp_path, checkpoint, "--model", tmp_path / "model")
    assert not (tmp_path / "harm").exists()


def test_functions_that_return_no_model(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def number(): return 3\ndef fails(): raise KeyError('vocab_size')\n"
    (tmp_path / "models_of_mine.py").write_text(source)
    before = list(sys.path)
    for function, word in (
        ("no_such_module:build", "no_such_module"),
        ("models_of_mine:build", "build"),
        ("models_of_mine:number", "int"),
        ("models_of_mine:fails", "vocab_size"),
    ):
        assert word in refused(tmp_path, checkpoint, "--model", function)
    assert sys.path == before


def test_missing_tables(tmp_path: Path, checkpoint: Path) -> None:
    assert "lm_hat" in refused(tmp_path, checkpoint, "--couple", "lm_hat.weight")
    assert "model.norm.weight" in refused(tmp_path, checkpoint, "--couple", "model.norm.weight")
    named = saved(tmp_path / "named.pt", write_named())
    assert "lm_head.weight" in refused(tmp_path, named)
    assert "lm_hat" in refused(tmp_path, named, "--couple", "lm_hat.weight")
    assert "model.norm.weight" in refused(tmp_path, named, "--couple", "model.norm.weight")


def write_named() -> dict[str, Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train_steps(model, optimizer)
    return optimizer.state_dict()


def test_files_that_are_already_converted(tmp_path: Path, checkpoint: Path) -> None:
    refused(tmp_path, checkpoint, to="adamw")
    coupled = write_checkpoint(tmp_path / "coupled", CoupledAdamW)
    refused(tmp_path, coupled, to="coupled")
    refused(tmp_path, coupled, "--couple", "output", to="adamw")
    bare = saved(tmp_path / "bare.pt", load(coupled / "optimizer.pt"))
    assert "--model" in refused(tmp_path, bare, to="adamw")  # its names do not give the order of the model


def test_files_of_other_optimizers(tmp_path: Path, checkpoint: Path) -> None:
    assert "amsgrad" in refused(tmp_path, write_checkpoint(tmp_path / "amsgrad", amsgrad=True))
    assert "momentum_buffer" in refused(tmp_path, write_checkpoint(tmp_path / "sgd", torch.optim.SGD, momentum=0.9))
    file = load(checkpoint / "optimizer.pt")
    eight_bits = {"step": 3, "state1": torch.ones(5, dtype=torch.uint8), "state2": torch.ones(5, dtype=torch.uint8)}
    state = {saved_id: {**eight_bits, "qmap1": torch.ones(256), "absmax1": torch.ones(1)} for saved_id in file["state"]}
    assert "bitsandbytes" in refused(
        tmp_path, saved(tmp_path / "8bit.pt", {**file, "state": state}), "--model", checkpoint
    )
    by_name = {"state": {"w": file["state"][0]}, "param_groups": [{"params": ["w"], "lr": 1e-3, "weight_decay": 0.0}]}
    assert "FSDP" in refused(tmp_path, saved(tmp_path / "fsdp.pt", by_name), "--model", checkpoint)


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["optimizer_0/__0_0.distcp", "config.json"], "FSDP"),
        ([".metadata", "__0_0.distcp"], "FSDP"),
        (["global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"], "DeepSpeed"),
        (["run.json", "checkpoints/step-000000003/state.json"], "coupled-adam train"),
        (["state.json", "tables.safetensors", ".metadata", "__0_0.distcp"], "coupled-adam train"),
    ],
)
def test_sharded_checkpoints_and_our_own_runs(tmp_path: Path, names: list[str], word: str) -> None:
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    assert word in refused(tmp_path, tmp_path / "in")
    for name in names:
        if name.endswith((".distcp", "_optim_states.pt")):
            refused(tmp_path, tmp_path / "in" / name)


def test_groups_with_learning_rates_that_would_be_mixed(tmp_path: Path, checkpoint: Path) -> None:
    model = llama()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW([{"params": matrices, "lr": 1e-3}, {"params": vectors, "lr": 1e-4}])
    train_steps(model, adamw)
    file = saved(tmp_path / "adamw.pt", adamw.state_dict())
    assert convert(file, tmp_path / "coupled.pt", "--to", "coupled", "--model", checkpoint).exit_code == 0
    groups = load(tmp_path / "coupled.pt")["param_groups"]
    assert [group["lr"] for group in groups] == [1e-3, 1e-3, 1e-3, 1e-4]  # these groups do not mix them
    message = refused(tmp_path, tmp_path / "coupled.pt", "--model", checkpoint, to="adamw")  # one group would
    assert "0.001, 0.0001" in message


def test_existing_files_are_not_overwritten(tmp_path: Path, checkpoint: Path) -> None:
    source = write_checkpoint(tmp_path / "in")
    assert f"{source}: " in refused(tmp_path, source, "--overwrite", out=source)
    assert re.search(rf"{source / 'new'}: .* {source}$", refused(tmp_path, source, out=source / "new"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    assert "--overwrite" in refused(tmp_path, source, out=tmp_path / "other")
    refused(tmp_path, source, "--overwrite", out=tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "years of work"
    refused(tmp_path, source, "--overwrite", out=tmp_path / "other" / "thesis.tex")
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "optimizer.pt").write_text("older")
    refused(tmp_path, source, out=tmp_path / "older")
    assert convert(source, tmp_path / "older", "--to", "coupled", "--overwrite").exit_code == 0
    assert load(tmp_path / "older" / "optimizer.pt")["param_groups"][0]["coupled"]

    (tmp_path / "older.pt").write_text("older")
    refused(tmp_path, source / "optimizer.pt", out=tmp_path / "older.pt")
    assert (tmp_path / "older.pt").read_text() == "older"
    assert convert(source / "optimizer.pt", tmp_path / "older.pt", "--to", "coupled", "--overwrite").exit_code == 0
    refused(tmp_path, source / "optimizer.pt", "--overwrite", out=tmp_path / "other")


def test_a_folder_that_contains_the_input_is_not_replaced(tmp_path: Path) -> None:
    outer = write_checkpoint(tmp_path / "outer")
    inner = write_checkpoint(outer / "checkpoint-3")
    before = {path: path.read_bytes() for path in outer.rglob("*") if path.is_file()}
    assert str(outer) in refused(tmp_path, inner, "--overwrite", out=outer)
    assert {path: path.read_bytes() for path in outer.rglob("*") if path.is_file()} == before


def test_the_scheduler_next_to_an_optimizer_is_converted_and_counted(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint-3")
    assert convert_checkpoint(source, tmp_path / "without", "coupled").schedulers == 0
    optimizer = torch.optim.AdamW(llama().parameters(), lr=1e-2)
    torch.save(torch.optim.lr_scheduler.ConstantLR(optimizer).state_dict(), source / "scheduler.pt")
    converted = convert_checkpoint(source, tmp_path / "with", "coupled")
    assert converted.schedulers == 1
    assert len(load(tmp_path / "with" / "scheduler.pt")["base_lrs"]) == len(converted.groups) > 1


@pytest.mark.parametrize("limit", [6000, 1000], ids=["optimizer", "copied file"])
def test_a_full_disk_leaves_no_files(tmp_path: Path, checkpoint: Path, limit: int) -> None:
    """Simulated by a file size limit, which makes the same calls fail."""
    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "optimizer.pt"):
        (source / name).write_bytes((checkpoint / name).read_bytes())
    (source / "weights.bin").write_bytes(bytes(3000))
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for given, out in ((source, "folder"), (source / "optimizer.pt", "file.pt")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old_limits[1]))
        try:
            result = convert(given, tmp_path / "out" / out, "--to", "coupled")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
        assert result.exit_code == 2, result.output
        assert os.strerror(errno.EFBIG) in result.stderr
        assert list((tmp_path / "out").iterdir()) == []
