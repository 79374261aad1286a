"""Datasets of the Hugging Face hub, read by the real libraries from a small local hub."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_corpora import documents, expected_tokens, split_by_hash, write_tokenizer
from data_hub_server import COMMIT, serving

from coupled_adam.base.errors import UserConnectionError
from coupled_adam.data.corpus import Corpus, open_corpus
from coupled_adam.data.hub_datasets import HubDataset

OPENWEBTEXT = documents(300, seed=1)
SLIMPAJAMA = documents(200, seed=2)


def write_datasets(folder: Path) -> None:
    """Datasets in the layouts of the real ones: parquet files, and compressed JSON lines in numbered folders."""
    openwebtext = folder / "main" / "Skylion007" / "openwebtext" / "plain_text"
    openwebtext.mkdir(parents=True)
    for number in range(3):
        table = pa.table({"text": OPENWEBTEXT[number * 100 : (number + 1) * 100]})
        pq.write_table(table, openwebtext / f"train-0000{number}-of-00003.parquet", row_group_size=30)
    slimpajama = folder / "main" / "cerebras" / "SlimPajama-627B"
    for number in range(4):
        rows = [
            json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}}) + "\n"
            for text in SLIMPAJAMA[number * 50 : (number + 1) * 50]
        ]
        path = slimpajama / "train" / f"chunk{number // 2 + 1}" / f"example_train_{number % 2}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.compress("".join(rows).encode()))
    held_out = slimpajama / "validation" / "chunk1" / "example_holdout_0.jsonl.zst"
    held_out.parent.mkdir(parents=True)
    held_out.write_bytes(zstandard.compress(b'{"text": "not for training", "meta": {"redpajama_set_name": "x"}}\n'))
    script = folder / "main" / "org" / "script"
    script.mkdir(parents=True)
    (script / "script.py").write_text("raise SystemExit('the code of a dataset was run')")
    converted = folder / "converted" / "org" / "script" / "default" / "train"
    converted.mkdir(parents=True)
    pq.write_table(pa.table({"text": OPENWEBTEXT}), converted / "0000.parquet")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the script's steps by name, and the files downloaded before and after it was stopped."""
    folder = tmp_path_factory.mktemp("hub")
    write_datasets(folder)
    write_tokenizer(folder / "tokenizer.json")
    found: dict[str, Any] = {"folder": folder, "out": folder / "out"}
    with serving(folder, {"refs/convert/parquet": "converted"}) as (address, downloaded):
        script = [sys.executable, str(Path(__file__).with_name("data_hub_script.py"))]
        process = subprocess.Popen(
            [*script, str(folder / "tokenizer.json"), str(folder / "out")],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder / "cache"), "NO_PROXY": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            result = json.loads(line)
            found[result["name"]] = result | {"downloaded": list(downloaded)}
            downloaded.clear()
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.stderr is not None
        found["errors"] = process.stderr.read()
        assert process.wait() == 0, found["errors"]
    return found


def tokens_of(corpus: Corpus) -> dict[str, list[int]]:
    return {split: corpus.tokens(split).read(0, len(corpus.tokens(split))).tolist() for split in corpus.splits}


def test_openwebtext_is_read_from_its_parquet_files(results: dict[str, Any]) -> None:
    assert results["openwebtext"]["error"] == ""
    expected = expected_tokens(OPENWEBTEXT, results["folder"] / "tokenizer.json", 1, 0.1, 0.1)
    corpus = open_corpus(results["out"] / "openwebtext")
    assert tokens_of(corpus) == expected
    assert corpus.manifest.source == "openwebtext"
    assert corpus.manifest.model_extra["found"]["source"] == {"revision": COMMIT}
    corpus.verify()
    # The same dataset by its full name.
    assert tokens_of(open_corpus(results["out"] / "again")) == expected


def test_a_stopped_stream_resumes_without_reading_finished_files(results: dict[str, Any]) -> None:
    stopped, resumed = results["stopped"], results["openwebtext"]
    assert stopped["error"].startswith("Stopped")
    assert {"train-00000-of-00003.parquet", "train-00001-of-00003.parquet"} <= set(stopped["downloaded"])
    assert resumed["first_tokens"] > 6000
    # The library reads the first file for the columns; of the documents, only the missing ones are read.
    assert resumed["downloaded"].count("train-00000-of-00003.parquet") < stopped["downloaded"].count(
        "train-00000-of-00003.parquet"
    )
    assert "train-00002-of-00003.parquet" in resumed["downloaded"]


def test_after_an_update_of_the_library_it_resumes_by_counting(results: dict[str, Any]) -> None:
    assert results["another version"]["texts"] == OPENWEBTEXT[120:]


def test_a_lost_connection_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise TimeoutError("the server\nsays nothing")

    dataset = MagicMock(**{"__iter__.side_effect": breaking})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: dataset)
    monkeypatch.setattr("coupled_adam.data.hub_datasets.commit_of", lambda *_: COMMIT)
    pieces = HubDataset("openwebtext", "text", None).pieces(None)
    assert next(pieces).content == "one"
    with pytest.raises(UserConnectionError, match=r"^openwebtext: .*\b1 document\b.*\(TimeoutError: the server\)"):
        next(pieces)


def test_slimpajama_is_read_from_its_compressed_lines(results: dict[str, Any]) -> None:
    assert results["slimpajama"]["error"] == ""
    corpus = open_corpus(results["out"] / "slimpajama")
    expected = expected_tokens(SLIMPAJAMA, results["out"] / "slimpajama" / "tokenizer.json", 0, 0.1, 0.1)
    assert tokens_of(corpus) == expected
    assert corpus.vocabulary_size == 300


def test_a_dataset_with_a_loading_script_is_read_from_the_hubs_converted_files(results: dict[str, Any]) -> None:
    assert results["script"]["error"] == ""
    expected = expected_tokens(OPENWEBTEXT, results["folder"] / "tokenizer.json", 1, 0.1, 0.1)
    assert tokens_of(open_corpus(results["out"] / "script")) == expected


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("column", r"'body'.*\btext\b.*--field"),
        ("split", r"'hf:Skylion007/openwebtext::holdout'.*\(ValueError: .*\bholdout\b"),
        ("config", r"'hf:Skylion007/openwebtext:french'.*\(ValueError: .*'french'"),
        ("unknown", r"'hf:org/unknown'.* 'org/unknown'"),
    ],
)
def test_missing_parts_of_a_dataset_are_reported(results: dict[str, Any], name: str, named: str) -> None:
    assert re.search(f"^UserError: .*{named}", results[name]["error"])


def test_the_libraries_print_nothing(results: dict[str, Any]) -> None:
    assert results["errors"] == ""


def test_the_documents_of_the_fixture_cover_all_splits() -> None:
    for texts in (OPENWEBTEXT, SLIMPAJAMA):
        assert {split_by_hash(text, 0.1, 0.1) for text in texts} == {"train", "val", "test"}


def test_an_unreachable_hub_is_reported_at_once_in_one_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    program = "import sys; from coupled_adam.commands.data import app; app(sys.argv[1:])"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "prepare", "openwebtext", "--tokenizer", "tokenizer.json", "--out", "out"],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "*"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - started < 30  # mostly imports; the libraries' own retries would take minutes
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"Error: source 'openwebtext': .*\(ConnectError.*text:FILES", done.stderr)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
