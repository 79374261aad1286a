"""Sources: their documents and order, and resuming from any position."""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_corpora import documents

from coupled_adam.base.errors import UserError
from coupled_adam.data import text_files, token_files
from coupled_adam.data.blocks import read_blocks
from coupled_adam.data.sources import Source, open_source
from coupled_adam.data.splitting import Fractions
from coupled_adam.data.text_files import SUFFIXES, TextFiles
from coupled_adam.data.token_files import TokenFiles

TEXTS = documents(40)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    # Two frames, as written by `cat a.zst b.zst` and parallel compressors.
    ".zst": lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:]),
}


def as_txt(texts: list[str]) -> bytes:
    return "\n<|endoftext|>\n".join(texts).encode()


def as_jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def as_parquet(texts: list[str], field: str = "text") -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"id": list(range(len(texts))), field: texts}), file, row_group_size=7)
    return file.getvalue()


def texts_of(source: Source) -> list[str]:
    """Complete documents, joined from their pieces."""
    found = [""]
    for piece in source.pieces(None):
        found[-1] += piece.content
        if piece.ends_document:
            found.append("")
    assert found.pop() == "", "the last document does not end"
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_its_documents(tmp_path: Path, suffix: str) -> None:
    kind = next(kind for kind in (".txt", ".jsonl", ".parquet") if suffix.startswith(kind))
    data = {".txt": as_txt, ".jsonl": as_jsonl, ".parquet": as_parquet}[kind](TEXTS)
    path = tmp_path / f"some.name{suffix}"
    path.write_bytes(COMPRESS[suffix.removeprefix(kind)](data))
    source = TextFiles(str(path), "text")
    assert texts_of(source) == TEXTS
    assert source.progress() == 1.0


def test_a_text_file_without_separators_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo <|endoftext|> in a line\r\n")
    assert texts_of(TextFiles(str(tmp_path / "a.txt"), "text")) == ["one\n\ntwo <|endoftext|> in a line"]


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("<|endoftext|>\n\n<|endoftext|>\none\n<|endoftext|>\n<|endoftext|>\n\ntwo\n\n")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n{"text": "three"}\n')
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.parquet").write_bytes(as_parquet(["", "four"]))
    assert texts_of(TextFiles(str(tmp_path), "text")) == ["one", "two", "three", "four"]


def test_a_folder_and_a_pattern_find_files_sorted_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "deep/a.jsonl", "deep/er/c.txt", "notes.pdf", "z.txt"):
        (tmp_path / name).write_bytes(as_jsonl([name]) if name.endswith("jsonl") else name.encode())
    assert texts_of(TextFiles(str(tmp_path), "text")) == ["b.txt", "deep/a.jsonl", "deep/er/c.txt", "z.txt"]
    assert texts_of(TextFiles(str(tmp_path / "*.txt"), "text")) == ["b.txt", "z.txt"]
    assert texts_of(TextFiles(str(tmp_path / "**" / "*.txt"), "text")) == ["b.txt", "deep/er/c.txt", "z.txt"]


def test_a_long_document_comes_in_pieces_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 100)
    long = "\n".join(f"line {number} of a book" for number in range(100))
    endless = "x" * 1234
    (tmp_path / "a.txt").write_bytes(as_txt([long, "short", endless, "last"]))
    source = TextFiles(str(tmp_path / "a.txt"), "text")
    pieces = list(source.pieces(None))
    assert texts_of(source) == [long, "short", endless, "last"]
    assert max(len(piece.content) for piece in pieces) <= 200
    assert all(piece.content.endswith("\n") for piece in pieces[:10])


@pytest.mark.parametrize("piece", [1, 3, 10, 25, 60, 1000])
def test_a_document_loses_only_the_empty_lines_around_it_wherever_it_is_cut(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", piece)
    texts = ["one line\n\n\n\nand, three empty ones later,\n\nanother", "x\n\n\n\n\n\n\n\ny", "last"]
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join("\n" * 70 + text for text in texts))
    if piece > 13:  # with smaller pieces the line of the separator does not fit
        assert texts_of(TextFiles(str(tmp_path / "a.txt"), "text")) == texts
    (tmp_path / "b.txt").write_text("\n" * 70 + texts[0])
    assert texts_of(TextFiles(str(tmp_path / "b.txt"), "text")) == texts[:1]


