"""Start a run, kill -9 it at a random moment, resume it; twelve times, then let it finish.

Each attempt is a child forked after the imports: a separate process that starts at once.

Usage: kill_worker.py CORPUS FOLDER
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch._inductor.config  # noqa: F401 - what a run asks for first; better here once than in every fork
from small_runs import small_config, train

from coupled_adam.config.run_sections import CheckpointSection

KILLS = 12
STEPS = 600  # all kills come within the first half of them


def main() -> None:
    corpus, folder = Path(sys.argv[1]), Path(sys.argv[2])
    config = small_config(
        corpus,
        training={"tokens": STEPS * 8 * 16, "threads": 1},
        checkpoints={"every": 7, "keep": 2},
        log={"monitor_every": 50, "every": 3},
    )
    train_in_child = lambda: train(config, folder, resume=True)  # noqa: E731
    moments = random.Random(0)
    killed = 0
    while killed < KILLS:
        child = fork(train_in_child)
        if killed % 2:
            # Not some seconds: beside other busy processes they may be too short for a checkpoint.
            wait_for_rows(folder / "metrics.jsonl", moments.randint(3, 12))
            time.sleep(moments.uniform(0.0, 0.05))  # several steps, and a part of one
        else:  # it may die before its first step
            time.sleep(moments.uniform(0.0, 0.2))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert os.WEXITSTATUS(status) == 0, "a resumed run failed"
        break  # it was quicker
    print(f"killed {killed} times, {len(list((folder / 'checkpoints').glob('step-*')))} checkpoints")
    _, status = os.waitpid(fork(train_in_child), 0)
    assert status == 0, "the last run failed"
    undisturbed = config.model_copy(update={"checkpoints": CheckpointSection(every=None)})
    _, status = os.waitpid(fork(lambda: train(undisturbed, folder.with_name("undisturbed"))), 0)
    assert status == 0, "the undisturbed run failed"


def wait_for_rows(metrics: Path, rows: int) -> None:
    """Wait until the run has logged so many rows: at its start it discards rows after its checkpoint."""
    started = time.time()
    while not metrics.exists() or os.stat(metrics).st_mtime < started:
        time.sleep(0.005)
    wanted = metrics.read_bytes().count(b"\n") + rows
    while metrics.read_bytes().count(b"\n") < wanted:
        time.sleep(0.005)


def fork(action: object) -> int:
    child = os.fork()
    if child:
        return child
    try:
        action()  # type: ignore[operator]
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
