"""Fork the ranks of every scenario after the imports, one scenario after the other.

A fork starts clean and at once, and a rank that fails or hangs does not affect the next scenario. The outcome of a rank
is a file, `<ranks>/<scenario>.rank<r>`: "ok" or the traceback.

A scenario of which a rank crashes runs once more: about one of a thousand ends with a corrupted heap in a thread of
gloo (torch 2.13; seen in `gloo::allgather` for a DTensor). No compiled code of this project runs there, because the
tables are too small for it, and Python code fails with a traceback, which is never repeated. The stack of every crash
is kept in `<ranks>/<scenario>.crash<n>`.

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
ATTEMPTS = 2  # of a scenario of which a rank crashes


def run_rank(name: str, scenario: Callable[[], None], folder: Path, rank: int, ranks: int) -> None:
    # As set by torchrun.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    faulthandler.enable((folder / f"{name}.rank{rank}.stack").open("w"))  # a crash leaves no traceback
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


def run_ranks(name: str, scenario: Callable[[], None], folder: Path, ranks: int) -> list[str]:
    """Run a scenario on all its ranks. Return the crashes, each with the rank, the exit code and the stack."""
    for leftover in folder.glob(f"{name}.[rs]*"):  # outcomes and the store of an earlier attempt
        leftover.unlink()
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=run_rank, args=(name, scenario, folder, r, ranks)) for r in range(ranks)]
    for child in children:
        child.start()
    deadline = time.monotonic() + SECONDS_PER_SCENARIO
    crashes = []
    for rank, child in enumerate(children):
        child.join(max(0, deadline - time.monotonic()))
        if child.exitcode:  # a rank that hangs has no exit code
            stack = (folder / f"{name}.rank{rank}.stack").read_text()
            crashes.append(f"rank {rank}: exit code {child.exitcode}\n{stack}")
            (folder / f"{name}.rank{rank}").write_text(crashes[-1])
        child.kill()
    return crashes


def main() -> None:
    gc.freeze()  # otherwise every fork soon owns a copy of all imported modules
    for ranks in LAUNCHES:
        folder = Path(sys.argv[1]) / str(ranks)
        folder.mkdir()
        for name, scenario in scenarios_on(ranks).items():
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            for attempt in range(ATTEMPTS):
                crashes = run_ranks(name, scenario, folder, ranks)
                if not crashes:
                    break
                (folder / f"{name}.crash{attempt}").write_text("\n".join(crashes))


if __name__ == "__main__":
    main()
