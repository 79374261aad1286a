"""`max_tokens` ends a preparation with the block that reaches it, even if the block ends exactly there."""

from itertools import pairwise
from pathlib import Path

import pytest
from data_corpora import documents, write_tokenizer

from coupled_adam.data import blocks
from coupled_adam.data.corpus import Corpus
from coupled_adam.data.prepare import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("max_tokens")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents(120)), encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LENGTH", 2000)


def tokens_of(corpus: Corpus) -> int:
    return sum(split.tokens for split in corpus.manifest.splits.values())


def prepared(folder: Path, out: Path, **options: object) -> Corpus:
    options = {"val": 0.0, "test": 0.0, "processes": 1, **options}
    return prepare(f"text:{folder / 'text.txt'}", str(folder / "tokenizer.json"), out, **options)


@pytest.mark.parametrize(("more", "blocks_more"), [(-1, 0), (0, 0), (1, 1)])
def test_a_preparation_ends_with_the_block_that_reaches_the_number(
    more: int, blocks_more: int, folder: Path, tmp_path: Path
) -> None:
    ends: list[int] = []  # tokens after each block
    whole = prepared(folder, tmp_path / "whole", on_progress=lambda progress: ends.append(progress.tokens))
    ends = sorted(set(ends))
    assert ends[-1] == tokens_of(whole)
    assert len(ends) > 4
    assert all(after - before > 1 for before, after in pairwise(ends))
    corpus = prepared(folder, tmp_path / "some", max_tokens=ends[2] + more)
    assert tokens_of(corpus) == ends[2 + blocks_more]
