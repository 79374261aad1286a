"""Opening folders of shards: with a manifest, as written by nanoGPT, and damaged ones."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpora import contents, write_corpus

from coupled_adam.base.errors import UserError
from coupled_adam.data.corpus import open_corpus, open_known_corpus, open_without_shards
from coupled_adam.data.prepare import prepare


def test_a_folder_written_by_another_program_is_read(tmp_path: Path) -> None:
    corpus = open_corpus(write_corpus(tmp_path, {"comment": "keys of others are no problem"}))
    assert corpus.folder == tmp_path
    assert corpus.vocabulary_size == 100
    assert corpus.splits == ["train", "val"]
    assert corpus.tokens("train").read(0, 100).tolist() == list(range(100))
    assert corpus.tokens("val").read(5, 3).tolist() == [5, 6, 7]
    assert corpus.unigram().tolist() == [1] * 100
    assert corpus.unigram().dtype == np.int64
    assert (corpus.tokenizer, corpus.tokenizer_file()) == (None, None)
    corpus.verify()


def test_unigram_counts_are_read_from_their_file_if_it_exists(tmp_path: Path) -> None:
    np.save(write_corpus(tmp_path) / "unigram.npy", np.arange(100))
    assert open_corpus(tmp_path).unigram().tolist() == list(range(100))


def test_a_tokenizer_file_in_the_manifest_must_exist(tmp_path: Path) -> None:
    write_corpus(tmp_path, {"tokenizer": "tokenizer.json"})
    with pytest.raises(UserError, match=rf"^{tmp_path}: tokenizer\.json\b.*--overwrite"):
        open_corpus(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    corpus = open_corpus(tmp_path)
    assert (corpus.tokenizer, corpus.tokenizer_file()) == ("tokenizer.json", tmp_path / "tokenizer.json")


def test_a_tokenizer_is_found_even_if_the_shards_are_missing(tmp_path: Path) -> None:
    write_corpus(tmp_path, {"tokenizer": "tokenizer.json"})
    for shard in tmp_path.glob("*.bin"):
        shard.unlink()
    with pytest.raises(UserError, match=rf"^{tmp_path}: tokenizer\.json\b"):
        open_without_shards(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert open_without_shards(tmp_path).tokenizer_file() == tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"/train-00000\.bin: .*--overwrite"):
        open_corpus(tmp_path)


def test_the_fingerprint_changes_with_the_tokens_and_not_with_their_origin(tmp_path: Path) -> None:
    first = open_corpus(write_corpus(tmp_path / "a")).fingerprint
    assert len(first) == 12
    assert open_corpus(write_corpus(tmp_path / "b", {"source": "text:elsewhere"})).fingerprint == first
    assert open_corpus(write_corpus(tmp_path / "c", {"vocabulary_size": 101})).fingerprint != first
    changed = json.loads((write_corpus(tmp_path / "d") / "manifest.json").read_text())
    changed["splits"]["val"]["shards"][0]["sha256"] = "0" * 64
    (tmp_path / "d" / "manifest.json").write_text(json.dumps(changed))
    assert open_corpus(tmp_path / "d").fingerprint != first


def test_a_folder_of_nanogpt_is_read_with_a_note_about_assumptions(tmp_path: Path) -> None:
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    with pytest.warns(UserWarning, match=rf"^{tmp_path}\b.*manifest\.json.*uint16.*GPT-2.*50257"):
        corpus = open_corpus(tmp_path)
    assert corpus.splits == ["train", "val"]
    assert (corpus.tokenizer, corpus.vocabulary_size, corpus.manifest.separator) == ("gpt2", 50257, 50256)
    assert corpus.tokens("train").read(990, 10).tolist() == list(range(990, 1000))
    assert corpus.unigram().sum() == 1000
    with warnings.catch_warnings(action="error"):  # a run trained on it has already printed the note
        assert open_known_corpus(corpus.folder).splits == corpus.splits
    (tmp_path / "val.bin").write_bytes(b"odd")
    with pytest.raises(UserError, match=r"/val\.bin: .*\b3 bytes.*uint16.*manifest\.json"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("missing", r"`coupled-adam data prepare SOURCE --out \S*/missing`"),
        ("empty", r"manifest\.json.*train\.bin.*`coupled-adam data prepare SOURCE --out \S*/empty`"),
        ("half", r"`coupled-adam data prepare`"),
    ],
)
def test_folders_without_a_corpus_are_refused(tmp_path: Path, name: str, named: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "unfinished").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"/{name} .*{named}"):
        open_corpus(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, r"manifest\.json: dtype: .*'uint16', 'uint32', 'int32' or 'int64'"),
        ({"vocabulary_size": 0}, r"manifest\.json: vocabulary_size: .*\b0\b"),
        ({"splits": {}}, r"manifest\.json: splits: .*\btrain\b.*\bval\b.*\btest\b"),
        (
            {"splits": {"train": {"tokens": 0, "shards": []}, "dev": {"tokens": 0, "shards": []}}},
            r"manifest\.json: splits: .*train, dev\b.*\btrain\b.*\bval\b.*\btest\b",
        ),
        ({"splits": {"train": {"tokens": 100, "shards": []}}}, r"manifest\.json: .*\btrain\b.*\b100 tokens"),
        (
            {"splits": {"train": {"tokens": 1, "shards": [{"file": "../secret.bin", "tokens": 1}]}}},
            r"manifest\.json: splits\.train\.shards\.0\.file: ",
        ),
        # As uint32, the same bytes would be half as many tokens.
        (
            {"dtype": "uint32"},
            r"/train-00000\.bin: .*\b120 bytes.*\b240\b.*\b60 tokens.*uint32",
        ),
        ({"vocabulary_size": 40}, r"/train-00000\.bin: .*token 59\b.*\b40 tokens"),
    ],
)
def test_a_wrong_manifest_is_refused_when_it_is_opened(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        open_corpus(write_corpus(tmp_path, changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocabulary_size", 2**62),
        ("vocabulary_size", 10**400),
        ("vocabulary_size", -1),
        ("settings", "NESTED"),
        ("splits", {"train": {"tokens": 1, "shards": [{"file": "a\0b", "tokens": 1}]}}),
        ("splits", {"train": {"tokens": 1, "shards": [{"file": "", "tokens": 1}]}}),
        ("splits", {"train": {"tokens": 1, "shards": [{"file": "../a.bin", "tokens": 1}]}}),
    ],
)
def test_a_manifest_with_an_impossible_value_is_refused(tmp_path: Path, key: str, value: object) -> None:
    whole = {"vocabulary_size": 10, "dtype": "uint16", "splits": {"train": {"tokens": 1, "shards": []}}}
    text = json.dumps(whole | {key: value}).replace('"NESTED"', '{"a":' * 900 + "1" + "}" * 900)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json: .*--overwrite"):
        open_corpus(tmp_path)


def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (write_corpus(tmp_path) / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: .*JSON.*line 1 column 2"):
        open_corpus(tmp_path)


def test_a_truncated_shard_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = write_corpus(tmp_path) / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"/train-00001\.bin: .*\b78 bytes.*\b80\b.*\b40 tokens.*uint16"):
        open_corpus(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"/train-00001\.bin: .*--overwrite"):
        open_corpus(tmp_path)


def test_a_changed_byte_is_found_only_by_verify(tmp_path: Path) -> None:
    path = write_corpus(tmp_path) / "train-00001.bin"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    corpus = open_corpus(tmp_path)
    with pytest.raises(UserError, match=r"/train-00001\.bin: .*sha256"):
        corpus.verify()


def test_without_hashes_verify_still_checks_every_token(tmp_path: Path) -> None:
    np.full(5000, 3, "<u2").tofile(tmp_path / "a.bin")
    shards = [{"file": "a.bin", "tokens": 5000}]
    manifest = {"vocabulary_size": 10, "dtype": "uint16", "splits": {"train": {"tokens": 5000, "shards": shards}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    open_corpus(tmp_path).verify()
    np.array([3] * 4999 + [10], "<u2").tofile(tmp_path / "a.bin")
    corpus = open_corpus(tmp_path)  # it checks only the first tokens of a shard
    with pytest.raises(UserError, match=r"token 10\b.*\b10 tokens"):
        corpus.verify()


def test_a_missing_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'test'.*train, val$"):
        open_corpus(write_corpus(tmp_path)).tokens("test")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("has_manifest", [False, True])
def test_nothing_is_prepared_into_a_folder_of_nanogpt(overwrite: bool, has_manifest: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    folder = tmp_path / "nanogpt"
    if has_manifest:
        write_corpus(folder)
    else:
        folder.mkdir()
    (folder / "train.bin").write_bytes(b"mine")
    (folder / "val.bin").write_bytes(b"mine")
    before = contents(folder)
    is_compared = has_manifest and not overwrite
    with pytest.raises(UserError, match=r"--overwrite" if is_compared else r"train\.bin, val\.bin(?!.*--)"):
        prepare(f"text:{tmp_path / 'a.txt'}", "bpe:300", folder, overwrite=overwrite, processes=1)
    assert contents(folder) == before
