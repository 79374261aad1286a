"""The run folder: its files, its lock, and checks before a run starts or resumes.

config.toml      the resolved config
run.json         state of the run: status, step, versions, device
metrics.jsonl    measurements, one per line
checkpoints/     step-000000300/...
tensorboard/  wandb/  wandb_id      files of trackers, if enabled
lock             held while a process trains here; a killed process may leave the file (see base/locks)
"""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from coupled_adam import __version__
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, remove_leftover, require_writable, write_whole
from coupled_adam.base.locks import LockHeld, lock_names, locked
from coupled_adam.config.builtin_files import CONFIG_FILE
from coupled_adam.config.run_config import (
    MATTERS_FOR_RESUME,
    Config,
    differences,
    load_config,
    require_resumable,
    to_toml,
)
from coupled_adam.training.checkpoint.checkpoint_folder import checkpoints_in
from coupled_adam.training.logbook import METRICS_FILE

LOCK = "lock"
TRACKERS = ("tensorboard", "wandb", "wandb_id")


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG_FILE
        self.state = path / "run.json"
        self.checkpoints = path / "checkpoints"

    def check(self, config: Config, *, resume: bool) -> None:
        """Raise a UserError if the folder cannot be used for this run; write nothing."""
        if self.config.exists():
            if self.has_begun() and not resume:
                if others := self._other_settings(config):
                    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
                    raise UserError(
                        f"{self.path} already holds a run with other settings ({', '.join(others[:4])}{more}); choose "
                        "another folder with --out"
                    )
                raise UserError(
                    f"{self.path} already holds a run; continue it with --resume, or choose another folder with --out"
                )
            if self.has_begun():
                require_resumable(load_config(str(self.config), []), config)
        elif self.path.is_dir() and any(not _is_ours(entry) for entry in self.path.iterdir()):
            raise UserError(f"{self.path} exists and is not a run folder (no {CONFIG_FILE}); choose another --out")

    def _other_settings(self, config: Config) -> list[str]:
        """Keys with which the stored run trains something else than `config`; empty if its config is unreadable."""
        try:
            keys = differences(load_config(str(self.config), []), config)
        except UserError:
            return []
        counting = MATTERS_FOR_RESUME | {"data.source"}
        if config.model.vocabulary_size == "auto":  # the run folder has the resulting number
            counting -= {"model.vocabulary_size"}
        return [key for key in keys if key in counting]

    def begin(self, config: Config) -> None:
        """Write the config; call it after all checks have passed."""
        for leftover in self.path.glob(".*.tmp"):  # left by a killed process; we hold the lock
            remove_leftover(leftover)
        require_writable(self.config)
        write_whole(self.config, to_toml(config))
        self.checkpoints.mkdir(exist_ok=True)

    def has_begun(self) -> bool:
        """Whether a step was ever taken; before that, the config may still be corrected."""
        metrics = self.path / METRICS_FILE
        return bool(checkpoints_in(self.checkpoints)) or (metrics.exists() and metrics.stat().st_size > 0)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this folder, so that no other process trains in it."""
        try:
            require_writable(self.config)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path} ({error.strerror}); choose another folder with --out"
            ) from error
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / LOCK))
            except LockHeld as error:
                raise UserError(f"{self.path} is being trained by {error.by}; {error.remedy}") from error
            # A run that never began leaves nothing behind; rmdir removes only empty folders.
            stack.callback(self._remove_empty_checkpoints)
            try:
                yield
            finally:
                stack.close()
                with suppress(OSError):
                    self.path.rmdir()

    def _remove_empty_checkpoints(self) -> None:
        with suppress(OSError):
            if not self.config.exists():
                self.checkpoints.rmdir()

    def write_state(self, **values: Any) -> None:
        """Update the state of the run in run.json."""
        write_whole(self.state, json.dumps({**self.read_state(), **values}, indent=2) + "\n")

    def read_state(self) -> dict[str, Any]:
        """Read run.json; empty for a new run or an unreadable file."""
        try:
            state = read_json(self.state)
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def is_finished(self) -> bool:
        """Whether run.json says that all steps were taken."""
        return bool(self.read_state().get("status") == "finished")

    def seconds_so_far(self) -> float:
        """Total time of the run so far, including earlier starts; 0 if run.json does not have it."""
        seconds = self.read_state().get("seconds")
        return float(seconds) if isinstance(seconds, (int, float)) and math.isfinite(seconds) else 0.0


def _is_ours(entry: Path) -> bool:
    """Whether a file may exist before the config does, left by a run that failed or was killed at its start."""
    if entry.name == METRICS_FILE:
        return entry.stat().st_size == 0  # a new run overwrites it, so another program's rows would be lost
    return entry.name in (*lock_names(LOCK), *TRACKERS) or entry.match(".*.tmp")


def environment(device_name: str, ranks: int, parallel: str) -> dict[str, Any]:
    """Versions, device and platform of a run, to compare results later."""
    import numpy
    import torch

    return {
        "package": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "device": device_name,
        "threads": torch.get_num_threads(),
        "ranks": ranks,
        "parallel": parallel,
        "host": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    """The commit of the code, if it runs from a git checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
