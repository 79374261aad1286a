"""Small studies for the tests of runner and command, and functions to run and to interrupt them."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import small_config, write_corpus

from coupled_adam.config.run_config import to_toml
from coupled_adam.config.study_config import Study, load_study
from coupled_adam.data.manifest import MANIFEST_FILE, Shard, Split, read_manifest, write_manifest
from coupled_adam.study.cell import Task, run_cell
from coupled_adam.study.expansion import Cell, cells_of, chosen
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.launchers import Ended
from coupled_adam.study.results import Result
from coupled_adam.study.runner import StudyOutcome, run_study
from coupled_adam.study.study_display import StudyDisplay

SELECTING_WORKER = (sys.executable, str(Path(__file__).with_name("study_selecting_worker.py")))
FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("study_fake_worker.py")))
COMMAND = [sys.executable, "-c", "from coupled_adam.commands.study import app; app()"]
# Real runs that sleep, so that there is time to interrupt them without using the CPU.
SLOW_WORKER = """
import time
from coupled_adam.study import worker
from coupled_adam.training.train_step import TrainStep

call = TrainStep.__call__

def slow(self, *arguments):
    time.sleep(0.02)
    return call(self, *arguments)

TrainStep.__call__ = slow
worker.main()
"""
SLOW_COMMAND = [
    sys.executable,
    "-c",
    f"from coupled_adam.study import launchers; launchers.WORKER = ({sys.executable!r}, '-c', {SLOW_WORKER!r}); "
    "from coupled_adam.commands.study import app; app()",
]
CHANGES_WITH_TIME = ("seconds", "tokens_per_second", "energy_joules", "study", "folder")

SELECT = '[select]\nvalues = { "optimizer.lr" = [1e-3, 2e-3, 4e-3] }\n'
ADAMW = '[[optimizers]]\nembeddings = "adamw"\n'
COUPLED = '[[optimizers]]\nembeddings = "coupled"\n'
UNTIED = '[[optimizers]]\nname = "untied"\nembeddings = "coupled"\ncouple = "all"\nset = { "model.tied" = false }\n'
BROKEN = '[[optimizers]]\nname = "broken"\nembeddings = "adamw"\nset = { "optimizer.lr" = 1e30 }\n'


def optimizers(*names: str, more: str = "") -> str:
    """Entries with these names, all with AdamW."""
    return "".join(f'[[optimizers]]\nname = "{name}"\nembeddings = "adamw"\n{more}' for name in names)


def study_corpus(folder: Path) -> Path:
    """The small corpus with a test split."""
    write_corpus(folder)
    tokens = np.fromfile(folder / "val.bin", np.uint16)[:203]
    tokens.tofile(folder / "test.bin")
    manifest = read_manifest(folder / MANIFEST_FILE)
    split = Split(tokens=len(tokens), shards=[Shard(file="test.bin", tokens=len(tokens))])
    write_manifest(folder / MANIFEST_FILE, manifest.model_copy(update={"splits": {**manifest.splits, "test": split}}))
    return folder


def write_study(folder: Path, optimizers: str, *, steps: int = 12, more: str = "", **sections: dict[str, Any]) -> Path:
    """Write a study of small models with two seeds, and its base config."""
    corpus = folder / "corpus"
    if not corpus.is_dir():
        study_corpus(corpus)
    training = {"tokens": steps * 8 * 16, **sections.pop("training", {})}
    (folder / "base.toml").write_text(to_toml(small_config(corpus, training=training, **sections)))
    path = folder / "study.toml"
    path.write_text(f'name = "small"\ntitle = "Small"\nbase = "base.toml"\nseeds = [1, 2]\n{more}{optimizers}')
    return path


class LauncherHere:
    """Does each task in this process, which has loaded torch already."""

    slots, leaves_on_stop = 1, False

    def __init__(self, _environments: list[dict[str, str]]) -> None:
        self.ended: list[Ended] = []

    def start(self, task: Task) -> None:
        self.ended.append(Ended(task, *run_cell(task)))

    def wait(self, _seconds: float) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_here(
    study_file: Path, out: Path, *, only: tuple[str, ...] = (), jobs: int | None = 1, **options: Any
) -> tuple[StudyOutcome, str]:
    """Run a study in this process; return how it ended, and its output."""
    study, cells = plan(study_file)
    folder = StudyFolder(out, options.get("reused", ()))
    folder.require_fit(study, cells)
    text = io.StringIO()
    outcome = run_study(
        study,
        chosen(cells, only),
        folder,
        all_cells=cells,
        jobs=jobs,
        launcher=options.get("launcher", "local"),
        display=StudyDisplay(Console(file=text, width=200)),
        before_runs=options.get("before_runs", lambda: None),
    )
    return outcome, text.getvalue()


def plan(study_file: Path) -> tuple[Study, list[Cell]]:
    study = load_study(str(study_file))
    return study, cells_of(study)


def comparable(results: list[Result]) -> list[dict[str, Any]]:
    """The results that must not depend on interruptions."""
    return [{key: value for key, value in vars(each).items() if key not in CHANGES_WITH_TIME} for each in results]


def start_command(*arguments: str, cwd: Path, program: list[str] = COMMAND) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*program, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    """The workers of a study."""
    try:
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def kill_all(process: "subprocess.Popen[str]") -> None:
    """kill -9 of the runner and its workers."""
    for pid in [process.pid, *children_of(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
