"""Tokenizers: GPT-2's, a tokenizer.json, a trained one; their separators; and the worker processes that run them."""

import os
import signal
import subprocess
import sys
import time
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
from data_corpora import documents, write_tokenizer
from data_failing_worker import failing

from coupled_adam.base.errors import UserConnectionError, UserError, UserOSError
from coupled_adam.byte_level_bpe import train_bpe
from coupled_adam.data.encoding import encoder, joined, packer
from coupled_adam.data.prepare import prepare
from coupled_adam.data.settings import bpe_size
from coupled_adam.data.workers import Workers
from coupled_adam.tokenizer import GPT2, Tokenizer, open_tokenizer, tokenizer_path

SHARED = os.environ.get("COUPLED_ADAM_TEST_DATA")
with_shared = pytest.mark.skipif(SHARED is None, reason="COUPLED_ADAM_TEST_DATA names no folder with GPT-2's files")


def test_a_trained_tokenizer_has_the_requested_size_and_decodes_to_the_original_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Reference

    train_bpe(documents(200), 400, tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.size == 400
    reference = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert reference.id_to_token(tokenizer.separator) == "<|endoftext|>"
    for text in ["never seen: ζ\x00\n\n\t  \r\n", *documents(20, seed=1)]:
        assert reference.decode(reference.encode(text).ids, skip_special_tokens=False) == text
    assert len(reference.encode(documents(1, seed=5)[0]).ids) < len(documents(1, seed=5)[0].encode()) / 2


def test_the_same_texts_train_the_same_file_on_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, parallel in enumerate(["false", "true", "true", "true", "true"]):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        train_bpe(iter(documents(400)), 600, tmp_path / str(number))
        assert (tmp_path / str(number)).read_bytes() == (tmp_path / "0").read_bytes()


def test_the_separators_text_inside_a_document_does_not_end_it(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    found = encoder(tokenizer)([("train", "a <|endoftext|> b<|endoftext|>", True), ("val", "<|endoftext|>", False)])
    assert found["train"].tokens.tolist().count(tokenizer.separator) == 1
    assert found["train"].tokens[-1] == tokenizer.separator
    assert found["train"].documents == 1
    assert tokenizer.separator not in found["val"].tokens
    assert found["val"].documents == 0


def test_the_separator_is_found_by_its_usual_names_or_named(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    assert open_tokenizer(path).separator == 1
    assert open_tokenizer(path, "<pad>").separator == 0
    with pytest.raises(UserError, match=r"tokenizer.json: .*<eod>.*--separator"):
        open_tokenizer(path, "<eod>")
    path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    assert open_tokenizer(path).separator == 1
    path.write_text(path.read_text().replace("</s>", "<stop>"))
    assert open_tokenizer(path).separator is None
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(UserError, match="--separator"):
        prepare(f"text:{tmp_path / 'text.txt'}", str(path), tmp_path / "out")


def test_the_vocabulary_reaches_to_the_highest_number_even_with_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Library(WordLevel({"a": 0, "<far>": 70000}, unk_token="a")).save(str(path))
    tokenizer = open_tokenizer(path, "<far>")
    assert (tokenizer.size, tokenizer.separator, tokenizer.dtype) == (70001, 70000, "uint32")
    assert encoder(tokenizer)([("train", "", True)])["train"].tokens.tolist() == [70000]


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000])
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"/tokenizer\.json\b.*tokenizer\.json\b.*GGUF"):
        open_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("spec", ["bpe:", "bpe:x", "bpe:256", "bpe:-5", "bpe:1048577", "bpe:4096.0"])
def test_impossible_sizes_are_refused(spec: str) -> None:
    with pytest.raises(UserError, match=rf"'{spec}': .*bpe:N\b.*\b257\b.*\b1048576\b"):
        bpe_size(spec)


def test_tokens_are_escaped_so_that_they_cannot_control_a_terminal(tmp_path: Path) -> None:
    train_bpe(["\x1b[2J \n"] * 9 + ["日本" * 3], 280, tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    shown = tokenizer.printable_tokens(range(tokenizer.size))
    assert all(text.isprintable() for text in shown)
    assert any("\\x1b" in text for text in shown)
    assert "'<|endoftext|>'" in shown


@with_shared
def test_gpt2_tokens_match_its_published_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer as Reference

    folder = Path(SHARED or "", "gpt2-bpe")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "tiktoken_cache"))
    tokenizer = open_tokenizer("gpt2")
    assert (tokenizer.size, tokenizer.separator, tokenizer.dtype) == (50257, 50256, "uint16")
    reference = Reference.from_file(str(folder / "tokenizer.json"))
    texts = [*documents(30), "x" * 5000, " " * 300 + "\n" * 300]
    found = encoder(tokenizer)([("train", text, True) for text in texts])["train"]
    assert found.tokens.tolist() == [token for text in texts for token in [*reference.encode(text).ids, 50256]]
    # The same file, read by the other library.
    other = open_tokenizer(folder / "tokenizer.json")
    assert (other.size, other.separator) == (50257, 50256)
    assert np.array_equal(encoder(other)([("train", text, True) for text in texts])["train"].tokens, found.tokens)
    assert tokenizer.printable_tokens([262, 198, 50256, 447]) == ["' the'", "'\\n'", "'<|endoftext|>'", "'\\xe2\\x80'"]
    with pytest.raises(UserError, match=r"'</s>'.*gpt2.*<\|endoftext\|>"):
        open_tokenizer("gpt2", "</s>")


