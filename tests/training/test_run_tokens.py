"""The tokens of a run: an existing folder is used, with a note if it does not match the config.

Also the tokenizer for word similarity: opened from the corpus, or refused with the name of the setting.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from small_runs import small_config, train, write_corpus

from coupled_adam.base.errors import MissingPackageError, UserError
from coupled_adam.config.run_config import Config
from coupled_adam.data import prepare as preparation
from coupled_adam.data.corpus import open_corpus
from coupled_adam.data.manifest import MANIFEST_FILE
from coupled_adam.embeddings import download, load_word_pairs
from coupled_adam.training import run, run_tokens
from coupled_adam.training.parallel import Ranks
from coupled_adam.training.run_tokens import prepare_tokens, word_tokenizer

SETTINGS = ("log.wordsim", "evaluation.wordsim")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def describe(corpus: Path, **values: Any) -> None:
    """Change values in the manifest."""
    manifest = corpus / MANIFEST_FILE
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **values}))


def said_of(corpus: Path, source: str | None, tokenizer: str = "gpt2") -> list[str]:
    """The notes about a folder for a config with a source and a tokenizer."""
    said: list[str] = []
    prepare_tokens(config_with(corpus, source, tokenizer), said.append)
    return said


def config_with(corpus: Path, source: str | None, tokenizer: str = "gpt2") -> Config:
    return small_config(
        corpus, data={"source": source, "tokenizer": tokenizer}, model={"vocabulary_size": 50304, "width": 2}
    )


@pytest.fixture
def nanogpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as written by nanoGPT; nothing must be prepared."""
    monkeypatch.setattr(preparation, "prepare", lambda *_, **__: pytest.fail("prepared over the user's tokens"))
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    for name in ("train", "val"):
        np.arange(600, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.mark.parametrize("source", [None, "python-docs"])
@pytest.mark.filterwarnings("error")
def test_a_folder_of_nanogpt_is_used_with_one_note(source: str | None, nanogpt: Path) -> None:
    (note,) = said_of(nanogpt, source, "bpe:4096")
    assert re.search(rf"^Note: {nanogpt} .*manifest\.json.*\buint16\b.*GPT-2.*\b50257\b", note), note
    assert prepare_tokens(config_with(nanogpt, source), print).vocabulary_size == 50257
    assert sorted(path.name for path in nanogpt.iterdir()) == ["train.bin", "val.bin"]


def test_tokens_of_another_text_or_tokenizer_are_used_with_a_note(corpus: Path) -> None:
    (corpus / "tokenizer.json").touch()
    describe(corpus, source="text:stories.txt", tokenizer="tokenizer.json", settings={"tokenizer": "bpe:300"})
    assert said_of(corpus, "text:stories.txt", "bpe:300") == []
    (note,) = said_of(corpus, "text:other.txt", "bpe:300")
    assert re.search(rf"^Note: {corpus} .*'text:stories\.txt'.*'text:other\.txt'.*data\.folder", note), note
    (note,) = said_of(corpus, "text:stories.txt", "gpt2")
    assert re.search(rf"^Note: {corpus} .*tokenizer 'bpe:300'.*'gpt2'.*data\.folder", note), note
    assert len(said_of(corpus, "text:other.txt", "gpt2")) == 2


def test_without_a_requested_or_known_source_there_is_no_note(corpus: Path) -> None:
    assert said_of(corpus, "text:other.txt") == []  # the manifest has neither
    (corpus / "tokenizer.json").touch()
    describe(corpus, tokenizer="tokenizer.json")
    assert said_of(corpus, "text:other.txt") == []  # an unspecified tokenizer.json
    describe(corpus, source="text:stories.txt", tokenizer="r50k_base")
    assert said_of(corpus, None) == []
    assert len(said_of(corpus, "text:stories.txt")) == 1


def test_a_note_cannot_control_the_terminal(corpus: Path) -> None:
    describe(corpus, source="text:\x1b[2J")
    assert all(note.isprintable() for note in said_of(corpus, "text:other.txt"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_the_first_rank_prints_the_note(ranks: int, corpus: Path) -> None:
    describe(corpus, source="text:stories.txt")
    config = config_with(corpus, "text:other.txt")
    shown = io.StringIO()
    for rank in range(ranks):
        of_rank = Ranks(rank, ranks, torch.device("cpu"), "none" if ranks == 1 else "ddp")
        prepare_tokens(config, run.speaker(Console(file=shown, width=200), of_rank))
    assert shown.getvalue().count("Note: ") == 1


def test_the_tokenizer_of_the_corpus_finds_its_words(corpus: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1, "old": 2}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(corpus / "tokenizer.json"))
    describe(corpus, tokenizer="tokenizer.json")
    found = word_tokenizer(open_corpus(corpus), "log.wordsim")
    assert (found.token_id("old"), found.token_id("new")) == (2, None)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_corpus_with_an_unknown_tokenizer_is_refused_with_the_remedy(setting: str, corpus: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"^{setting} .*{corpus}, .*`coupled-adam data prepare .* --set {setting}=none$"
    ):
        word_tokenizer(open_corpus(corpus), setting)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("error", [OSError("no network"), MissingPackageError("no tiktoken"), UserError("no file")])
def test_a_tokenizer_that_cannot_be_opened_is_refused_with_cause_and_remedy(
    setting: str, error: Exception, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: object) -> None:
        raise error

    monkeypatch.setattr(run_tokens, "open_tokenizer", fail)
    describe(corpus, tokenizer="gpt2")
    with pytest.raises(ValueError, match=rf"^{setting} .*'gpt2' .*{corpus}: {error}\. .* --set {setting}=none$"):
        word_tokenizer(open_corpus(corpus), setting)


def test_a_refused_training_names_its_word_similarity_setting(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, log={"wordsim": str(tmp_path)})
    with pytest.raises(ValueError, match=rf"^log\.wordsim .*{corpus}, .*--set log\.wordsim=none$"):
        train(config, tmp_path / "run")


def test_word_pairs_of_a_training_can_be_downloaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"?": 0, "sun": 1, "light": 2, "river": 3, "water": 4, "car": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(corpus / "tokenizer.json"))
    describe(corpus, tokenizer="tokenizer.json")
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    (pairs / "MEN.tsv").write_text("sun\tlight\t47\nriver\twater\t49\ncar\triver\t8\nsun\tcar\t5\n")
    monkeypatch.setattr(download, "fetch_word_pairs", lambda _: load_word_pairs(pairs))
    monkeypatch.chdir(tmp_path)
    train(small_config(corpus, log={"wordsim": "download"}), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (measured,) = (row for row in rows if "men_pearson" in row)
    assert measured["men_pairs_used"] == 4
    assert -100 <= measured["men_pearson"] <= 100
