"""The tokenizer that word similarity needs: opened from the corpus, or refused in the words of the setting."""

import json
from pathlib import Path

import pytest
from small_runs import small_config, train, write_corpus

from coupled_adam.data.corpus import open_corpus
from coupled_adam.data.manifest import FILE_NAME
from coupled_adam.training import run_tokens
from coupled_adam.training.run_tokens import word_tokenizer

SETTINGS = ("log.wordsim", "evaluation.wordsim")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def name_tokenizer(corpus: Path, name: str) -> None:
    manifest = corpus / FILE_NAME
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tokenizer": name}))


def test_the_tokenizer_of_the_corpus_finds_its_words(corpus: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 1, "old": 2}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(corpus / "tokenizer.json"))
    name_tokenizer(corpus, "tokenizer.json")
    found = word_tokenizer(open_corpus(corpus), "log.wordsim")
    assert (found.token_id("old"), found.token_id("new")) == (2, None)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_corpus_of_unknown_tokenizer_is_refused_with_the_way_out(setting: str, corpus: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{setting} needs the tokenizer of .*corpus, .* --set {setting}=none$"):
        word_tokenizer(open_corpus(corpus), setting)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("error", [OSError("no network"), ImportError("no tiktoken"), ValueError("no file")])
def test_a_tokenizer_that_cannot_be_opened_is_refused_with_the_cause_and_the_way_out(
    setting: str, error: Exception, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: object) -> None:
        raise error

    monkeypatch.setattr(run_tokens, "open_tokenizer", fail)
    name_tokenizer(corpus, "gpt2")
    with pytest.raises(
        ValueError, match=rf"^{setting} needs the tokenizer 'gpt2' of .*corpus: {error}\. .* --set {setting}=none$"
    ):
        word_tokenizer(open_corpus(corpus), setting)


def test_a_training_that_wants_word_similarity_says_so(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, log={"wordsim": str(tmp_path)})
    with pytest.raises(ValueError, match=r"^log\.wordsim needs the tokenizer of"):
        train(config, tmp_path / "run")
