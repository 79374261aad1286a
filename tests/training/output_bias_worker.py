"""Runs with an output bias on two ranks, each uninterrupted, and again stopped and resumed.

Usage: python output_bias_worker.py CORPUS FOLDER
"""

import multiprocessing
import os
import sys
from pathlib import Path

from parallel_worker import next_port, stopped, train
from small_runs import small_config

RANKS = 2


def main(rank: int, corpus: Path, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for mode in ("ddp", "fsdp2"):
        for kind in ("unigram", "learned"):
            config = small_config(corpus, model={"output_bias": kind}, training={"parallel": mode})
            train(config, folder / f"{mode}-{kind}")
            stopped(config, folder / f"{mode}-{kind}-resumed", step=5)
            train(config, folder / f"{mode}-{kind}-resumed", resume=True)


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(next_port(40_000 + os.getpid() % 10_000))}
    os.environ["WORLD_SIZE"] = str(RANKS)
    fork = multiprocessing.get_context("fork")
    arguments = Path(sys.argv[1]), Path(sys.argv[2])
    children = [fork.Process(target=main, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))