def test_gpt2_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(UserConnectionError, match=r"'gpt2'.*TIKTOKEN_CACHE_DIR"):
        open_tokenizer("gpt2")
    with pytest.raises(UserError, match=r"'gpt5'.*tiktoken.*\bgpt2\b"):
        open_tokenizer("gpt5")
    (tmp_path / "text.txt").write_text("some text")
    for name, kind in (("gpt2", ConnectionError), ("gpt5", ValueError)):
        with pytest.raises(kind, match=r"--tokenizer bpe:\d+"):
            prepare(f"text:{tmp_path / 'text.txt'}", name, tmp_path / "out")


def test_tokens_of_another_tokenizer_are_refused() -> None:
    tokenizer = GPT2
    assert packer(tokenizer)([("val", np.array([5, 6], "<u2"), True)])["val"].tokens.tolist() == [5, 6, 50256]
    with pytest.raises(UserError, match=r"token 50257\b.*gpt2\b.*\b50257 tokens.*--tokenizer"):
        joined([("train", [1, 50257], True)], tokenizer)


def test_workers_return_results_in_order_and_queue_a_bounded_amount() -> None:
    taken = []

    def items() -> object:
        for number in range(50):
            taken.append(number)
            yield str(number)

    with Workers(3, methodcaller, "zfill", 4) as workers:
        results = workers.map(items())
        assert next(results) == "0000"
        assert len(taken) == 6
        assert list(results) == [f"{number:04}" for number in range(1, 50)]


def test_what_a_worker_raises_or_prints_reaches_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Workers(2, failing, "no") as workers:
        assert list(workers.map(["print", "print"])) == ["printed", "printed"]
    with pytest.raises(ValueError, match="no: way"), Workers(2, failing, "no") as workers:
        list(workers.map(["way", "way"]))
    ended = r"exit code 7\b.*--processes"
    with pytest.raises(UserOSError, match=ended), Workers(2, failing, "no") as workers:
        list(workers.map(["exit"]))
    with pytest.raises(UserError, match=r"processes\b.* 0\b"):
        Workers(0, failing, "no")


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import time; from operator import methodcaller; from coupled_adam.data.workers import Workers\n"
        "with Workers(2, methodcaller, 'upper') as workers:\n"
        "    list(workers.map('abcd'))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = Path(f"/proc/{parent.pid}/task").glob("*/children")
    workers = [int(pid) for path in children for pid in path.read_text().split()]
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "(Z)" not in _state(pid) for pid in workers):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return f"({Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]})"
    except OSError:
        return "(Z)"


def test_a_worker_loads_no_torch() -> None:
    """It would cost each worker seconds, and gigabytes on machines with a GPU."""
    code = "import sys, coupled_adam.data.encoding, coupled_adam.data.workers, coupled_adam.data.python_docs\n"
    code += "assert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [257, 2**16 - 1, 2**16, 2**16 + 1])
def test_tokens_take_two_bytes_if_the_highest_fits(size: int) -> None:
    fits = size - 1 <= np.iinfo(np.uint16).max
    assert Tokenizer("json", "tokenizer.json", size, None).dtype == ("uint16" if fits else "uint32")


def test_gpt2_means_the_tokenizer_even_if_a_folder_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert tokenizer_path("gpt2") is None
    write_tokenizer(tmp_path / "gpt2" / "tokenizer.json")
    assert tokenizer_path("gpt2") is None
    assert tokenizer_path("./gpt2") == Path("gpt2/tokenizer.json")


@pytest.mark.parametrize("size", [256, 2**20 + 1])
def test_a_tokenizer_too_small_for_all_bytes_and_the_separator_is_not_trained(size: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"bpe:{size}"):
        train_bpe(documents(3), size, tmp_path / "tokenizer.json")
    assert not list(tmp_path.iterdir())
