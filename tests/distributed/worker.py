"""Run by torchrun, once per rank: every scenario for this number of ranks, one after the other.

Each scenario runs in a child that is forked after the imports: it starts clean, and when one rank of it fails or hangs,
the next scenario is not disturbed. A rank's outcome is a file, `<scenario>.rank<r>`: "ok" or the traceback.

Usage: torchrun --nproc-per-node N worker.py FOLDER [SCENARIO ...]
"""

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from scenarios import scenarios_on

SECONDS_PER_SCENARIO = 40  # they take about one


def run_scenario(name: str, scenario: Callable[[], None], folder: Path) -> None:
    rank = int(os.environ["RANK"])
    outcome = "ok"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}.store",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
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
    folder = Path(sys.argv[1])
    for name, scenario in scenarios_on(int(os.environ["WORLD_SIZE"])).items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        child = multiprocessing.get_context("fork").Process(target=run_scenario, args=(name, scenario, folder))
        child.start()
        child.join(SECONDS_PER_SCENARIO)
        child.kill()


if __name__ == "__main__":
    main()
