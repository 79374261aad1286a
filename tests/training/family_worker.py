"""Small runs with members of the family of second moments, on two forked ranks, one after the other.

Usage: python family_worker.py CORPUS FOLDER
"""

import os
import sys
from pathlib import Path

from parallel_worker import fork_ranks, stopped, train
from small_runs import small_config

from coupled_adam.config.toml_writing import to_toml

OPTIMIZERS = {
    "partial": {"row_exponent": 0.25, "mean_free": True},
    "annealed": {"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": 8},
    "per-row": {"row_exponent": 1.0, "column_exponent": 0.0},
}
MODES = ("ddp", "fsdp2")


def main() -> None:
    corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for mode in MODES:
        for name, optimizer in OPTIMIZERS.items():
            train(small_config(corpus, training={"parallel": mode}, optimizer=optimizer), folder / f"{mode}-{name}")
        annealed = small_config(corpus, training={"parallel": mode}, optimizer=OPTIMIZERS["annealed"])
        stopped(annealed, folder / f"{mode}-resumed", step=5)
        train(annealed, folder / f"{mode}-resumed", resume=True)
    # Coupled Adam until a signal; then the config in the folder is edited, as a user would.
    common = {"training": {"parallel": "fsdp2"}, "checkpoints": {"keep": 9}}
    stopped(small_config(corpus, **common), folder / "fsdp2-switched", step=5)
    switched = small_config(corpus, **common, optimizer={"row_exponent": 0.25})
    if os.environ["RANK"] == "0":
        (folder / "fsdp2-switched" / "config.toml").write_text(to_toml(switched))
    train(switched, folder / "fsdp2-switched", resume=True)


if __name__ == "__main__":
    fork_ranks(2, main)
