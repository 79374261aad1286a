"""Counts from files, shards and texts."""

import json
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from measure_reference import data_path, needs_test_data

from coupled_adam.embeddings import count_unigram, count_unigram_text, load_unigram, open_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 50, 10_000)
COUNTS = np.bincount(TOKENS, minlength=60)


class Letters:
    """Every letter is its code point modulo 50."""

    size = 50

    def token_id(self, word: str) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 50 for letter in text]


def write_manifest(folder: Path, dtype: object) -> None:
    (folder / "manifest.json").write_text(json.dumps({"dtype": dtype, "tokenizer": "gpt2"}))


def test_a_saved_file_is_read_back(tmp_path: Path) -> None:
    np.save(tmp_path / "unigram.npy", COUNTS.astype(np.int32))
    counts = load_unigram(tmp_path / "unigram.npy", 60)
    assert counts.dtype == np.int64
    assert np.array_equal(counts, COUNTS)


def test_a_shorter_file_is_padded_and_it_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "unigram.npy", COUNTS[:50])
    with pytest.warns(UserWarning, match="has 50 counts and the table 60 rows: the last 10 are taken as padding"):
        counts = load_unigram(str(tmp_path / "unigram.npy"), 60)
    assert np.array_equal(counts, COUNTS)


def test_files_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.ones(70, np.int64))
    np.save(tmp_path / "shares.npy", np.ones(60) / 60)
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    (tmp_path / "text.npy").write_text("1 2 3")
    for name, message in {
        "long.npy": r"long.npy has shape \(70,\), expected \(60,\)",
        "shares.npy": "shares.npy has dtype float64, expected whole numbers",
        "objects.npy": "objects.npy cannot be read as .npy",
        "text.npy": "text.npy cannot be read as .npy",
        "missing.npy": "missing.npy cannot be read as .npy",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_unigram(tmp_path / name, 60)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_shards_are_counted_as_their_manifest_says(dtype: str, tmp_path: Path) -> None:
    TOKENS[:7000].astype(f"<{np.dtype(dtype).str[1:]}").tofile(tmp_path / "shard_0.bin")
    TOKENS[7000:].astype(f"<{np.dtype(dtype).str[1:]}").tofile(tmp_path / "shard_1.bin")
    write_manifest(tmp_path, dtype)
    assert np.array_equal(count_unigram(tmp_path, 60), COUNTS)
    assert np.array_equal(count_unigram([tmp_path / "shard_0.bin", str(tmp_path / "shard_1.bin")], 60), COUNTS)


def test_without_a_manifest_uint16_is_assumed_and_said(tmp_path: Path) -> None:
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    with pytest.warns(UserWarning, match=r"tokens.bin has no manifest.json beside it: its tokens are taken as uint16"):
        counts = count_unigram(tmp_path / "tokens.bin", 60)
    assert np.array_equal(counts, COUNTS)


def test_a_given_type_needs_no_manifest(tmp_path: Path) -> None:
    TOKENS.astype("<u4").tofile(tmp_path / "tokens.bin")
    assert np.array_equal(count_unigram(tmp_path / "tokens.bin", 60, dtype="uint32"), COUNTS)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "uint61"])
def test_a_given_type_that_tokens_do_not_have_is_refused(dtype: str, tmp_path: Path) -> None:
    TOKENS.astype("<u4").tofile(tmp_path / "tokens.bin")
    with pytest.raises(ValueError, match=f"count_unigram: dtype '{dtype}' is unknown; expected one of int32, int64"):
        count_unigram(tmp_path / "tokens.bin", 60, dtype=dtype)


