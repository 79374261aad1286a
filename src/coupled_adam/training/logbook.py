"""The log of a run: `metrics.jsonl`, and optionally TensorBoard and Weights & Biases.

A line of `metrics.jsonl` is a JSON object with `kind` (train, val, embeddings, test, event), `step` and numbers. Each
line is written with one call of write(), so a kill truncates at most the last line. A resumed run first removes the
rows after its checkpoint, so the final file equals that of an uninterrupted run.

A failing log must not stop the training: if it cannot be written (a full disk), a message is shown once.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.base.files import parse_json, replacing, require_regular_file
from coupled_adam.base.text import counted
from coupled_adam.metrics import up_to_date

METRICS_FILE = "metrics.jsonl"

Value = float | int | str | None
Values = Mapping[str, Value]


class Sink(Protocol):
    """Destination of rows."""

    name: str

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write one row; all numbers are finite or None."""

    def sync(self) -> None:
        """Flush all rows to disk."""

    def close(self, failed: bool) -> None:
        """Close the sink; `failed` if the training ended with an exception."""


class Logbook:
    """Write rows to several sinks; without sinks, as on ranks other than the first, do nothing.

    Args:
        sinks: destinations of the rows.
        say: called with a message when a sink fails, and when it works again.
    """

    def __init__(self, sinks: Sequence[Sink] = (), say: Callable[[str], None] = print) -> None:
        self._sinks = tuple(sinks)
        self._say = say
        self._lost = dict.fromkeys((sink.name for sink in self._sinks), 0)  # rows lost since the last success

    def write(self, kind: str, step: int, values: Values) -> None:
        """Write one row; numbers that are not finite become None (null in JSON)."""
        assert not {"kind", "step"} & values.keys(), f"reserved names among the values: {sorted(values)}"
        finite = {key: finite_or_none(value) for key, value in values.items()}
        for sink in self._sinks:
            try:
                sink.write(kind, step, finite)
            except Exception as error:  # no tracker error may stop the training
                if self._lost[sink.name] == 0:
                    self._say(f"{sink.name} cannot be written ({error}). Training continues; new rows are lost for now")
                self._lost[sink.name] += 1
            else:
                if self._lost[sink.name]:
                    lost = counted(self._lost[sink.name], "row was", "rows were")
                    self._say(f"{sink.name} can be written again; {lost} lost")
                    self._lost[sink.name] = 0

    def sync(self) -> None:
        """Flush all rows to disk. Call before a checkpoint, so that a run resumed from it misses no rows."""
        self._with_each_sink(lambda sink: sink.sync())

    def close(self, failed: bool = False) -> None:
        """Close all sinks; `failed` if the training ended with an exception."""
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
    """Open the logbook of a run.

    Args:
        folder: folder of the run, created if missing.
        tensorboard: also write TensorBoard files to `tensorboard/`.
        wandb_project: also send the rows to this Weights & Biases project; with WANDB_MODE=offline they stay in
            `wandb/`.
        config: the run's config, for Weights & Biases.
        run_name: name of the run in Weights & Biases.
        resume_step: step of the checkpoint to resume from; later rows are removed. None for a new run: all existing
            rows are removed.
        say: shows a message to the user.

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
        # Trackers first: they may fail for lack of a package or a login, and then no row may have been removed.
        if tensorboard:
            trackers.append(TensorBoard(folder / "tensorboard", resume_step))
        if wandb_project is not None:
            trackers.append(WeightsAndBiases(folder, wandb_project, run_name, config or {}, resume_step, say))
        return Logbook([MetricsFile(folder / METRICS_FILE, resume_step, say), *trackers], say)
    except BaseException:
        Logbook(trackers, say).close(failed=True)
        raise


class MetricsFile:
    """Sink that appends rows to `metrics.jsonl`."""

    name = METRICS_FILE

    def __init__(self, path: Path, resume_step: int | None, say: Callable[[str], None]) -> None:
        if path.exists():
            require_regular_file(path, "move it away, then run the command again")
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
            if written != len(line):  # the disk is full: a partial row would corrupt the next one
                self._file.truncate(end)
        if written != len(line):
            raise UserOSError(f"only {written} of {len(line)} bytes could be written to the disk")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        self._file.close()


def finite_or_none(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`, of one kind or all; a truncated last line is ignored.

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
                f"{path}, line {number}: not a row of metrics; resume the run to repair the file, or delete the line"
            )
        if row is not None and kind in (None, row["kind"]):
            rows.append(row)
    return rows


def keep_until(path: Path, last_step: int, say: Callable[[str], None]) -> None:
    """Remove the rows after `last_step` and damaged lines, atomically."""
    lines = path.read_bytes().splitlines()
    with replacing(path) as temporary, temporary.open("wb") as file:
        for number, line in enumerate(lines, 1):
            row = parse_row(line)
            if row is None and number < len(lines):
                say(f"{path}, line {number}: damaged, removed")
            if row is not None and row["step"] <= last_step:
                # Rewritten, so that rows of an older version get the current keys.
                file.write(json.dumps(row).encode() + b"\n")


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a row with current keys; None for an invalid line. A truncated JSON object never parses."""
    try:
        row = parse_json(line, METRICS_FILE)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("kind"), str) and type(row.get("step")) is int
    return up_to_date(row, row["kind"]) if is_row and row["step"] >= 0 else None
