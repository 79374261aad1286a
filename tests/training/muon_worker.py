"""Small runs whose matrices are trained by Muon, on two forked ranks, one after the other.

Usage: python muon_worker.py CORPUS FOLDER
"""

import sys
from pathlib import Path

from parallel_worker import fork_ranks, stopped, train
from small_runs import small_config

MUON = {"matrices": "muon", "tables": {"lr_factor": 2.0}}
MODES = ("ddp", "fsdp2")


def main() -> None:
    corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for mode in MODES:
        config = small_config(corpus, training={"parallel": mode}, optimizer=MUON)
        train(config, folder / mode)
        stopped(config, folder / f"{mode}-resumed", step=5)
        train(config, folder / f"{mode}-resumed", resume=True)


if __name__ == "__main__":
    fork_ranks(2, main)
