"""Print how much of the test split of a corpus also occurs in its training text:

    python docs/results/text_overlap.py data/enwiki

Splits share no document, but pages quote each other, and a text of several years has several versions of a page. A
token counts if a window of consecutive tokens around it occurs in the training text, too.

Legend: N tokens of the test split; n tokens of a window.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coupled_adam.data.corpus import open_corpus

CHUNK = 2**22  # tokens read at once
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # any odd number
UInt64 = npt.NDArray[np.uint64]


def window_hashes(tokens: npt.NDArray[np.int64], keys: UInt64, window: int) -> UInt64:
    """A polynomial hash modulo 2^64 of every window, (N - n + 1,)."""
    count = max(len(tokens) - window + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for shift in range(window):
        hashes = hashes * MULTIPLIER + keys[tokens[shift : shift + count]]
    return hashes


def share_in_training_text(folder: Path, window: int) -> tuple[int, float]:
    """Size of the test split, and the share of its tokens in a window that occurs in the training text."""
    corpus = open_corpus(folder)
    keys = np.random.default_rng(0).integers(2**64, size=corpus.vocabulary_size, dtype=np.uint64)
    test, train = corpus.tokens("test"), corpus.tokens("train")
    own = window_hashes(test.read(0, len(test)), keys, window)
    known = np.unique(own)
    found = np.zeros(len(known), dtype=bool)
    for start in range(0, len(train) - window + 1, CHUNK):
        hashes = window_hashes(train.read(start, min(CHUNK + window - 1, len(train) - start)), keys, window)
        places = np.searchsorted(known, hashes).clip(max=len(known) - 1)
        found[places[known[places] == hashes]] = True
    starts = np.flatnonzero(found[np.searchsorted(known, own)])
    is_known = np.zeros(len(test), dtype=bool)
    is_known[starts[:, None] + np.arange(window)] = True
    return len(test), float(is_known.mean())


def main() -> None:
    """Print the share for each folder."""
    parser = argparse.ArgumentParser(description="How much of a test split also occurs in its training text.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders written by `coupled-adam data prepare`")
    parser.add_argument("--window", type=int, default=20, help="tokens of a window (default: %(default)s)")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        size, share = share_in_training_text(folder, arguments.window)
        print(f"{folder}: {100 * share:.1f}% of {size:,} test tokens are in {arguments.window} tokens of training text")


if __name__ == "__main__":
    main()