@pytest.mark.parametrize("field", ["text", "content"])
def test_the_field_of_the_text_can_be_named(tmp_path: Path, field: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS, "content"))
    (tmp_path / "b.parquet").write_bytes(as_parquet(TEXTS, "content"))
    if field == "content":
        assert texts_of(TextFiles(str(tmp_path), field)) == TEXTS + TEXTS
        return
    with pytest.raises(UserError, match=r"/a\.jsonl, line 1: .*'text'.*id, content\b.*--field"):
        list(TextFiles(str(tmp_path / "a.jsonl"), field).pieces(None))
    with pytest.raises(UserError, match=r"/b\.parquet: .*'text'.*id, content\b.*--field"):
        list(TextFiles(str(tmp_path / "b.parquet"), field).pieces(None))


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("a.txt", b"caf\xe9", ": .*utf-8.*0xe9"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', ", line 2: .*JSON"),
        ("a.jsonl", b"[1]", r", line 1: .*'text'.*\blist\b.*--field"),
        ("a.jsonl", b'{"text": 5}', r", line 1: 'text'.* 5\b"),
        ("a.parquet", b"PAR1 no", r": .*\.parquet\b"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], ": "),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-9], ": "),
        ("a.txt.zst", zstandard.compress(b"text" * 99)[:-9], ": "),
        ("a.txt.gz", b"no gzip", ": "),
        ("a.txt.xz", b"no xz", ": "),
        ("a.txt.zst", b"no zst at all", ": "),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, data: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"^{tmp_path}/{name}{named}"):
        list(TextFiles(str(tmp_path / name), "text").pieces(None))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("text:{}/none.txt", r"^/.*/none\.txt: .*\*\.txt"),
        ("text:{}/*.md", r"^/.*/\*\.md: .*\.txt, "),
        ("text:{}", r"^/[^:]*[^*]: .*\.txt, .*\.jsonl\b"),
        ("text:{}/a.pdf", r"^/.*/a\.pdf: .*\.txt, "),
        ("tokens:{}", r"^/.*: .*\.bin, \.u16\.xz"),
        ("text:", "'text:'.*python-docs, openwebtext"),
        ("books", "'books'(?!.*text:books).*python-docs, openwebtext"),
        ("{}/a.pdf", r"/a\.pdf'.* text:/.*/a\.pdf\b"),
        ("books/*.txt", r"'books/\*\.txt'.* text:books/\*\.txt\b"),
        ("shards/*.bin", r"'shards/\*\.bin'.* tokens:shards/\*\.bin\b"),
        ("openwebtxt", r"'openwebtxt'.* openwebtext\b(?!,).*openwebtext,"),
        ("org/dataset", r"'org/dataset'.* hf:org/dataset\b"),
        ("hf:", "'hf:'.*python-docs, openwebtext"),
        ("hf:a:b:c:d:e", r"'hf:a:b:c:d:e'.* hf:NAME\[:CONFIG"),
    ],
)
def test_missing_sources_are_refused(tmp_path: Path, source: str, named: str) -> None:
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(UserError, match=named):
        open_source(source.format(tmp_path), field="text", separator=0, processes=1, found=None)


def test_from_every_position_the_rest_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 100)
    (tmp_path / "a.txt").write_bytes(as_txt(TEXTS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(as_jsonl(TEXTS)))
    (tmp_path / "c.parquet").write_bytes(as_parquet(TEXTS))
    source = TextFiles(str(tmp_path), "text")
    everything, positions = [], []
    for piece in source.pieces(None):
        everything.append(piece)
        positions.append(json.loads(json.dumps(source.position())))
    assert len(everything) > 3 * len(TEXTS)
    for number, position in enumerate(positions):
        assert list(TextFiles(str(tmp_path), "text").pieces(position)) == everything[number + 1 :]


def write_tokens(path: Path, tokens: list[int]) -> None:
    data = np.array(tokens, "<u2").tobytes()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)


