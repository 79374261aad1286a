"""Preparing a corpus: the right tokens in the right split, reproducible bytes, and no data lost by interruptions."""

import itertools
import json
import lzma
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from data_corpora import contents, documents, expected_tokens, split_by_hash, write_tokenizer

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.data import blocks, text_files
from coupled_adam.data.corpus import open_corpus
from coupled_adam.data.prepare import Progress, prepare
from coupled_adam.data.python_docs import documentation, documentation_files, python_documents
from coupled_adam.data.settings import differences

SHARED = os.environ.get("COUPLED_ADAM_TEST_DATA")
TEXTS = [*documents(300), "half a pair \ud83d, and a text with <|endoftext|> in it"]
VALID = [*TEXTS[:-1], "half a pair �, and a text with <|endoftext|> in it"]


class Stopped(Exception):
    """Raised in the middle of a preparation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in three files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("prepare")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("\n<|endoftext|>\n".join(TEXTS[:100]), encoding="utf-8")
    for name, texts in (("b.jsonl", TEXTS[100:180]), ("c.jsonl", TEXTS[180:])):
        (folder / "texts" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_LENGTH", 2000)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    # By default the library would treat "<|endoftext|>" in a text as the separator.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = expected_tokens(VALID[:-1], folder / "tokenizer.json", separator=1, val=0.1, test=0.1)
    tokenizer.encode_special_tokens = True
    found[split_by_hash(VALID[-1], 0.1, 0.1)] += [*tokenizer.encode(VALID[-1]).ids, 1]
    return found


def run(folder: Path, out: Path, **options: object) -> None:
    options = {"val": 0.1, "test": 0.1, "shard_tokens": 3000, "processes": 1, **options}
    prepare(f"text:{folder / 'texts'}", str(folder / "tokenizer.json"), out, **options)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("uninterrupted")
    run(folder, out)
    return contents(out)


def test_every_document_is_in_its_split_and_followed_by_the_separator(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    run(folder, tmp_path / "out")
    corpus = open_corpus(tmp_path / "out")
    for split, tokens in expected.items():
        assert len(tokens) > 500
        assert corpus.tokens(split).read(0, len(corpus.tokens(split))).tolist() == tokens
        assert corpus.manifest.splits[split].documents == tokens.count(1)
        assert all(shard.tokens == 3000 for shard in corpus.manifest.splits[split].shards[:-1])
    assert len(corpus.manifest.splits["train"].shards) > 3
    assert corpus.unigram().tolist() == np.bincount(expected["train"], minlength=300).tolist()
    assert np.load(tmp_path / "out" / "unigram.npy").dtype == np.int64
    assert (corpus.vocabulary_size, corpus.manifest.dtype, corpus.manifest.separator) == (300, "uint16", 1)
    assert corpus.tokenizer_file().read_bytes() == (folder / "tokenizer.json").read_bytes()
    corpus.verify()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {shard.file for split in corpus.manifest.splits.values() for shard in split.shards}
    assert names == shards | {"manifest.json", "unigram.npy", "tokenizer.json"}


def test_the_number_of_processes_does_not_change_the_bytes(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, tmp_path / "3", processes=3)
    assert contents(tmp_path / "3") == uninterrupted
    monkeypatch.setattr(blocks, "BLOCK_LENGTH", 10**9)
    run(folder, tmp_path / "one block")
    assert contents(tmp_path / "one block") == uninterrupted


@pytest.mark.parametrize("save_every", [0.0, 1e9])
def test_stopped_after_any_block_it_resumes_and_writes_the_same_bytes(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes], save_every: float
) -> None:
    stopped = 0
    tokens = []

    def stop(progress: Progress) -> None:
        nonlocal stopped
        calls.append(progress)
        tokens.append(progress.tokens)
        if len(calls) == 3:  # the first report tells where it resumes
            stopped += 1
            raise Stopped

    while True:
        calls: list[Progress] = []
        try:
            run(folder, tmp_path / "out", save_every=save_every, on_progress=stop)
            break
        except Stopped:
            assert (tmp_path / "out" / "unfinished").is_dir()
            assert not (tmp_path / "out" / "manifest.json").exists()
            if save_every and stopped == 8:  # with journal entries only at full shards it would never finish
                save_every = 0.0
    assert stopped >= 8
    assert contents(tmp_path / "out") == uninterrupted
    if not save_every:
        assert sum(second < first for first, second in itertools.pairwise(tokens)) <= 8


def test_killed_at_random_moments_it_resumes_and_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    source, tokenizer = f"text:{tmp_path / 'texts'}", str(folder / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    for number in range(4):
        texts = documents(400, seed=number)
        (tmp_path / "texts" / f"{number}.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    script = [sys.executable, str(Path(__file__).with_name("data_kill_script.py"))]
    arguments = [source, tokenizer, str(tmp_path / "killed"), "20"]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    killed, full_shards = map(int, done.stdout.split())
    assert killed >= 15  # it may have finished before the last kills
    assert full_shards > 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("fails_at", [1, 2, 5, 40])
def test_a_full_disk_is_reported_and_finished_work_is_kept(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    calls = 0

    def fail(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(UserOSError, match=r"/out: .*No space left on device"):
            run(folder, tmp_path / "out", save_every=0.0)
    if fails_at == 40:
        assert len(list((tmp_path / "out").glob("train-*.bin"))) > 1
    run(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == uninterrupted


def test_a_write_that_fails_halfway_leaves_no_partial_data(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    """A file size limit makes the operating system refuse a write in the middle of a block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4500, before[1]))
    try:
        with pytest.raises(UserOSError, match=r"/out: .*File too large"):
            run(folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == uninterrupted


def test_an_equal_request_does_nothing_and_a_different_one_is_refused(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    run(folder, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    run(folder, out, processes=2, on_progress=lambda _: pytest.fail("it did something"))
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(UserError, match=r"/out: seed\b.* 0\b.* 5\b.*--out.*--overwrite"):
        run(folder, out, seed=5)
    assert contents(out) == uninterrupted
    (out / "notes.txt").write_text("of the user")
    run(folder, out, seed=5, overwrite=True)
    assert (out / "notes.txt").exists()
    assert contents(out).keys() - {"notes.txt"} >= {"manifest.json", "unigram.npy", "tokenizer.json"}
    assert contents(out)["train-00000.bin"] != uninterrupted["train-00000.bin"]
    open_corpus(out).verify()


def test_an_unfinished_preparation_is_not_mixed_with_another(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.tokens > 6000:
            raise Stopped

    out, texts = tmp_path / "out", tmp_path / "copy"
    shutil.copytree(folder, texts)
    with pytest.raises(Stopped):
        run(texts, out, save_every=0.0, on_progress=stop)
    with pytest.raises(UserError, match=r"/out: val\b.* 0\.1\b.* 0\.2\b.*--out.*--overwrite"):
        run(texts, out, val=0.2)
    with pytest.raises(UserError, match=r"/out .*`coupled-adam data prepare`"):
        open_corpus(out)
    (texts / "texts" / "d.txt").write_text("one file more")
    with pytest.raises(UserError, match=r"/out: files\b.* 3\b.* 4\b.*; bytes\b.*--overwrite"):
        run(texts, out)
    (texts / "texts" / "d.txt").unlink()
    journal = out / "unfinished" / "journal.json"
    good = journal.read_text()
    journal.write_text(good[:50])
    with pytest.raises(UserError, match=r"/journal\.json: .*--overwrite"):
        run(texts, out)
    journal.write_text(good)
    growing = next((out / "unfinished").glob("train-*.bin"))
    data = growing.read_bytes()
    growing.write_bytes(data[:10])
    with pytest.raises(UserError, match=rf"{growing.name}: .*--overwrite"):
        run(texts, out)
    growing.write_bytes(data + b"what was written after the journal")
    run(texts, out)
    uninterrupted = {name: data for name, data in uninterrupted.items() if name != "manifest.json"}  # names the source
    assert {name: data for name, data in contents(out).items() if name != "manifest.json"} == uninterrupted


def test_two_processes_cannot_prepare_one_folder_at_once(folder: Path, tmp_path: Path) -> None:
    def again(progress: Progress) -> None:
        with pytest.raises(UserError, match=rf"/out\b.*process {os.getpid()}\b"):
            run(folder, tmp_path / "out")
        raise Stopped

    with pytest.raises(Stopped):
        run(folder, tmp_path / "out", on_progress=again)


def test_files_of_others_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "unigram.npy").write_text("mine")
    (tmp_path / "train-00000.bin").write_text("mine")
    with pytest.raises(UserError, match=r"train-00000\.bin, unigram\.npy.*manifest\.json.*--out.*--overwrite"):
        run(folder, tmp_path)
    assert (tmp_path / "unigram.npy").read_text() == "mine"
    assert not (tmp_path / "unfinished").exists()


def test_the_users_tokenizer_may_be_in_the_folder(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for overwrite in (False, True):
        prepare(
            f"text:{folder / 'texts'}",
            str(tmp_path),
            tmp_path,
            val=0.1,
            test=0.1,
            shard_tokens=3000,
            processes=1,
            overwrite=overwrite,
        )
        assert contents(tmp_path)["train-00002.bin"] == uninterrupted["train-00002.bin"]


@pytest.mark.parametrize("stop_while", ["training the tokenizer", "tokenizing"])
def test_a_tokenizer_is_trained_only_on_training_documents(folder: Path, tmp_path: Path, stop_while: str) -> None:
    from coupled_adam.byte_level_bpe import train_bpe

    def stop(progress: Progress) -> None:
        if progress.stage == stop_while and progress.done:
            raise Stopped

    source = f"text:{folder / 'texts'}"
    with pytest.raises(Stopped):
        prepare(source, "bpe:350", tmp_path / "out", val=0.3, test=0.3, processes=1, on_progress=stop, save_every=0.0)
    corpus = prepare(source, "bpe:350", tmp_path / "out", val=0.3, test=0.3, processes=1)
    train_bpe([text for text in VALID if split_by_hash(text, 0.3, 0.3) == "train"], 350, tmp_path / "reference.json")
    assert corpus.tokenizer_file().read_bytes() == (tmp_path / "reference.json").read_bytes()
    assert corpus.vocabulary_size == 350
    corpus.verify()


def test_it_ends_at_the_requested_number_of_tokens_even_after_interruptions(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.tokens > 2000:
            raise Stopped

    run(folder, tmp_path / "whole", max_tokens=5000)
    with pytest.raises(Stopped):
        run(folder, tmp_path / "resumed", max_tokens=5000, on_progress=stop, save_every=0.0)
    run(folder, tmp_path / "resumed", max_tokens=5000, processes=2)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")
    manifest = open_corpus(tmp_path / "whole").manifest
    assert 5000 <= sum(split.tokens for split in manifest.splits.values()) < 7000
    assert uninterrupted["train-00000.bin"].startswith(contents(tmp_path / "whole")["train-00000.bin"])


def test_a_document_of_many_pieces_stays_one_document_even_if_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 700)
    books = ["\n".join(documents(120, seed=seed)) for seed in range(4)]
    (tmp_path / "books.txt").write_text("\n<|endoftext|>\n".join(books), encoding="utf-8")
    arguments = (f"text:{tmp_path / 'books.txt'}", str(folder / "tokenizer.json"))
    options = {"val": 0.3, "test": 0.0, "seed": 4, "processes": 1, "shard_tokens": 3000}
    stop_at = iter(range(500, 10**9, 900))
    limit = next(stop_at)

    def stop(progress: Progress) -> None:
        nonlocal limit
        if progress.tokens > limit:
            limit = next(stop_at)
            raise Stopped

    stopped = 0
    while not (tmp_path / "out" / "manifest.json").exists():
        try:
            prepare(*arguments, tmp_path / "out", **options, save_every=0.0, on_progress=stop)
        except Stopped:
            stopped += 1
    assert stopped > 5
    corpus = prepare(*arguments, tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {name: split.documents for name, split in corpus.manifest.splits.items()} == {"train": 3, "val": 1}
    first = corpus.tokens("train").read(0, 2000).tolist()
    assert 1 not in first


@pytest.mark.filterwarnings("ignore:.*taken as uint16")
def test_token_files_keep_their_splits_and_need_no_tokenizer(tmp_path: Path) -> None:
    tokens = {"train": [5, 6, 50256, 7], "val": [8, 50256], "test": [9]}
    for name, numbers in tokens.items():
        np.array(numbers, "<u2").tofile(tmp_path / f"{name}.bin")
    corpus = prepare(f"tokens:{tmp_path}", "gpt2", tmp_path / "out")
    assert corpus.tokens("train").read(0, 5).tolist() == [5, 6, 50256, 7, 50256]
    assert corpus.tokens("val").read(0, 2).tolist() == [8, 50256]
    assert corpus.tokens("test").read(0, 2).tolist() == [9, 50256]
    assert (corpus.tokenizer, corpus.vocabulary_size) == ("gpt2", 50257)
    with pytest.raises(UserError, match=rf"tokens:{tmp_path}.*--tokenizer"):
        prepare(f"tokens:{tmp_path}", "bpe:300", tmp_path / "out2")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shard_tokens": 0}, r"shard_tokens\b.* 0\b"),
        ({"max_tokens": 0}, r"max_tokens\b.* 0\b"),
        ({"val": 1.5}, r"\bval\b.* 1\.5\b"),
        ({"val": 0.6, "test": 0.6}, r"\bval\b.* 0\.6\b.*\btest\b.* 0\.6\b"),
        ({"processes": 0}, r"processes\b.* 0\b"),
        ({"val": 1e-9}, r"\b301 documents.*'val'.*--val\b.*--test\b"),
        ({"tokenizer": "bpe:12"}, r"'bpe:12'.*\b257\b"),
        ({"tokenizer": "missing/tokenizer.json"}, r"missing/tokenizer\.json\b"),
        ({"source": "text:nowhere"}, r"^nowhere: "),
        ({"separator": "<eod>"}, r"<eod>.*--separator"),
    ],
)
def test_invalid_requests_are_refused_and_create_no_folder(
    folder: Path, tmp_path: Path, options: dict[str, object], named: str
) -> None:
    options = {"processes": 1, "test": 0.1, **options}
    source = str(options.pop("source", f"text:{folder / 'texts'}"))
    tokenizer = str(options.pop("tokenizer", folder / "tokenizer.json"))
    with pytest.raises(UserError, match=named):
        prepare(source, tokenizer, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "unfinished").is_dir() or options["processes"] == 0
    assert not list(tmp_path.rglob("*.bin"))


def test_differences_are_named_in_both_directions() -> None:
    found = differences({"a": 1, "b": 2}, {"b": 2, "c": 3})
    assert [re.findall(r"\b(?:[abc]|\d|None)\b", line) for line in found] == [["a", "1", "None"], ["c", "None", "3"]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of the standard library, and no other package."""
    for number in range(30):
        (tmp_path / f"m{number:02}.py").write_text(f'"""Module {number}."""\n')
    monkeypatch.setattr("coupled_adam.data.python_docs.sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr("coupled_adam.data.python_docs.PACKAGES", ())
    monkeypatch.setattr("coupled_adam.data.python_docs.topic_documents", lambda: ["a topic"])
    return tmp_path


def test_python_docs_are_the_same_for_any_number_of_processes(package: Path) -> None:
    (package / "deep").mkdir()
    (package / "deep" / "guide.rst").write_text("Guide\n=====\n")
    (package / "broken.py").write_text("print 'Python 2'")
    (package / "empty.py").write_text("x = 1")
    expected = ["Guide\n=====", *(f"Module {number}." for number in range(30)), "a topic"]
    assert python_documents(1) == python_documents(2) == expected


def test_the_documentation_of_numpy_is_found_without_importing_it(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coupled_adam.data.python_docs.PACKAGES", ("numpy",))
    documents = python_documents(2)
    assert len(documents) > 130
    for words in (
        "Return evenly spaced numbers over a specified interval.",  # a docstring
        "Create an array.\n",  # one added to a compiled function
    ):
        assert sum(words in document for document in documents) == 1, words


@pytest.mark.skipif(SHARED is None, reason="COUPLED_ADAM_TEST_DATA names no folder with a text and GPT-2's files")
def test_a_real_text_has_the_tokens_of_each_of_its_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    monkeypatch.undo()  # blocks of their real size
    folder = Path(SHARED or "")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "gpt2-bpe" / "tiktoken_cache"))
    path = folder / "corpus" / "simplewiki_sample.txt.xz"
    corpus = prepare(f"text:{path}", "gpt2", tmp_path / "out", processes=2)
    texts = [text.strip("\n") for text in lzma.decompress(path.read_bytes()).decode().split("<|endoftext|>\n")]
    encoding = tiktoken.get_encoding("gpt2")
    expected: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for text in filter(None, texts):
        expected[split_by_hash(text, 0.05, 0.05)] += [*encoding.encode_ordinary(text), 50256]
    for split, tokens in expected.items():
        assert np.array_equal(corpus.tokens(split).read(0, len(corpus.tokens(split))), tokens)


def test_a_python_without_documentation_is_refused(package: Path) -> None:
    for path in package.glob("m*.py"):
        path.unlink()
    with pytest.raises(UserError, match=rf"{package}.*\b1\b.*\b20\b"):
        python_documents(1)


def test_docstrings_that_a_file_adds_to_compiled_functions_are_documentation(tmp_path: Path) -> None:
    (tmp_path / "docs.py").write_text(
        '"""module"""\n'
        "from torch._C import _add_docstr as add_docstr\n"
        'add_docstr(torch.abs, r"""\n    abs(input) -> Tensor\n\n    The absolute value.\n    """.format(**args))\n'
        'add_newdoc("numpy", "ndarray", [("T", "The transposed array.")])\n'
        'other_call("no documentation at all")\n'
        'x = add_docstr("not a statement, so not taken")\n'
        'def f():\n    """function"""\n'
    )
    assert documentation(tmp_path / "docs.py") == (
        "module\n\nfunction\n\nabs(input) -> Tensor\n\nThe absolute value.\n\nThe transposed array."
    )


def test_private_folders_of_torch_and_all_tests_are_left_out(tmp_path: Path) -> None:
    for package in ("torch", "numpy"):
        for name in ("nn/a.py", "_inner/b.py", "_c.py", "tests/d.py", "nn/e.md", "nn/f.pyc"):
            path = tmp_path / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    found = {package: [path.name for path in documentation_files(tmp_path / package)] for package in ("torch", "numpy")}
    assert found == {"torch": ["_c.py", "a.py", "e.md"], "numpy": ["_c.py", "b.py", "a.py", "e.md"]}
