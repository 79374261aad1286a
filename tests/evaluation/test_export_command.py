"""`coupled-adam export` as a user runs it."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
import torch
import typer
from click.testing import Result
from export_models import TEXT, TOKENS, logits_of, trained_model, write_corpus, write_run, write_tokenizer_json
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from coupled_adam.commands.export import export
from coupled_adam.config.run_config import load_config
from coupled_adam.inspection.model_tables import read_model
from coupled_adam.models.model_config import parameter_count
from coupled_adam.training.checkpoint.checkpoint_folder import CHECKED_FILE

app = typer.Typer()
app.command()(export)
PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus").folder


def test_the_printed_code_loads_the_trained_model(tmp_path: Path, corpus: Path) -> None:
    model = write_run(tmp_path / "run", corpus)
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0, result.output
    first, _, _ = result.stdout.partition("\n")
    for shown in ("small", "step 10", f"{parameter_count(model.config):,} parameters", "float32"):
        assert shown in first
    loaded: dict[str, object] = {}
    exec("\n".join(line.strip() for line in result.stdout.splitlines() if line.startswith("    ")), loaded)
    tokens = torch.tensor(loaded["tokenizer"](TEXT)["input_ids"])[None, :32]
    with torch.no_grad():
        theirs = loaded["model"].eval()(tokens).logits
    torch.testing.assert_close(theirs, logits_of(model, tokens), rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert "# `small`" in (tmp_path / "model" / "README.md").read_text()
    assert "10 of 781 steps" in (tmp_path / "model" / "README.md").read_text()


def test_run_and_export_have_the_same_tables(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus, overrides=["model.architecture=llama", "model.tied=false"])
    assert run(tmp_path / "run", tmp_path / "model").exit_code == 0
    before, after = read_model(str(tmp_path / "run")), read_model(str(tmp_path / "model"))
    assert [table.role for table in before.tables] == [table.role for table in after.tables] == ["input", "output"]
    for ours, theirs in zip(before.tables, after.tables, strict=True):
        assert torch.equal(torch.as_tensor(ours.matrix), torch.as_tensor(theirs.matrix))
    assert after.tokenizer is not None


def test_checkpoint_and_dtype_can_be_chosen(tmp_path: Path, corpus: Path) -> None:
    model = write_run(tmp_path / "run", corpus, steps=[5, 20])
    result = run(tmp_path / "run", tmp_path / "model", "--checkpoint", 5, "--dtype", "bfloat16")
    assert "step 5" in result.stdout
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = trained_model(model.config, seed=5).wte.weight.to(torch.bfloat16)
    assert torch.equal(loaded.transformer.wte.weight, expected)
    assert run(tmp_path / "run", tmp_path / "model").exit_code == 2
    assert run(tmp_path / "run", tmp_path / "model", "--overwrite").exit_code == 0
    newest = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(newest.transformer.wte.weight, model.wte.weight)


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus, steps=[5, 20])
    (tmp_path / "run" / "checkpoints" / "step-000000020" / "state.json").write_text("{}")
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0
    assert "step-000000020" in result.stderr
    assert "step 5:" in result.stdout


def test_without_its_corpus_the_model_is_exported_and_the_tokenizer_can_be_added(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", tmp_path / "gone")
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert re.search(rf"^Note: .*tokenizer.*{tmp_path / 'gone'}\b.*--overwrite --tokenizer", result.stderr), (
        result.stderr
    )
    assert result.stderr.count("\n") == 1
    assert "AutoTokenizer" not in result.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() >= parameter_count(model.config)
    ours = write_tokenizer_json(tmp_path / "tokenizer.json")
    result = run(tmp_path / "run", tmp_path / "model", "--overwrite", "--tokenizer", tmp_path / "tokenizer.json")
    assert result.stderr == ""
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(TEXT)["input_ids"] == ours.encode(TEXT).ids
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize("corpus_is_here", [True, False])
def test_tokenizer_of_another_size_is_refused(corpus_is_here: bool, tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus if corpus_is_here else tmp_path / "gone")
    content = json.loads((corpus / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"] |= {"vocab": {token: number for token, number in vocabulary.items() if number < 270}, "merges": []}
    (tmp_path / "small.json").write_text(json.dumps(content))
    result = run(tmp_path / "run", tmp_path / "model", "--tokenizer", tmp_path / "small.json")
    assert result.exit_code == 2
    assert re.search(rf"{tmp_path / 'small.json'}'.*\b270\b.*\b{TOKENS}\b", result.stderr), result.stderr
    assert not (tmp_path / "model").exists()


def test_padding_is_left_out_without_a_tokenizer_too(tmp_path: Path) -> None:
    model = write_run(tmp_path / "run", tmp_path / "gone")
    assert run(tmp_path / "run", tmp_path / "model").exit_code == 0
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    (table,) = read_model(str(tmp_path / "model")).tables
    assert torch.equal(torch.as_tensor(table.matrix), model.wte.weight[:TOKENS])


def test_model_card_names_the_text_that_the_corpus_was_made_from(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus, overrides=['data.source="text:other.txt"'])
    manifest = corpus / "manifest.json"
    for known, expected in (({"source": "text:mine/stories.txt"}, "stories.txt"), ({"source": None}, "corpus")):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **known}))
        assert run(tmp_path / "run", tmp_path / "model", "--overwrite").exit_code == 0
        assert f"- data: `{expected}`\n" in (tmp_path / "model" / "README.md").read_text()
    corpus.rename(tmp_path / "elsewhere")
    assert run(tmp_path / "run", tmp_path / "model", "--overwrite").exit_code == 0
    assert "- data: `text:other.txt`\n" in (tmp_path / "model" / "README.md").read_text()


def test_offline_without_gpt2_the_model_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken, "get_encoding", Mock(side_effect=OSError))
    corpus = write_corpus(tmp_path / "corpus", tokenizer="gpt2", separator=299)
    write_run(tmp_path / "run", corpus.folder)
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0
    assert re.search(r"^Note: .*tiktoken.*'gpt2'.*--overwrite --tokenizer", result.stderr), result.stderr
    # The corpus names the end-of-text token even without a tokenizer.
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.eos_token_id == 299


def test_a_corpus_without_shards_only_loses_the_tokenizer(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    (corpus / "train.bin").unlink()
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0
    assert str(corpus / "train.bin") in result.stderr


def test_the_tokenizer_of_a_changed_corpus_is_not_used(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    corpus.rename(tmp_path / "old")
    write_corpus(corpus, separator=1)
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 0
    assert re.search(rf"^Note: .*tokenizer.*{corpus}\b", result.stderr), result.stderr
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_if_all_checkpoints_are_damaged_the_reasons_are_listed(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    (tmp_path / "run" / "checkpoints" / "step-000000010" / "state.json").unlink()
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 2
    assert re.search(r"^Note: .*step-000000010.*\bstate\.json\b", result.stderr), result.stderr
    assert re.search(rf"^Error: {tmp_path / 'run'}: .*`coupled-adam train`", result.stderr, re.MULTILINE), result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing", "model"], "nothing: .*`coupled-adam train`"),
        (["run", "corpus"], "corpus .*--overwrite"),
        (["run", "model", "--checkpoint", "7"], r"run: .*\b7\b.*\b10$"),
        (["run", "model", "--tokenizer", "nothing.json"], r"\bnothing\.json\b"),
        (["run", "model", "--dtype", "float16"], "'float16'.*float32.*bfloat16"),
        (["run", "file/model"], "file: "),
        (["broken", "model"], r"broken/config\.toml: .*TOML"),
    ],
)
def test_bad_input_gets_one_message_and_writes_nothing(
    arguments: list[str], named: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", corpus)
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("[model")
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search(named, result.stderr), result.stderr
    assert "Traceback" not in result.output
    assert {path.name for path in set(tmp_path.rglob("*")) ^ before} <= {CHECKED_FILE}  # files read from the run


def test_several_mistakes_in_a_config_are_several_lines(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("seed = 1", "seed = -1").replace("tied = true", "tied = 3"))
    result = run(tmp_path / "run", tmp_path / "model")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2


def test_page_names_every_option_and_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    command = typer.main.get_command(app)
    for parameter in command.params:
        if parameter.name not in ("run", "folder", "install_completion", "show_completion"):
            assert f"`{parameter.opts[0]}" in page
    tiny = load_config("tiny")
    parameters = parameter_count(tiny.to_model_config())
    assert re.search(rf"\btiny, step {tiny.total_steps}: {parameters:,} parameters\b.*float32", page)
    for file in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"):
        assert f"`{file}`" in page
