"""Counts from files, shards and texts."""

import json
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest
from measure_reference import data_path, needs_test_data

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings import count_unigram, count_unigram_text, load_unigram, open_tokenizer
from special_files import make_special_file

TOKENS = np.random.default_rng(0).integers(0, 50, 10_000)
COUNTS = np.bincount(TOKENS, minlength=60)


class Letters:
    """The token of a letter is its code point modulo 50."""

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


def test_a_shorter_file_is_padded_with_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "unigram.npy", COUNTS[:50])
    with pytest.warns(UserWarning, match=r"unigram\.npy\b.*\b50\b.*\b60\b.*\b10\b"):
        counts = load_unigram(str(tmp_path / "unigram.npy"), 60)
    assert np.array_equal(counts, COUNTS)


def test_files_without_counts_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.ones(70, np.int64))
    np.save(tmp_path / "shares.npy", np.ones(60) / 60)
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    (tmp_path / "text.npy").write_text("1 2 3")
    for name, named in {
        "long.npy": r"\(70,\).*\(60,\)",
        "shares.npy": "dtype float64",
        "objects.npy": r"numpy\.save",
        "text.npy": r"numpy\.save",
        "missing.npy": "no such file",
    }.items():
        with pytest.raises(UserError, match=rf"\b{name}\b.*{named}"):
            load_unigram(tmp_path / name, 60)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_shards_are_counted_as_their_manifest_says(dtype: str, tmp_path: Path) -> None:
    TOKENS[:7000].astype(f"<{np.dtype(dtype).str[1:]}").tofile(tmp_path / "shard_0.bin")
    TOKENS[7000:].astype(f"<{np.dtype(dtype).str[1:]}").tofile(tmp_path / "shard_1.bin")
    write_manifest(tmp_path, dtype)
    assert np.array_equal(count_unigram(tmp_path, 60), COUNTS)
    assert np.array_equal(count_unigram([tmp_path / "shard_0.bin", str(tmp_path / "shard_1.bin")], 60), COUNTS)


def test_without_a_manifest_uint16_is_assumed_with_a_warning(tmp_path: Path) -> None:
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    with pytest.warns(UserWarning, match=r"tokens\.bin\b.*manifest\.json.*uint16"):
        counts = count_unigram(tmp_path / "tokens.bin", 60)
    assert np.array_equal(counts, COUNTS)


def test_a_given_type_needs_no_manifest(tmp_path: Path) -> None:
    TOKENS.astype("<u4").tofile(tmp_path / "tokens.bin")
    assert np.array_equal(count_unigram(tmp_path / "tokens.bin", 60, dtype="uint32"), COUNTS)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "uint61"])
def test_a_given_type_that_tokens_cannot_have_is_refused(dtype: str, tmp_path: Path) -> None:
    TOKENS.astype("<u4").tofile(tmp_path / "tokens.bin")
    with pytest.raises(UserError, match=f"count_unigram: .*'{dtype}'.*int32, int64, uint16, uint32"):
        count_unigram(tmp_path / "tokens.bin", 60, dtype=dtype)


@pytest.mark.parametrize("vocabulary_size", [0, -1])
def test_a_vocabulary_without_rows_is_refused(vocabulary_size: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the river")
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    named = rf"vocabulary_size\b.* {vocabulary_size}\b"
    with pytest.raises(UserError, match=named):
        count_unigram(tmp_path / "tokens.bin", vocabulary_size, dtype="uint16")
    with pytest.raises(UserError, match=named):
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
    with pytest.raises(UserError, match=r"tokens\.bin: .*token 60\b.*\b60 rows"):
        count_unigram(tmp_path, 60)
    np.array([3, -1], "<i4").tofile(tmp_path / "tokens.bin")
    with pytest.raises(UserError, match=r"token -1\b.*\b60 rows"):
        count_unigram(tmp_path / "tokens.bin", 60, dtype="int32")


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "cut.u16.xz").write_bytes(lzma.compress(TOKENS.astype("<u2").tobytes())[:-30])
    (tmp_path / "empty.bin").write_bytes(b"")
    write_manifest(tmp_path, "uint16")
    for name, named in {
        "odd.bin": r"\b2 bytes.*uint16",
        "cut.u16.xz": r"\.xz\b",
        "empty.bin": r"\bzero\b",
        "missing.bin": r"\.bin\b.*\.u16\.xz",
    }.items():
        with pytest.raises(UserError, match=named) as caught:
            count_unigram(tmp_path / name, 60)
        assert name in str(caught.value) or name == "empty.bin"  # one message for all files
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"/nothing\b.*\.bin\b.*\.u16\.xz"):
        count_unigram(tmp_path / "nothing", 60)
    with pytest.raises(UserError, match="token shards"):
        count_unigram([], 60)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "'dtype'"),
        ("{}", "'dtype'"),
        ("[]", "'dtype'"),
        ('{"dtype": "float32"}', "'float32'.*uint16"),
        ('{"dtype": ["uint16"]}', r"\['uint16'\].*uint32"),
    ],
)
def test_damaged_manifests_are_refused(text: str, named: str, tmp_path: Path) -> None:
    TOKENS.astype("<u2").tofile(tmp_path / "tokens.bin")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=f"manifest.json: .*{named}"):
        count_unigram(tmp_path, 60)


def test_plain_and_compressed_text_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for name, V, named in [
        ("latin.txt", 60, r"latin\.txt\b.*UTF-8"),
        ("empty.txt", 60, r"empty\.txt: .*\bzero\b"),
        ("no.xz", 60, r"no\.xz\b.*UTF-8"),
        ("missing.txt", 60, r"missing\.txt\b.*\.xz\b"),
        ("text.txt", 10, r"text\.txt: .*token \d+\b.*\b10 rows"),
    ]:
        with pytest.raises(UserError, match=named):
            count_unigram_text(tmp_path / name, Letters(), V)


@needs_test_data
def test_a_real_text_and_its_tokens_have_the_same_counts(tmp_path: Path) -> None:
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
def test_files_without_a_valid_array_of_counts_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "unigram.npy"
    if kind in ("fifo", "device", "folder"):
        make_special_file(path, kind)
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
    with pytest.raises(UserError, match=r"unigram.npy"):
        load_unigram(path, 60)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{}", '"dtype"', "\xff"])
def test_an_invalid_manifest_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(20))
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"manifest.json"):
        count_unigram(tmp_path / "a.bin", 60)
