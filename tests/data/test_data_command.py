"""`coupled-adam data prepare`, `data info` and `data count`, as a user runs them."""

import io
import json
import lzma
import re
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from data_corpora import documents, write_corpus, write_tokenizer
from rich.console import Console
from typer.testing import CliRunner

from coupled_adam.commands.data import app
from coupled_adam.data import blocks, shards
from coupled_adam.data.corpus import open_corpus

runner = CliRunner(env={"COLUMNS": "150", "TERMINAL_WIDTH": "150"})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with some books and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for number in range(3):
        text = "\n<|endoftext|>\n".join(documents(40, seed=number))
        (tmp_path / "books" / f"{number}.txt").write_text(text, encoding="utf-8")
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def prepare(*arguments: str) -> list[str]:
    return ["prepare", "text:books/*.txt", "--tokenizer", "tokenizer.json", "--processes", "1", *arguments]


def test_prepare_reports_its_result_and_the_second_time_that_nothing_is_left_to_do(here: Path) -> None:
    result = runner.invoke(app, prepare("--val", "0.1", "--test", "0.1", "--shard-tokens", "1k"))
    assert result.exit_code == 0, result.output
    corpus = open_corpus("data/books-txt-tokenizerjson")
    counts = {split: len(corpus.tokens(split)) for split in corpus.splits}
    shown = re.findall(r"\b(train|val|test) ([\d,]+\d)", result.stdout)
    assert shown == [(split, f"{count:,}") for split, count in counts.items()]
    assert re.search(r"\b300\b", result.stdout)
    assert "data/books-txt-tokenizerjson" in result.stdout
    assert result.stdout.count("\n") == 1
    assert len(corpus.manifest.splits["train"].shards) == -(-counts["train"] // 1000)
    result = runner.invoke(app, prepare("--val", "0.1", "--test", "0.1", "--shard-tokens", "1000"))
    assert result.exit_code == 0
    assert "data/books-txt-tokenizerjson" in result.stdout
    assert "train" not in result.stdout
    assert result.stdout.count("\n") == 1


def test_prepare_refuses_changed_settings_by_name_unless_replacing(here: Path) -> None:
    assert runner.invoke(app, prepare("--out", "out")).exit_code == 0
    result = runner.invoke(app, prepare("--out", "out", "--max-tokens", "1k"))
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: .*\bout: max_tokens\b.* None\b.* 1000\b.*--out.*--overwrite\n", result.stderr)
    result = runner.invoke(app, prepare("--out", "out", "--max-tokens", "1k", "--overwrite"))
    assert result.exit_code == 0, result.output
    assert open_corpus("out").manifest.settings["max_tokens"] == 1000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["prepare", "books"], "'books'.* text:books.*python-docs, "),
        (["prepare", "text:none"], "none: "),
        (prepare("--max-tokens", "many"), r"--max-tokens\b.*'many'.*\b300k\b"),
        (prepare("--shard-tokens", "0"), r"--shard-tokens\b.*'0'.*\b300k\b"),
        (prepare("--val", "0.9", "--test", "0.9"), r".*\bval\b.* 0\.9\b.*\btest\b.* 0\.9\b"),
        (prepare("--field", "body", "--separator", "<eod>"), r".*tokenizer\.json: .*<eod>.*--separator"),
        (["info", "books"], r"corpus: books\b.*manifest\.json.*train\.bin.*--out books`"),
        (["info", "no\x1b[2Jwhere"], r"corpus: no\\x1b\[2Jwhere\b"),
        (["count", "books"], r"token shards: books\b.*\.bin\b"),
        (["count", "none.bin"], r"token shards: none\.bin\b"),
    ],
)
def test_an_error_is_one_line(here: Path, arguments: list[str], named: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert re.match(rf"Error: .*{named}", result.stderr)
    assert result.stderr.count("\n") == 1
    assert not (here / "data").exists() or not list((here / "data").iterdir())


@pytest.mark.parametrize("arguments", [["--val", "2"], ["--processes", "0"], ["--seed", "-1"], ["--tokeniser", "x"]])
def test_bad_options_are_refused_by_name(here: Path, arguments: list[str]) -> None:
    result = runner.invoke(app, prepare(*arguments))
    assert result.exit_code == 2
    assert arguments[0] in result.stderr


def test_prepare_reports_where_it_resumes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LENGTH", 500)
    write = shards.write_journal
    calls = 0

    def interrupted(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr("coupled_adam.data.preparation.write_journal", interrupted)
    arguments = prepare("--out", "out", "--shard-tokens", "300")
    assert runner.invoke(app, arguments).exit_code == 130
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0
    [done] = re.findall(r"\b([\d,]+) tokens\b", result.stderr)
    assert 0 < int(done.replace(",", "")) < sum(split.tokens for split in open_corpus("out").manifest.splits.values())
    assert result.stderr.count("\n") == 1


def test_info_shows_the_contents_of_the_folder(here: Path) -> None:
    runner.invoke(app, prepare("--out", "out", "--seed", "3"))
    corpus = open_corpus("out")
    result = runner.invoke(app, ["info", "out", "--verify"])
    assert result.exit_code == 0, result.output
    for words in (
        "source       text:books/*.txt",
        "tokenizer    tokenizer.json",
        "vocabulary   300 tokens as uint16",
        "separator    1",
        corpus.fingerprint,
    ):
        assert words in result.stdout
    unverified = runner.invoke(app, ["info", "out"]).stdout
    assert result.stdout.startswith(unverified)
    assert result.stdout.removeprefix(unverified).count("\n") == 1, "a line says that the shards were read"
    facts = json.loads(runner.invoke(app, ["info", "out", "--json"]).stdout)
    for split in ("train", "val", "test"):
        assert facts["splits"][split]["tokens"] == len(corpus.tokens(split))
        assert facts["splits"][split]["bytes"] == sum(path.stat().st_size for path in corpus.tokens(split).paths)
        assert f"{facts['splits'][split]['tokens']:,}" in result.stdout
    assert facts["verified"] is False
    assert len(facts["most_frequent"]) == 10
    first = facts["most_frequent"][0]
    assert first["count"] == corpus.unigram().max()
    assert first["token"] == corpus.unigram().argmax()
    assert first["text"] in result.stdout


def test_info_finds_a_changed_shard_when_asked_to_verify(here: Path) -> None:
    runner.invoke(app, prepare("--out", "out"))
    path = here / "out" / "val-00000.bin"
    path.write_bytes(b"\x05\x00" + path.read_bytes()[2:])
    assert runner.invoke(app, ["info", "out"]).exit_code == 0
    result = runner.invoke(app, ["info", "out", "--verify"])
    assert result.exit_code == 2
    assert re.match(r"Error: out/val-00000\.bin: .*sha256", result.stderr)


def test_a_folder_of_nanogpt_is_shown_with_a_note(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = Mock(side_effect=ConnectionError)
    monkeypatch.setattr("coupled_adam.data.corpus_summary.open_tokenizer", offline)
    np.array([7, 7, 9], "<u2").tofile(here / "train.bin")
    result = runner.invoke(app, ["info", "."])
    assert result.exit_code == 0
    assert re.fullmatch(r"Note: \. .*manifest\.json.*uint16.*GPT-2.*50257.*\n", result.stderr)
    assert "documents │ unknown" in result.stdout
    assert re.search(r"—\s+│ 7\s+│\s+2 ", result.stdout), "no tokenizer here, so only the numbers"
    counted = runner.invoke(app, ["count", ".", "--json"])
    assert json.loads(counted.stdout)["tokens"] == 3


def test_count_counts_a_split_or_loose_files_and_writes_the_counts(here: Path) -> None:
    write_corpus(here / "corpus")
    result = runner.invoke(app, ["count", "corpus", "--split", "val", "--out", "new/unigram.npy"])
    assert result.exit_code == 0, result.output
    # 30 different tokens.
    assert re.match(r"30 tokens.* 30\b.* 100\b.* 3\.401 nats\b", result.stdout)
    assert result.stdout.endswith("Counts: new/unigram.npy\n")
    assert np.load(here / "new" / "unigram.npy").tolist() == [1] * 30 + [0] * 70

    (here / "a.u16.xz").write_bytes(lzma.compress(np.array([3, 3, 5], "<u2").tobytes()))
    np.array([5, 1], "<u2").tofile(here / "corpus" / "loose.bin")
    arguments = ["count", "a.u16.xz", "corpus/loose.bin", "--vocabulary-size", "10", "--json"]
    facts = json.loads(runner.invoke(app, arguments).stdout)
    assert (facts["tokens"], facts["unseen"], facts["vocabulary_size"]) == (5, 7, 10)
    assert facts["entropy"] == pytest.approx(-(0.8 * np.log(0.4) + 0.2 * np.log(0.2)))
    assert [(t["token"], t["count"], t["text"]) for t in facts["most_frequent"]] == [
        (3, 2, None),
        (5, 2, None),
        (1, 1, None),
    ]
    result = runner.invoke(app, ["count", "corpus", "--split", "dev"])
    assert result.exit_code == 2
    assert re.match(r"Error: corpus: .*'dev'.*train, val\n", result.stderr)
    result = runner.invoke(app, [*arguments[:2], "--vocabulary-size", "4"])
    assert result.exit_code == 2
    assert re.match(r"Error: a\.u16\.xz: .*token 5\b.* 4 rows", result.stderr)


def test_help_names_every_source_and_tokenizer() -> None:
    shown = runner.invoke(app, ["prepare", "--help"]).output
    for words in ("python-docs", "openwebtext", "slimpajama", "hf:NAME", "text:FILES", "tokens:FILES", "bpe:N", "gpt2"):
        assert words in shown
    assert all(name in runner.invoke(app, ["--help"]).output for name in ("prepare", "info", "count"))


def test_a_terminal_shows_a_bar_with_the_time_left_and_stdout_stays_clean(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=terminal, force_terminal=True, width=100))
    monkeypatch.setattr(blocks, "BLOCK_LENGTH", 500)
    monkeypatch.setattr(blocks, "valid_text", lambda text: time.sleep(0.01) or text)
    result = runner.invoke(app, prepare("--out", "out"))
    assert result.exit_code == 0, result.output
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"tokenizing .* \d+% [\d,]+ tokens \d+(\.\d)? s left", shown), shown
    assert result.stdout.startswith("Tokens: train ")
    assert result.stdout.count("\n") == 1
