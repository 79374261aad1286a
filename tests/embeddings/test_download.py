"""Downloads from a local server: caching, hash checks, and the message without a network."""

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coupled_adam.embeddings import download, fetch_word_pairs
from coupled_adam.embeddings.download import SOURCES, BenchmarkFile

pooch = pytest.importorskip("pooch")
PAIRS = b"sun sunlight 50.0\nriver water 49.0\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """Serves MEN and SimLex-999; the cache is empty."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name in ("men.txt", "simlex999.txt"):
        (folder / name).write_bytes(PAIRS)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    sources = tuple(
        BenchmarkFile(name, f"{root}/{name}", sha256(folder / name)) for name in ("men.txt", "simlex999.txt")
    )
    monkeypatch.setattr(download, "SOURCES", sources)
    monkeypatch.setenv("COUPLED_ADAM_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_are_downloaded_once_and_read(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    found = fetch_word_pairs()
    assert set(found) == {"MEN", "SimLex-999"}
    assert found["MEN"].pairs == (("sun", "sunlight"), ("river", "water"))
    server.shutdown()
    server.server_close()
    assert fetch_word_pairs() == found
    assert (tmp_path / "cache" / "word-pairs" / "simlex999.txt").is_file()


def test_without_a_network_the_message_says_what_to_do(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError, match=r"\bmen\.txt\b.*load_word_pairs\(folder\)"):
        fetch_word_pairs()


def test_a_changed_file_is_refused(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "served" / "simlex999.txt").write_bytes(b"other")
    with pytest.raises(ValueError, match="hash"):
        fetch_word_pairs()


def test_without_pooch_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"^pooch .*pip install .*\[study\]'"):
        fetch_word_pairs()


def test_every_source_is_pinned() -> None:
    for source in SOURCES:
        assert len(bytes.fromhex(source.sha256)) == 32
        assert source.url.startswith("https://")
        assert any(len(part) >= 40 for part in source.url.split("/")), "no commit or content hash in the address"


def test_the_sources_provide_all_six_benchmarks() -> None:
    """If this project's data is available, the hashes of four files are compared with it."""
    assert {source.name for source in SOURCES} == {
        "simlex999.txt",
        "wordsim353.tsv",
        "EN-WS-353-SIM.txt",
        "EN-WS-353-REL.txt",
        "EN-MEN-TR-3k.txt",
        "EN-RW-STANFORD.txt",
    }
    data = os.environ.get("COUPLED_ADAM_TEST_DATA")
    if not data:
        pytest.skip("COUPLED_ADAM_TEST_DATA is not set")
    for source in SOURCES:
        if source.name.startswith("EN-"):
            copy = Path(data) / "wordsim" / source.name.removeprefix("EN-").replace(".txt", ".tsv")
            assert sha256(copy) == source.sha256