@pytest.mark.filterwarnings("ignore:.*taken as uint16")
@pytest.mark.parametrize("at_once", [3, 4, 1000])
@pytest.mark.parametrize("name", ["a.bin", "a.u16.xz"])
def test_token_files_are_cut_at_the_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at_once: int
) -> None:
    monkeypatch.setattr(token_files, "TOKENS_AT_ONCE", at_once)
    write_tokens(tmp_path / name, [9, 1, 2, 9, 9, 3, 4, 5, 6, 7, 8, 1, 1, 9, 2])
    found: list[list[int]] = [[]]
    for piece in TokenFiles(str(tmp_path / name), separator=9).pieces(None):
        assert piece.split is None
        found[-1] += piece.content.tolist()
        if piece.ends_document:
            found.append([])
    assert found == [[1, 2], [3, 4, 5, 6, 7, 8, 1, 1], [2], []]


def test_token_files_with_the_name_of_a_split_keep_it(tmp_path: Path) -> None:
    for number, name in enumerate(["x_train56M.u16.xz", "x_val.u16.xz", "test.u16.xz", "more.u16.xz"]):
        write_tokens(tmp_path / name, [number, 9])
    source = TokenFiles(str(tmp_path), separator=9)
    assert source.default_fraction() == 0
    assert [(piece.split, piece.content.tolist()) for piece in source.pieces(None)] == [
        ("train", [3]),
        ("test", [2]),
        ("train", [0]),
        ("val", [1]),
    ]


def test_a_token_file_of_odd_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.u16.xz").write_bytes(lzma.compress(b"abc"))
    with pytest.raises(UserError, match=r"/a\.u16\.xz: .*\b2 bytes.*uint16"):
        list(TokenFiles(str(tmp_path), 9).pieces(None))


@pytest.mark.parametrize("length", [1, 50, 10**9])
def test_blocks_have_all_pieces_in_order_and_equal_documents_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr("coupled_adam.data.blocks.BLOCK_LENGTH", length)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS + TEXTS[::-1]))
    source = TextFiles(str(tmp_path), "text")
    blocks = list(read_blocks(source, Fractions(0.3, 0.2, seed=5)))
    pieces = [piece for block in blocks for piece in block.pieces]
    assert [text for _, text, _ in pieces] == TEXTS + TEXTS[::-1]
    assert {split for split, _, _ in pieces} == {"train", "val", "test"}
    assert [split for split, _, _ in pieces[:40]] == [split for split, _, _ in pieces[:-41:-1]]
    assert len(blocks) == {1: 80, 10**9: 1}.get(length, len(blocks))
    for number, block in enumerate(blocks):
        again = list(read_blocks(TextFiles(str(tmp_path), "text"), Fractions(0.3, 0.2, seed=5), block.position))
        assert [b.pieces for b in again] == [b.pieces for b in blocks[number + 1 :]]


def test_the_split_depends_on_content_and_seed_and_has_about_the_requested_share() -> None:
    contents = [text.encode() for text in documents(4000)]
    first = [Fractions(0.1, 0.05, seed=1).split_of(content) for content in contents]
    assert 400 - 75 < first.count("val") < 400 + 75  # four standard deviations
    assert 200 - 55 < first.count("test") < 200 + 55
    second = [Fractions(0.1, 0.05, seed=2).split_of(content) for content in contents]
    both = sum(a == b == "val" for a, b in zip(first, second, strict=True))
    assert both < 80  # 40 if they are independent


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"val": 1.0, "test": 0}, r"\bval\b.* 1\.0\b"),
        ({"val": 0, "test": -0.1}, r"\btest\b.* -0\.1\b"),
        ({"val": 0.5, "test": 0.5}, r"\bval\b.* 0\.5\b.*\btest\b.* 0\.5\b"),
        ({"val": 0, "test": 0, "seed": -1}, r"seed\b.* -1\b"),
    ],
)
def test_bad_fractions_are_refused(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Fractions(**arguments)
