"""Small runs with every kind of parallelism, one after the other, each in its own folder.

Started by torchrun once per rank, or with a number of ranks, which are then forked after the imports and start at once.

Usage: torchrun --nproc-per-node N parallel_worker.py CORPUS FOLDER
       python parallel_worker.py CORPUS FOLDER RANKS
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import small_runs
import torch._inductor.config  # noqa: F401 - what the first run asks for; better here once than in every fork
from small_runs import small_config

from coupled_adam.config.run_config import Config
from coupled_adam.training.rank_batches import MicroBatch, RankBatches


def train(config: Config, folder: Path, *, resume: bool = False) -> None:
    """One run, with its own port: torchrun's store remembers the addresses of the previous run."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(next_port(int(os.environ["MASTER_PORT"])))
    small_runs.train(config, folder, resume=resume)


def next_port(port: int) -> int:
    """Another port, the same on all ranks, below the range of ephemeral ports."""
    return port + 1 if port < 32768 else 10_000 + port % 20_000


def stopped(config: Config, folder: Path, step: int) -> None:
    """Run until the first rank, and only that one, gets a signal."""
    read = RankBatches.micro_batches

    def micro_batches(self: RankBatches, asked: int) -> list[MicroBatch]:
        if asked == step and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, asked)

    RankBatches.micro_batches = micro_batches  # type: ignore[method-assign]
    try:
        train(config, folder)
    finally:
        RankBatches.micro_batches = read  # type: ignore[method-assign]


def main() -> None:
    corpus, folder, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    ddp, fsdp2 = {"parallel": "ddp"}, {"parallel": "fsdp2"}
    train(small_config(corpus, training=ddp), folder / f"ddp-{ranks}")
    train(small_config(corpus, training=fsdp2), folder / f"fsdp2-{ranks}")
    if ranks == 2:
        train(small_config(corpus, training={**ddp, "micro_batch_size": 2}), folder / "ddp-accumulated-2")
        train(small_config(corpus, training={**fsdp2, "micro_batch_size": 2}), folder / "fsdp2-accumulated-2")
        for mode in ("ddp", "fsdp2"):
            bf16 = {"parallel": mode, "precision": "bf16"}
            train(small_config(corpus, training=bf16, log={"val_every": 3}), folder / f"{mode}-bf16-2")
        for name, optimizer in OPTIMIZERS.items():
            train(small_config(corpus, training=fsdp2, optimizer=optimizer), folder / f"fsdp2-{name}-2")
        train(
            small_config(corpus, training=fsdp2, model={"architecture": "llama", "tied": False}),
            folder / "fsdp2-llama-2",
        )
        for mode in ("ddp", "fsdp2"):
            config = small_config(corpus, training={"parallel": mode})
            stopped(config, folder / f"{mode}-resumed-2", step=5)
            train(config, folder / f"{mode}-resumed-2", resume=True)
        stopped(small_config(corpus, training=fsdp2), folder / "moved", step=5)
    else:
        train(small_config(corpus, training=fsdp2), folder / "moved", resume=True)


def fork_ranks(ranks: int, main: Callable[[], None]) -> NoReturn:
    """Run `main` on ranks of this machine, with the environment that torchrun would give them, and exit."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}

    def run_rank(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        main()

    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=run_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(max(abs(child.exitcode or 0) for child in children))


OPTIMIZERS = {
    "adamw": {"embeddings": "adamw"},
    "sgd": {"embeddings": "sgd", "sgd_factor": 20.0},
    "centred": {"embeddings": "adamw", "centre": True},
}

if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        fork_ranks(int(sys.argv[3]), main)
