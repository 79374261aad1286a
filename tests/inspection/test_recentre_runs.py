"""`coupled-adam recentre` on our runs: the other commands can read the new run.

Legend: V vocabulary rows, H hidden size.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.evaluation.weights import load_run, run_config
from coupled_adam.models.initial import initialise
from coupled_adam.training.checkpoint.checkpoint_folder import checkpoints_in, read_record
from coupled_adam.training.checkpoint.dcp_files import read_metadata

sys.path.append(str(Path(__file__).parents[1] / "evaluation"))
import export_models
from export_models import ROWS, TOKENS, some_tokens, write_corpus, write_run


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))


def recentre(*arguments: object) -> dict[str, Any]:
    result = run("recentre", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def make_run(tmp_path: Path, *overrides: str) -> Path:
    write_corpus(tmp_path / "corpus")
    write_run(tmp_path / "run", tmp_path / "corpus", steps=(5, 10), overrides=overrides)
    return tmp_path / "run"


def log_probabilities(folder: Path) -> torch.Tensor:
    model, config, _ = load_run(folder)
    with torch.no_grad():
        return model.double()(some_tokens(config.to_model_config())).log_softmax(-1)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in load_run(folder)[0].named_parameters()}


def stored_names(folder: Path) -> set[str]:
    (checkpoint,) = checkpoints_in(folder / "checkpoints")[-1:]
    return set(read_metadata(checkpoint, read_record(checkpoint).files).state_dict_metadata)


def test_a_gpt2_run_becomes_a_run_with_a_centred_table(tmp_path: Path) -> None:
    source, out = make_run(tmp_path), tmp_path / "out"
    (source / "metrics.jsonl").write_text('{"step": 1}\n')
    done = recentre(source, out)
    assert (done["method"], done["rows"], done["padding_rows"]) == ("positions", TOKENS, ROWS - TOKENS)
    assert done["tensors"] == ["wte.weight", "wpe.weight"]
    assert [each["tokens"] for each in done["stored"]] == ["random tokens", "text"]
    assert max(each["largest"] for each in done["unrounded"]) < 1e-11
    old, new = parameters(source), parameters(out)
    assert {name for name in new if not torch.equal(old[name], new[name])} == {"wte.weight", "wpe.weight"}
    mean = old["wte.weight"][:TOKENS].double().mean(0)
    torch.testing.assert_close(old["wte.weight"].double() - mean, new["wte.weight"].double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(old["wpe.weight"].double() + mean, new["wpe.weight"].double(), rtol=0, atol=1e-6)
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < 1e-4
    for name in ("config.toml", "metrics.jsonl"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert [path.name for path in checkpoints_in(out / "checkpoints")] == ["step-000000010"]
    assert stored_names(out) == stored_names(source)  # with the optimizer: training can continue
    assert read_record(checkpoints_in(out / "checkpoints")[0]).state.keys() >= {"data"}


def test_inspect_and_export_read_the_new_run(tmp_path: Path) -> None:
    source, out = make_run(tmp_path), tmp_path / "out"
    recentre(source, out)
    (table,) = json.loads(run("inspect", out, "--json").stdout)["models"][0]["tables"]
    assert table["shape"][0] == TOKENS
    assert table["mu_norm_ratio"] < 1e-6
    assert run("export", out, tmp_path / "exported").exit_code == 0
    assert recentre(tmp_path / "exported", tmp_path / "again")["changed"] is False
    assert recentre(out, tmp_path / "again")["changed"] is False


def test_a_tied_llama_run_is_untied(tmp_path: Path) -> None:
    source, out = make_run(tmp_path, 'model.architecture="llama"'), tmp_path / "out"
    refused = run("recentre", source, out)
    assert refused.exit_code == 2
    assert "--untie" in refused.stderr
    assert not out.exists()
    done = recentre(source, out, "--untie")
    assert (done["method"], done["tensors"]) == ("untie", ["lm_head.weight"])
    assert run_config(out).model.tied is False
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < 1e-4
    assert stored_names(out) - stored_names(source) == {"model.lm_head.weight"}
    assert not any(name.startswith("optimizer.") for name in stored_names(out))
    roles = [each["role"] for each in json.loads(run("inspect", out, "--json").stdout)["models"][0]["tables"]]
    assert roles == ["input", "output"]


def test_an_exported_llama_that_is_untied_no_longer_says_tied(tmp_path: Path) -> None:
    """The header of our exports names the tables, and `inspect` uses it."""
    assert run("export", make_run(tmp_path, 'model.architecture="llama"'), tmp_path / "model").exit_code == 0
    done = recentre(tmp_path / "model", tmp_path / "out", "--untie")
    assert [each["role"] for each in done["before"]["tables"]] == ["tied"]
    model = json.loads(run("inspect", tmp_path / "out", "--json").stdout)["models"][0]
    assert (model["tied"], [each["role"] for each in model["tables"]]) == (False, ["input", "output"])
    assert model["tables"][1]["mu_norm_ratio"] < 1e-6
    assert [each["shape"][0] for each in model["tables"]] == [TOKENS, TOKENS]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_only_the_head_of_an_untied_run_with_an_output_bias_changes(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = np.arange(1, TOKENS + 1)
    monkeypatch.setattr(export_models, "initialise", lambda model, seed: initialise(model, seed, counts))
    settings = (f'model.architecture="{architecture}"', "model.tied=false", 'model.output_bias="learned"')
    source, out = make_run(tmp_path, *settings), tmp_path / "out"
    assert recentre(source, out)["tensors"] == ["lm_head.weight"]
    old, new = parameters(source), parameters(out)
    assert {name for name in new if not torch.equal(old[name], new[name])} == {"lm_head.weight"}
    assert (log_probabilities(out) - log_probabilities(source)).abs().max() < 1e-4


def test_a_run_without_a_corpus_is_compared_on_random_tokens_only(tmp_path: Path) -> None:
    source = make_run(tmp_path)
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    result = run("recentre", source, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert [each["tokens"] for each in json.loads(result.stdout)["stored"]] == ["random tokens"]
    assert "Note: " in result.stderr


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    source = make_run(tmp_path)
    for checkpoint in checkpoints_in(source / "checkpoints"):
        (checkpoint / "state.json").unlink()
    result = run("recentre", source, tmp_path / "out")
    assert result.exit_code == 2
    assert "checkpoint" in result.stderr
    assert not (tmp_path / "out").exists()
