"""Runs with an output bias on two ranks, each uninterrupted, and again stopped and resumed.

Usage: python output_bias_worker.py CORPUS FOLDER
"""

import sys
from pathlib import Path

from parallel_worker import fork_ranks, stopped, train
from small_runs import small_config


def main() -> None:
    corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for mode in ("ddp", "fsdp2"):
        for kind in ("unigram", "learned"):
            config = small_config(corpus, model={"output_bias": kind}, training={"parallel": mode})
            train(config, folder / f"{mode}-{kind}")
            stopped(config, folder / f"{mode}-{kind}-resumed", step=5)
            train(config, folder / f"{mode}-{kind}-resumed", resume=True)


if __name__ == "__main__":
    fork_ranks(2, main)
