"""Download the word-similarity benchmarks into the user's cache.

Six small files at fixed commits of two public repositories, each checked against its SHA-256: SimLex-999 and
WordSim-353 from gensim's test data, the others from the collection behind wordvectors.org.
"""

from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.errors import UserConnectionError
from coupled_adam.base.extras import require
from coupled_adam.embeddings.word_pairs import WordPairs, load_word_pairs


@dataclass(frozen=True)
class BenchmarkFile:
    """A file to download."""

    name: str
    url: str
    sha256: str


DOWNLOAD = "download"
"""Value instead of a folder of benchmarks, to download and cache them."""
RAW = "https://raw.githubusercontent.com"
GENSIM = f"{RAW}/piskvorky/gensim/57b3f68b18074a894585106bb4267031619b1350/gensim/test/test_data"
WORD_VECTORS = f"{RAW}/mfaruqui/eval-word-vectors/09a5106f50818c0f4ad0a597d8c7d333ec0659fb/data/word-sim"
SOURCES = tuple(
    BenchmarkFile(name, f"{folder}/{name}", sha256)
    for folder, name, sha256 in (
        (GENSIM, "simlex999.txt", "d5e0501971478a511430ee880bd0121e94ac701ba86d90544d83e6d2ba3db05d"),
        (GENSIM, "wordsim353.tsv", "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d"),
        (WORD_VECTORS, "EN-WS-353-SIM.txt", "f1da938998863c94e53f72f984a5c6e215f0b46c323aae8f0f4930703a339107"),
        (WORD_VECTORS, "EN-WS-353-REL.txt", "66a7c88100624d0a391605ff61ce84e11d11ee620d51ec0298da49592838f8fa"),
        (WORD_VECTORS, "EN-MEN-TR-3k.txt", "888b13580faa362c7b11da0a670258cf1b1eb4bf0ecbcd418918729a3bd3f43a"),
        (WORD_VECTORS, "EN-RW-STANFORD.txt", "5108d54dfc746f44f9c3d7e31d2857c37cf71430bc1594175a61a3b89bb0ae1f"),
    )
)


def word_pairs_of(place: str | Path, remedy: str) -> dict[str, WordPairs]:
    """Load the benchmarks that a setting names.

    Args:
        place: a folder of benchmarks, or "download" for those of `fetch_word_pairs`. A folder of that name takes
            precedence.
        remedy: how to pass a folder instead, if they cannot be downloaded, such as "pass --wordsim DIR".
    """
    is_download = str(place) == DOWNLOAD and not Path(place).is_dir()
    return fetch_word_pairs(remedy) if is_download else load_word_pairs(place)


def fetch_word_pairs(remedy: str = "read them with load_word_pairs(folder)") -> dict[str, WordPairs]:
    """Download SimLex-999, MEN, WordSim-353 (all, similarity, relatedness) and RW, and read them.

    They are cached in the user's cache folder, or in the folder COUPLED_ADAM_CACHE.

    Args:
        remedy: what to do with a folder of the files, if they cannot be downloaded.

    Returns:
        The benchmarks by name, as from `load_word_pairs`.
    """
    pooch = require("pooch", "study", "to download the word-similarity benchmarks")
    store = pooch.create(
        path=pooch.os_cache("coupled-adam"),
        base_url="",
        registry={source.name: f"sha256:{source.sha256}" for source in SOURCES},
        urls={source.name: source.url for source in SOURCES},
        env="COUPLED_ADAM_CACHE",
    )
    store.path = Path(store.path) / "word-pairs"
    for source in SOURCES:
        try:
            store.fetch(source.name)
        except OSError as error:  # includes the errors of requests without a network
            raise UserConnectionError(
                f"word pairs: {source.url} could not be downloaded ({type(error).__name__}). Connect to the internet, "
                f"or put the benchmark files into a folder and {remedy}; the cache is {store.path}"
            ) from error
    return load_word_pairs(store.path)
