"""`model.vocabulary_size = "auto"`: the number of rows, when it is known, and notes about unused rows."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from small_runs import saved_tensors, small_config, train, write_corpus
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.config.run_config import Config, load_config, to_toml
from coupled_adam.data.corpus import open_corpus
from coupled_adam.data.manifest import MANIFEST_FILE
from coupled_adam.training.run_tokens import note_on_unused_rows

TABLE = "model.wte.weight"
NOT_THERE = "data.folder=data/not-there"


@pytest.mark.parametrize(
    ("preset", "rows"),
    [("tiny", 4096), ("single-gpu", 50304), ("gpt2-125m", 50304), ("gpt2-760m", 50304), ("llama-2.6b", 50304)],
)
def test_presets_use_automatic_rows_and_get_the_former_numbers(preset: str, rows: int) -> None:
    config = load_config(preset, [NOT_THERE])
    assert config.model.vocabulary_size == "auto"
    assert config.rows == rows == config.to_model_config().vocabulary_size


@pytest.mark.parametrize(
    ("tokenizer", "rows"),
    [("bpe:2048", 2048), ("bpe:2049", 2112), ("bpe:300", 320), ("gpt2", 50304), ("cl100k_base", 100288)],
)
def test_before_the_text_is_prepared_the_tokenizer_name_gives_the_rows(tokenizer: str, rows: int) -> None:
    assert load_config("tiny", [NOT_THERE, f"data.tokenizer={tokenizer}"]).rows == rows


def test_existing_tokens_give_the_rows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    assert load_config("tiny", [f"data.folder={corpus}"]).rows == 64  # for its 61 tokens
    (corpus / MANIFEST_FILE).unlink()
    assert load_config("tiny", [f"data.folder={corpus}"]).rows == 50304  # nanoGPT's folder: GPT-2's tokens
    assert load_config("tiny", [f"data.folder={corpus}", "model.vocabulary_size=60000"]).rows == 60000


def test_a_tokenizer_file_gives_the_rows_by_its_highest_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokens = {"?": 0, "the": 1, "</s>": 129}  # with a gap
    tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, "?")).save(str(tmp_path / "tokenizer.json"))
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_config("tiny", [NOT_THERE, f"data.tokenizer={spec}"]).rows == 192


def test_a_tokenizer_of_unknown_size_is_named_with_the_remedy() -> None:
    config = load_config("tiny", [NOT_THERE, "data.tokenizer=o400k_maybe"])
    with pytest.raises(ValueError, match=r'data\.tokenizer = "o400k_maybe".*data/not-there.*model\.vocabulary_size'):
        _ = config.rows


def test_show_keeps_auto_so_that_the_tokenizer_can_be_changed(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["train", "tiny", "--show", "--set", NOT_THERE]).stdout
    assert 'vocabulary_size = "auto"' in shown
    (tmp_path / "mine.toml").write_text(shown.replace("bpe:4096", "bpe:2048"))
    assert load_config(str(tmp_path / "mine.toml")).rows == 2048


def test_a_run_records_its_number_of_rows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    train(small_config(corpus, model={"vocabulary_size": "auto"}), tmp_path / "run")
    assert load_config(str(tmp_path / "run")).model.vocabulary_size == 64
    assert saved_tensors(tmp_path / "run")[TABLE].shape == (64, 16)


def test_rows_follow_the_trained_tokenizer_and_not_the_requested_size(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "\n<|endoftext|>\n".join(f"and so on {number}" for number in range(300))
    (tmp_path / "text.txt").write_text(text)  # too little text for so many tokens
    data = {"folder": str(tmp_path / "c"), "source": f"text:{tmp_path / 'text.txt'}", "tokenizer": "bpe:2000"}
    config = small_config(tmp_path, model={"vocabulary_size": "auto"}, data=data)
    train(config, tmp_path / "run")
    tokens = open_corpus(tmp_path / "c").vocabulary_size
    rows = load_config(str(tmp_path / "run")).rows
    assert tokens < 1000
    assert tokens <= rows < tokens + 64
    assert rows % 64 == 0


def test_too_few_rows_are_refused_before_the_text_is_prepared(tmp_path: Path) -> None:
    settings = [f"data.folder={tmp_path / 'c'}", "model.vocabulary_size=4095"]
    with pytest.raises(ValueError, match=r"model\.vocabulary_size = 4095: .*\b4096\b.*bpe:4096"):
        train(load_config("tiny", settings), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_other_rows_is_resumed_with_its_own(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    longer = {"tokens": 16 * 8 * 16}
    train(small_config(corpus, model={"vocabulary_size": 128}), tmp_path / "run")
    stored = (tmp_path / "run" / "config.toml").read_text().replace("tokens = 1536", "tokens = 2048")
    (tmp_path / "run" / "config.toml").write_text(stored)
    wanted = small_config(corpus, model={"vocabulary_size": "auto"}, training=longer)
    outcome, _ = train(wanted, tmp_path / "run", resume=True)
    assert outcome.step == 16
    assert load_config(str(tmp_path / "run")).model.vocabulary_size == 128
    assert saved_tensors(tmp_path / "run")[TABLE].shape == (128, 16)
    with pytest.raises(ValueError, match=r"model\.vocabulary_size = 128, now 64"):
        train(small_config(corpus, training=longer), tmp_path / "run", resume=True)


def note(corpus: Path, rows: int | str) -> str | None:
    return note_on_unused_rows(small_config(corpus, model={"vocabulary_size": rows}), open_corpus(corpus))


def write_tokens(folder: Path, tokens: "np.ndarray[tuple[int], np.dtype[np.uint16]]", vocabulary_size: int) -> Path:
    folder.mkdir()
    tokens.astype(np.uint16).tofile(folder / "train.bin")
    splits = {"train": {"tokens": len(tokens), "shards": [{"file": "train.bin", "tokens": len(tokens)}]}}
    manifest = {"vocabulary_size": vocabulary_size, "dtype": "uint16", "splits": splits}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder


def test_many_rows_without_a_token_are_reported_with_their_number_and_the_remedy(tmp_path: Path) -> None:
    corpus = write_tokens(tmp_path / "corpus", np.arange(640), 640)
    assert note(corpus, "auto") is None
    assert note(corpus, 672) is None  # 32 of 672: less than 5%
    said = note(corpus, 1280)
    assert said is not None
    assert re.search(r"^640 .*\b1,280 .*\(50%\)", said), said
    assert 'model.vocabulary_size to "auto"' in said


def test_many_tokens_that_never_occur_are_reported_too(tmp_path: Path) -> None:
    corpus = write_tokens(tmp_path / "corpus", np.arange(700).repeat(2), 1000)
    said = note(corpus, "auto")
    assert said is not None
    assert re.search(r"^324 .*\b1,024 .*\(32%\).*\b700 .*\b1,000 tokens", said), said
    assert "data.tokenizer=bpe:" in said
    assert note(write_tokens(tmp_path / "enough", np.arange(980), 1000), "auto") is None


def test_bytes_that_never_occur_in_text_do_not_count(tmp_path: Path) -> None:
    """A byte-level tokenizer of 2048 tokens has over a hundred of them: more than 5%."""
    assert note(write_tokens(tmp_path / "corpus", np.arange(114, 2048), 2048), "auto") is None
    assert note(write_tokens(tmp_path / "less", np.arange(500, 2048), 2048), "auto") is not None


def test_the_padding_of_a_small_tokenizer_is_reported_with_a_size_without_padding(tmp_path: Path) -> None:
    said = note(write_tokens(tmp_path / "corpus", np.arange(257), 257), "auto")
    assert said is not None
    assert re.search(r"^63 .*\b320 .*\(20%\)", said), said
    assert "model.vocabulary_size=257" in said


def test_a_run_reports_its_unused_rows(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    _, shown = train(small_config(corpus, model={"vocabulary_size": 128}), tmp_path / "many")
    assert re.search(r"^Note: 67 .*\b128 .*\(52%\)", shown, re.MULTILINE), shown
    _, shown = train(small_config(corpus), tmp_path / "few")
    assert "Note:" not in shown


def test_a_config_with_auto_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    config: Config = load_config("tiny")
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(str(tmp_path)) == config
