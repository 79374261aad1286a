"""A stand-in for a worker process of a study that selects a learning rate: the validation loss of a run follows from
its learning rate and the name of its optimizer, which contains the best learning rate, such as "best 0.002"."""

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from study_fake_worker import result_of

from coupled_adam.config.builtin_files import CONFIG_FILE
from coupled_adam.config.run_config import to_toml
from coupled_adam.study.cell import Task, write_error
from coupled_adam.study.results import Result, write_evaluation

FAILS_ONCE = "fails"


def selecting_result(task: Task) -> Result:
    """A result whose validation loss is smallest at the learning rate in the optimizer's name; no loss if the name has
    "diverges"."""
    name, lr = task.cell.optimizer, task.cell.config.optimizer.lr
    loss = None if name.startswith("diverges") else 3.0 + abs(math.log2(lr / float(name.split(" ")[-1])))
    metrics = {"train_loss": loss, "val_loss": loss}
    if not task.cell.is_candidate:
        metrics |= {"loss": 2.0 + lr, "iso": 0.5}
    return replace(result_of(task), metrics=metrics, trial=task.cell.trial)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        task = Task.from_json(json.loads(line))
        task.folder.mkdir(parents=True, exist_ok=True)
        first = not (task.folder / "task.json").exists()
        (task.folder / CONFIG_FILE).write_text(to_toml(task.cell.config))
        (task.folder / "task.json").write_text(json.dumps({**task.to_json(), "pid": os.getpid()}))
        status, message = "finished", ""
        if task.cell.optimizer.startswith(FAILS_ONCE) and task.cell.is_candidate and first:
            write_error(task.folder, "no memory")
            status, message = "failed", "no memory"
        else:
            write_evaluation(selecting_result(task))
        print(json.dumps({"status": status, "message": message, "is_last": False}), flush=True)


if __name__ == "__main__":
    main()
