"""Fork the ranks of every scenario after the imports, one scenario after the other.

A fork starts clean and at once, and a rank that fails or hangs does not affect the next scenario. The outcome of a rank
is a file, `<ranks>/<scenario>.rank<r>`: "ok" or the traceback.

Usage: python worker.py FOLDER [SCENARIO ...]
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

# Checkpoints and the first DTensor import these; do it here once instead of in every fork.
import fsspec  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from scenarios import LAUNCHES, scenarios_on

SECONDS_PER_SCENARIO = 40  # they take about one


def run_rank(name: str, scenario: Callable[[], None], folder: Path, rank: int, ranks: int) -> None:
    # As set by torchrun.
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
        # A rank that exits early closes connections on which others may still wait.
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    os._exit(0)  # a failed rank must not wait for the others, as the destructors of its process groups would


def main() -> None:
    faulthandler.enable()  # a rank that crashes writes its stack to the log
    fork = multiprocessing.get_context("fork")
    gc.freeze()  # otherwise every fork soon owns a copy of all imported modules
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
            for rank, child in enumerate(children):
                child.join(max(0, deadline - time.monotonic()))
                if child.exitcode:  # a crash leaves no traceback; a rank that hangs has no exit code
                    (folder / f"{name}.rank{rank}").write_text(f"exit code {child.exitcode}")
                child.kill()


if __name__ == "__main__":
    main()