@pytest.mark.parametrize("vocabulary_size", [0, -1])
def test_a_vocabulary_without_rows_is_refused(vocabulary_size: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the river")
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    message = f"Invalid vocabulary_size value: {vocabulary_size}. Use the number of rows"
    with pytest.raises(ValueError, match=message):
        count_unigram(tmp_path / "tokens.bin", vocabulary_size, dtype="uint16")
    with pytest.raises(ValueError, match=message):
        count_unigram_text(tmp_path / "text.txt", Letters(), vocabulary_size)


def test_compressed_shards_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokens.u16.xz").write_bytes(lzma.compress(TOKENS.astype("<u2").tobytes()))
    assert np.array_equal(count_unigram(tmp_path, 60), COUNTS)


def test_shards_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coupled_adam.embeddings.unigram.TOKENS_AT_ONCE", 333)
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    (tmp_path / "more.u16.xz").write_bytes(lzma.compress(TOKENS.astype("<u2").tobytes()))
    write_manifest(tmp_path, "uint16")
    assert np.array_equal(count_unigram(tmp_path, 60), 2 * COUNTS)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    np.array([3, 60, 4], "<u2").tofile(tmp_path / "tokens.bin")
    write_manifest(tmp_path, "uint16")
    with pytest.raises(ValueError, match=r"tokens.bin: has the token 60, but the vocabulary has 60 rows"):
        count_unigram(tmp_path, 60)
    np.array([3, -1], "<i4").tofile(tmp_path / "tokens.bin")
    with pytest.raises(ValueError, match="has the token -1"):
        count_unigram(tmp_path / "tokens.bin", 60, dtype="int32")


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "cut.u16.xz").write_bytes(lzma.compress(TOKENS.astype("<u2").tobytes())[:-30])
    (tmp_path / "empty.bin").write_bytes(b"")
    write_manifest(tmp_path, "uint16")
    for name, message in {
        "odd.bin": "odd.bin: its length is not a multiple of 2 bytes",
        "cut.u16.xz": "cut.u16.xz: damaged .xz file",
        "empty.bin": "the token shards: all counts are zero",
        "missing.bin": "missing.bin is not a file, nor a folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            count_unigram(tmp_path / name, 60)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"nothing is not a file, nor a folder with .bin"):
        count_unigram(tmp_path / "nothing", 60)
    with pytest.raises(ValueError, match="no file given"):
        count_unigram([], 60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON with a 'dtype'"),
        ("{}", "expected JSON with a 'dtype'"),
        ("[]", "expected JSON"),
        ('{"dtype": "float32"}', "dtype 'float32' is unknown"),
        ('{"dtype": ["uint16"]}', r"dtype \['uint16'\] is unknown"),
    ],
)
def test_damaged_manifests_are_refused(text: str, message: str, tmp_path: Path) -> None:
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=f"manifest.json: {message}"):
        count_unigram(tmp_path, 60)


def test_a_text_is_counted_plain_and_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coupled_adam.embeddings.unigram.CHARACTERS_AT_ONCE", 20)
    text = "the café by the river\n" * 30 + "no line end"
    expected = np.bincount(Letters().encode(text), minlength=60)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "text.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert np.array_equal(count_unigram_text(tmp_path / "text.txt", Letters(), 60), expected)
    assert np.array_equal(count_unigram_text(tmp_path / "text.txt.xz", Letters(), 60), expected)


def test_texts_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.xz").write_text("not compressed")
    (tmp_path / "text.txt").write_text("the river")
    for name, V, message in [
        ("latin.txt", 60, "latin.txt cannot be read as UTF-8 text"),
        ("empty.txt", 60, "empty.txt: all counts are zero"),
        ("no.xz", 60, "no.xz cannot be read as UTF-8 text"),
        ("missing.txt", 60, "missing.txt is not a file"),
        ("text.txt", 10, "text.txt: has the token .*the vocabulary has 10 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            count_unigram_text(tmp_path / name, Letters(), V)


@needs_test_data
def test_a_real_text_and_its_tokens_count_alike(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = open_tokenizer(data_path("gpt2-bpe", "tokenizer.json"))
    with lzma.open(data_path("corpus", "simplewiki_sample.txt.xz"), "rt") as file:
        text = file.read(200_000)
    (tmp_path / "text.txt").write_text(text)
    np.array(tokenizer.encode(text), "<u2").tofile(tmp_path / "tokens.bin")
    write_manifest(tmp_path, "uint16")
    counts = count_unigram_text(tmp_path / "text.txt", tokenizer, 50304)
    assert np.array_equal(counts, count_unigram(tmp_path / "tokens.bin", 50304))


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "huge", "npz", "object", "text", "scalar"])
def test_counts_that_are_no_array_of_a_file_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "unigram.npy"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    elif kind == "npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", "")
    elif kind == "object":
        with path.open("wb") as file:
            np.save(file, np.array([{}]), allow_pickle=True)
    elif kind == "scalar":
        np.save(path, np.int64(3))
    else:
        path.write_text("1 2 3")
    with pytest.raises(ValueError, match=r"unigram.npy"):
        load_unigram(path, 60)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '"dtype"', "\xff"])
def test_a_manifest_that_is_none_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(20))
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"manifest.json"):
        count_unigram(tmp_path / "a.bin", 60)
