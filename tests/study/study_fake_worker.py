"""A stand-in for a worker process: answers tasks at once, as the name of the optimizer says.

Each task is written to `task.json` in the run folder, with the id of the process.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from coupled_adam.models.model_config import parameter_count
from coupled_adam.study.cell import Task, write_error
from coupled_adam.study.results import Result, write_evaluation


def do(task: Task) -> tuple[str, str, bool]:
    """Status, message, and whether the process ends afterwards."""
    task.folder.mkdir(parents=True, exist_ok=True)
    first = not (task.folder / "task.json").exists()
    record = {**task.to_json(), "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "at": time.time()}
    (task.folder / "task.json").write_text(json.dumps(record))
    kind = task.cell.optimizer
    if kind == "dies" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exits" and first:
        print("no room left", file=sys.stderr)
        os._exit(3)
    if kind == "fails" and first:
        write_error(task.folder, "the loss is nan")
        return "failed", "the loss is nan", False
    if kind == "crashes" and first:
        write_error(task.folder, "RuntimeError: no")
        return "failed", "RuntimeError: no", True
    if kind == "slow":
        time.sleep(60)
    if kind == "late":
        time.sleep(0.6)
    write_evaluation(result_of(task))
    return "finished", "", False


def result_of(task: Task) -> Result:
    cell, config = task.cell, task.cell.config
    return Result(
        study=task.study,
        cell=cell.id,
        seed=cell.seed,
        optimizer=cell.optimizer,
        settings=config.optimizer.model_dump() | {"tied": config.model.tied},
        model=cell.model,
        parameters=parameter_count(config.to_model_config()),
        tokens=config.training.tokens,
        metrics={"loss": 1.0, "train_loss": 1.0, "iso": 0.5},
        seconds=1.0,
        tokens_per_second=None,
        energy_joules=None,
        config_hash=cell.config_hash,
        package="0",
        commit=None,
        torch="0",
        device="cpu",
        run=cell.run.as_posix(),
        folder=task.study_folder,
    )


def main() -> None:
    # As in the real worker: a shell that starts tests in the background leaves SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for line in sys.stdin:
            status, message, is_last = do(Task.from_json(json.loads(line)))
            print(json.dumps({"status": status, "message": message, "is_last": is_last}), flush=True)
            if is_last:
                time.sleep(0.3)
                sys.exit(1)
    except KeyboardInterrupt:
        print(json.dumps({"status": "stopped", "message": "", "is_last": True}), flush=True)


if __name__ == "__main__":
    # The path of this file is in sys.argv, so the process can be found in the process list.
    assert Path(sys.argv[0]).name == "study_fake_worker.py"
    main()
