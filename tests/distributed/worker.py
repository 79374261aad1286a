"""The ranks of every scenario: this script forks them after the imports, one scenario after the other.

A fork starts clean and at once, and when one rank of a scenario fails or hangs, the next scenario is not disturbed. A
rank's outcome is a file, `<ranks>/<scenario>.rank<r>`: "ok" or the traceback.

Usage: python worker.py FOLDER [SCENARIO ...]
"""

import contextlib
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

# What checkpoints and the first DTensor ask for; better here once than in every fork.
import fsspec  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from scenarios import LAUNCHES, scenarios_on

SECONDS_PER_SCENARIO = 40  # they take about one


def run_rank(name: str, scenario: Callable[[], None], folder: Path, rank: int, ranks: int) -> None:
    # As torchrun would have it.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    outcome = "ok"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}.store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS_PER_SCENARIO / 2),
        )
        scenario()
    except BaseException:
        outcome = traceback.format_exc()
    (folder / f"{name}.rank{rank}").write_text(outcome)
    if outcome == "ok":
        # Who leaves early closes connections on which others may still be waiting.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    os._exit(0)  # a rank that failed must not wait for the others, as the destructors of its process groups would


def main() -> None:
    fork = multiprocessing.get_context("fork")
    gc.freeze()  # else every fork soon owns a copy of all that was imported
    for ranks in LAUNCHES:
        folder = Path(sys.argv[1]) / str(ranks)
        folder.mkdir()
        for name, scenario in scenarios_on(ranks).items():
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            children = [fork.Process(target=run_rank, args=(name, scenario, folder, r, ranks)) for r in range(ranks)]
            for child in children:
                child.start()
            deadline = time.monotonic() + SECONDS_PER_SCENARIO
            for child in children:
                child.join(max(0, deadline - time.monotonic()))
                child.kill()


if __name__ == "__main__":
    main()
