"""The folder of an exported model: its files, its shards, and that it is written atomically."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from export_models import ROWS, TEXT, TOKENS, logits_of, small_config, some_tokens, trained_model, write_corpus
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig

from coupled_adam.base.errors import UserError
from coupled_adam.config.run_config import load_config
from coupled_adam.evaluation import export as export_module
from coupled_adam.evaluation.export import export_model
from coupled_adam.evaluation.model_card import Training, code, model_card
from coupled_adam.evaluation.run_tokenizer import corpus_tokenizer
from coupled_adam.inspection.model_tables import read_model
from coupled_adam.models.model_config import ModelConfig, parameter_count
from coupled_adam.tokenizer import Tokenizer

MODEL_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return corpus_tokenizer(write_corpus(tmp_path / "corpus"))


def export(folder: Path, config: ModelConfig | None = None, tokenizer: Tokenizer | None = None, **options: object):
    model = trained_model(config or small_config())
    export_model(model.config, dict(model.named_parameters()), tokenizer, folder, **options)
    return model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_all_files_are_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    export(tmp_path / "new" / "model", tokenizer=tokenizer)
    assert names(tmp_path / "new" / "model") == MODEL_FILES | TOKENIZER_FILES
    assert names(tmp_path / "new") == {"model"}
    generation = GenerationConfig.from_pretrained(tmp_path / "new" / "model")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (0, 0, 0)


def test_only_torch_and_safetensors_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    for module in ("transformers", "tokenizers", "tiktoken", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    export(tmp_path / "model", tokenizer=corpus_tokenizer(corpus))
    assert names(tmp_path / "model") == MODEL_FILES | TOKENIZER_FILES


def test_weights_have_the_permissions_of_the_other_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes == {0o644}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_inspect_finds_the_tables_without_their_padding(
    architecture: str, tied: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    model = export(tmp_path / "model", small_config(architecture, tied=tied), tokenizer)
    found = read_model(str(tmp_path / "model"))
    assert found.tied == tied
    assert [table.role for table in found.tables] == (["tied"] if tied else ["input", "output"])
    ours = dict.fromkeys([model.input_table_name, model.output_table_name])
    for name, table in zip(ours, found.tables, strict=True):
        assert torch.equal(torch.as_tensor(table.matrix), model.get_parameter(name)[:TOKENS])


def test_large_models_are_written_in_shards(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("llama", tied=False)
    monkeypatch.setattr(export_module, "SHARD_BYTES", 50_000)
    model = export(tmp_path / "model", config, tokenizer)
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert len(shards) > 3
    assert all(path.stat().st_size < 50_000 + 5_000 for path in shards)  # 5,000 for the header
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    tokens = some_tokens(config)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, logits_of(model, tokens))
    assert index["metadata"]["total_size"] == 4 * sum(weight.numel() for weight in theirs.state_dict().values())
    assert [table.role for table in read_model(str(tmp_path / "model")).tables] == ["input", "output"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    export(folder)  # an empty one is accepted
    with pytest.raises(ValueError, match=f"{folder} .*--overwrite"):
        export(folder)
    (folder / "old").write_text("")
    export(folder, overwrite=True)
    assert names(folder) == MODEL_FILES


def test_overwriting_replaces_only_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thesis, run, link, file = (tmp_path / name for name in ("thesis", "run", "link", "file"))
    for folder in (thesis, run / "checkpoints"):
        folder.mkdir(parents=True)
    (thesis / "thesis.tex").write_text("")
    (run / "config.json").write_text("")
    link.symlink_to(thesis)
    file.write_text("")
    for folder, named in ((thesis, r"config\.json"), (run, "checkpoints"), (link, "link"), (file, "file")):
        with pytest.raises(UserError, match=rf"^{folder} .*\b{named}\b"):
            export(folder, overwrite=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=r"^\. "):
        export(Path())
    assert names(tmp_path) == {"thesis", "run", "link", "file", "here"}
    assert (thesis / "thesis.tex").exists()


def test_failed_export_leaves_the_older_model_and_nothing_else(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "models" / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "models" / "model").iterdir()}

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(export_module, "save_file", full_disk)
    for folder in ("model", "new"):
        with pytest.raises(OSError, match=rf"{tmp_path / 'models'}.*\bmodel\.safetensors: .*No space left on device"):
            export(tmp_path / "models" / folder, tokenizer=tokenizer, overwrite=True)
    assert names(tmp_path / "models") == {"model"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "models" / "model").iterdir()} == before


def test_a_full_disk_is_detected_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = export_module.shutil.disk_usage(tmp_path)._replace(free=812)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*\d[\d.]* [KM]B.*\b812 bytes"):
        export(tmp_path / "model")
    assert names(tmp_path) == set()


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\bdtype\b.*'float16'.*float32.*bfloat16"):
        export(tmp_path / "model", dtype="float16")


@pytest.mark.parametrize("size", [0, ROWS + 1])
def test_a_vocabulary_larger_than_the_table_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"\bvocabulary_size\b.*\b{size}\b.* {ROWS}$"):
        export(tmp_path / "model", vocabulary_size=size)


def test_the_model_card_describes_the_training() -> None:
    changes = ["seed=3", "optimizer.embeddings=coupled", "optimizer.scale_exponent=2", "data.source=none"]
    config = load_config("tiny", [*changes, "name=my-run", "data.folder=/home/me/secret/my`corpus<b>"])
    model = config.to_model_config()
    card = model_card(model, Training(config, step=7), tokens=model.vocabulary_size - 1)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# `my-run`\n" in card
    assert f"{parameter_count(model):,} parameters" in card
    assert re.search(rf"\btokenizer .*\b{model.vocabulary_size - 1:,}\b", card)
    assert f"{7 * config.tokens_per_step:,} tokens: 7 of {config.total_steps:,} steps" in card
    assert re.search(r"^- embeddings: Coupled Adam\b.*\bexponent 2\b", card, re.MULTILINE)
    assert f"learning rate {config.optimizer.lr:g}" in card
    assert "seed 3\n" in card
    assert "- data: ``my`corpus<b>``\n" in card
    assert "secret" not in card
    texts = load_config("tiny", ["data.source=text:/home/me/secret/*.txt"])
    assert "- data: `*.txt`\n" in model_card(model, Training(texts, 1), None)
    untied = load_config("tiny", ["model.tied=false", "optimizer.embeddings=adamw"])
    embeddings = re.search("^- embeddings: .*$", model_card(model, Training(untied, 1), None), re.MULTILINE)
    assert embeddings is not None
    assert "AdamW" in embeddings[0]
    assert "table" not in embeddings[0]
    untied = load_config("tiny", ["model.tied=false", "optimizer.couple=input"])
    assert re.search("^- embeddings: .*, input table$", model_card(model, Training(untied, 1), None), re.MULTILINE)
    bare = model_card(small_config(), None, tokens=None)
    assert "Training" not in bare
    assert "tokenizer.json" in bare
    assert "tokenizer.json" not in card
    assert re.search(rf"^- {ROWS} rows", bare, re.MULTILINE)


def test_text_from_files_is_escaped_in_the_model_card() -> None:
    assert code("# x\n- y") == r"`# x\n- y`"
    assert code("`a`") == "`` `a` ``"
    assert TEXT.splitlines()[0] in code(TEXT.splitlines()[0])
