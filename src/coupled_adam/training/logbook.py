"""The record of a run: `metrics.jsonl`, and TensorBoard and Weights & Biases where they are asked for.

One line of `metrics.jsonl` is one JSON object with `kind` (train, val, embeddings, test, event), `step` and numbers. A
line is written with one call of write(), so that a kill leaves at most the last one unfinished; and a resumed run first
takes away what came after its checkpoint, so that in the end the file is that of a run that was never interrupted.

A record is not worth a training: where it cannot be written (a full disk), this is said once, and the training goes on.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.base.files import parse_json, replacing, require_regular_file
from coupled_adam.metrics import up_to_date

METRICS_FILE = "metrics.jsonl"

Value = float | int | str | None
Values = Mapping[str, Value]


class Sink(Protocol):
    """One place that rows are written to."""

    name: str

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write one row; its values are finite, or None."""

    def sync(self) -> None:
        """Bring to the disk what was written."""

    def close(self, failed: bool) -> None:
        """The last call; `failed` when the training ends with an exception."""


class Logbook:
    """Writes rows to all its sinks. Without any it does nothing, which is what ranks other than the first want.

    Args:
        sinks: where to.
        say: called with a sentence when a sink fails, and when it works again.
    """

    def __init__(self, sinks: Sequence[Sink] = (), say: Callable[[str], None] = print) -> None:
        self._sinks = tuple(sinks)
        self._say = say
        self._lost = dict.fromkeys((sink.name for sink in self._sinks), 0)  # rows since the last that could be written

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write one row; numbers that are not finite become None (null in JSON)."""
        assert not {"kind", "step"} & values.keys(), f"the values of a row are called {sorted(values)}"
        finite = {key: finite_or_none(value) for key, value in values.items()}
        for sink in self._sinks:
            try:
                sink.write(kind, step, finite)
            except Exception as error:  # whatever a tracker raises, it must not end the training
                if self._lost[sink.name] == 0:
                    self._say(
                        f"{sink.name} cannot be written ({error}). Training goes on; its rows are lost until it can"
                    )
                self._lost[sink.name] += 1
            else:
                if self._lost[sink.name]:
                    self._say(f"{sink.name} is written again; {self._lost[sink.name]} rows were lost")
                    self._lost[sink.name] = 0

    def sync(self) -> None:
        """Bring all rows to the disk. Before a checkpoint is written: a run resumed from it then misses none."""
        self._with_each_sink(lambda sink: sink.sync())

    def close(self, failed: bool = False) -> None:
        """Close all sinks; `failed` when the training ends with an exception."""
        self._with_each_sink(lambda sink: sink.close(failed))
        self._sinks = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _with_each_sink(self, act: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                act(sink)
            except Exception as error:
                self._say(f"{sink.name} cannot be written ({error})")


def open_logbook(
    folder: Path,
    *,
    tensorboard: bool = False,
    wandb_project: str | None = None,
    config: Mapping[str, Any] | None = None,
    run_name: str = "",
    resume_step: int | None = None,
    say: Callable[[str], None] = print,
) -> Logbook:
    """The logbook of the run in `folder`.

    Args:
        folder: of the run; made if it is missing.
        tensorboard: also write TensorBoard's files, into `tensorboard/`.
        wandb_project: also send the rows to this project of Weights & Biases; with WANDB_MODE=offline they stay in
            `wandb/`.
        config: what Weights & Biases shows as the run's config.
        run_name: what Weights & Biases calls the run.
        resume_step: of the checkpoint that the run goes on from: later rows are taken away. None for a run that starts:
            all rows are, should there be any.
        say: shows a sentence to the user.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with open_logbook(folder) as logbook:
        ...     logbook.write("train", 10, {"loss": 8.25, "grad_norm": float("nan")})
        >>> read_metrics(folder / "metrics.jsonl")
        [{'kind': 'train', 'step': 10, 'loss': 8.25, 'grad_norm': None}]
    """
    from coupled_adam.training.trackers import TensorBoard, WeightsAndBiases

    folder.mkdir(parents=True, exist_ok=True)
    trackers: list[Sink] = []
    try:
        # Before the file: they can fail for want of a package or a login, and then no row must have been taken away.
        if tensorboard:
            trackers.append(TensorBoard(folder / "tensorboard", resume_step))
        if wandb_project is not None:
            trackers.append(WeightsAndBiases(folder, wandb_project, run_name, config or {}, resume_step, say))
        return Logbook([MetricsFile(folder / METRICS_FILE, resume_step, say), *trackers], say)
    except BaseException:
        Logbook(trackers, say).close(failed=True)
        raise


class MetricsFile:
    """`metrics.jsonl`, open for one row after the other."""

    name = METRICS_FILE

    def __init__(self, path: Path, resume_step: int | None, say: Callable[[str], None]) -> None:
        if path.exists():
            require_regular_file(path, "move it away, then run the same command again")
        if resume_step is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            keep_until(path, resume_step, say)
        self._file = path.open("ab", buffering=0)  # unbuffered: one row is one call of write()

    def write(self, kind: str, step: int, values: Values) -> None:
        line = json.dumps({"kind": kind, "step": step, **values}, allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            written = self._file.write(line)
        finally:
            if written != len(line):  # the disk is full: what fitted would spoil the next row
                self._file.truncate(end)
        if written != len(line):
            raise UserOSError(f"only {written} of {len(line)} bytes fitted on the disk")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        self._file.close()


def finite_or_none(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, of one kind or all; an unfinished last line is left out.

    Args:
        path: the file; the run may still be writing to it.
        kind: "train", "val", "embeddings", "test" or "event".
    """
    rows = []
    require_regular_file(path)
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        row = parse_row(line)
        if row is None and number < len(lines):
            raise UserError(
                f"{path}, line {number}: not a row of metrics; resume the run to repair it, or delete the line"
            )
        if row is not None and kind in (None, row["kind"]):
            rows.append(row)
    return rows


def keep_until(path: Path, last_step: int, say: Callable[[str], None]) -> None:
    """Take away the rows after `last_step` and what is not a row, in one go."""
    lines = path.read_bytes().splitlines()
    with replacing(path) as temporary, temporary.open("wb") as file:
        for number, line in enumerate(lines, 1):
            row = parse_row(line)
            if row is None and number < len(lines):
                say(f"{path}, line {number}: damaged, and taken away")
            if row is not None and row["step"] <= last_step:
                # Written anew: the rows of an older version get the keys that the next ones have.
                file.write(json.dumps(row).encode() + b"\n")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row, with the keys of this version, or None where it is none: a JSON object that is cut anywhere no
    longer parses."""
    try:
        row = parse_json(line, METRICS_FILE)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("kind"), str) and type(row.get("step")) is int
    return up_to_date(row, row["kind"]) if is_row and row["step"] >= 0 else None
