"""Progress display of a study: a live table on a terminal, otherwise plain lines.

The progress of a run is read from its metrics.jsonl, for local processes and cluster jobs alike.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.progress import LongName
from coupled_adam.base.text import duration, percent
from coupled_adam.metrics import METRICS
from coupled_adam.models.model_config import flops_per_token
from coupled_adam.study.expansion import Cell
from coupled_adam.study.folder import last_row, newest_step

if TYPE_CHECKING:
    from coupled_adam.study.launchers import Ended

SECONDS_BETWEEN_LINES = 60.0
MOST_RUNNING_SHOWN = 16


@dataclass
class Running:
    """A run in progress."""

    cell: Cell
    folder: Path
    started: float
    start_step: int = 0
    step: int = 0
    loss: float | None = None
    former: dict[str, float] | None = None
    """Last row of the previous start. After a kill, it is later than the checkpoint that this start resumes from."""

    @classmethod
    def begin(cls, cell: Cell, folder: Path, started: float) -> Self:
        """Start to follow a run, which resumes from its newest checkpoint, if any."""
        step = newest_step(folder)
        return cls(cell, folder, started, start_step=step, step=step, former=last_row(folder))

    def look(self) -> None:
        """Read the current step and loss."""
        row = last_row(self.folder)
        if row is not None and row != self.former:
            self.step, self.loss = int(row["step"]), row.get("loss")

    @property
    def share(self) -> float:
        """Fraction of its steps done."""
        return self.step / self.cell.config.total_steps


def operations(cell: Cell) -> float:
    """Cost of a run in operations of its model, precise enough to compare runs."""
    config = cell.config
    return float(flops_per_token(config.to_model_config()) * config.tokens_per_step * config.total_steps)


class StudyDisplay:
    """The display of one study, as a context manager around its runs.

    Args:
        console: where to print.
        clock: monotonic, in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        is_live = console.is_interactive and console.file.isatty()
        self._live = Live(console=console, auto_refresh=False, transient=True) if is_live else None
        self._running: dict[str, Running] = {}
        self._total = self._finished = self._failed = 0
        self._may_grow = False
        self._left = 0.0  # operations of all unfinished runs, without their progress
        self._done = 0.0  # operations since `begin`
        self._began = clock()
        self._last_line = clock()

    def __enter__(self) -> Self:
        if self._live is not None:
            with self._silent_when_closed():
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with self._silent_when_closed():
                self._live.stop()

    @contextmanager
    def _silent_when_closed(self) -> Iterator[None]:
        """Go quiet if the terminal or pipe is closed, instead of ending runs that may take days."""
        try:
            yield
        except OSError:
            self._console.quiet = True
        except SystemExit:
            if not self._console.quiet:  # on a closed pipe rich goes quiet and exits; other exits are raised
                raise

    def begin(self, cells: Sequence[Cell], todo: Collection[Cell], *, may_grow: bool) -> None:
        """Set the runs to do.

        Args:
            cells: all requested runs, as far as known.
            todo: the unfinished ones.
            may_grow: whether more runs may turn out to be needed.
        """
        self._may_grow = may_grow
        self._total, self._finished = len(cells), len(cells) - len(todo)
        self._left = sum(operations(cell) for cell in todo)
        self._began = self._clock()

    def add(self, cells: Sequence[Cell], *, finished: Sequence[Cell] = (), may_grow: bool) -> None:
        """Add runs that turn out to be needed.

        Args:
            cells: the new runs.
            finished: runs, new or not, that turn out to have a result.
            may_grow: whether even more may be needed.
        """
        self._may_grow = may_grow
        self._total += len(cells)
        self._finished += len(finished)
        self._left += sum(operations(cell) for cell in cells) - sum(operations(cell) for cell in finished)

    def started(self, cell: Cell, folder: Path) -> None:
        """Show that a run starts or resumes."""
        run = Running.begin(cell, folder, self._clock())
        self._left -= run.share * operations(cell)
        self._running[cell.label] = run
        if self._live is None:
            where = f", from step {run.step:,}" if run.step else ""
            self.say(f"start     {cell.label}{where}")

    def ended(self, ended: "Ended") -> None:
        """Show that a run has ended."""
        cell = ended.task.cell
        run = self._running.pop(cell.label)
        run.look()
        of_run = (1 - run.start_step / cell.config.total_steps) * operations(cell)
        self._left -= of_run
        self._done += of_run if ended.status == "finished" else 0.0
        self._finished += ended.status == "finished"
        self._failed += ended.status == "failed"
        note = f": {ended.message}" if ended.message else ""
        took = duration(self._clock() - run.started)
        loss = count = ""
        if ended.status == "finished":
            loss = "" if run.loss is None else f", {METRICS['train_loss'].label} {METRICS['train_loss'].text(run.loss)}"
            count = f"  [{self._finished}{' of at least ' if self._may_grow else '/'}{self._total}]"
        self.say(f"{ended.status:9} {cell.label} in {took}{loss}{note}{count}")

    def say(self, text: str) -> None:
        """Print a line, above the live table if there is one."""
        with self._silent_when_closed():
            self._console.print(Text(text), soft_wrap=True)

    def refresh(self) -> None:
        """Update the progress of the runs on the screen."""
        for run in self._running.values():
            run.look()
        if self._live is not None:
            with self._silent_when_closed():
                self._live.update(self._table(), refresh=True)
        elif self._running and self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = self._clock()
            shown = "; ".join(f"{run.cell.label} {percent(run.share)}" for run in list(self._running.values())[:4])
            self.say(f"running   {shown}; {self._summary()}")

    def seconds_left(self) -> float | None:
        """Time left at the current speed; None if it is not known yet."""
        under_way = sum(
            (run.share - run.start_step / run.cell.config.total_steps) * operations(run.cell)
            for run in self._running.values()
        )
        done = self._done + under_way
        if done <= 0:
            self._began = self._clock()  # do not count the start of the processes
        elapsed = self._clock() - self._began
        return (self._left - under_way) / done * elapsed if done > 0 and elapsed > 1 else None

    def _summary(self) -> str:
        waiting = self._total - self._finished - self._failed - len(self._running)
        seconds = self.seconds_left()
        least = "at least " if self._may_grow else ""
        parts = [f"{self._finished} of {least}{self._total} finished"]
        parts += [f"{len(self._running)} running", f"{waiting} waiting"]
        parts += [f"{self._failed} failed"] if self._failed else []
        parts += [f"{least}{duration(seconds)} left"] if seconds is not None else []
        return ", ".join(parts)

    def _table(self) -> RenderableType:
        # The name gives way on a narrow terminal, so that no number is cut.
        table = Table("run", Column("progress", no_wrap=True), box=None)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column(METRICS["train_loss"].label, justify="right", no_wrap=True)
        for run in list(self._running.values())[:MOST_RUNNING_SHOWN]:
            total = run.cell.config.total_steps
            state = f"{run.step:,}/{total:,}" if run.step < total else "measuring"
            loss = "" if run.loss is None else METRICS["train_loss"].text(run.loss)
            table.add_row(LongName(run.cell.label), ProgressBar(total=total, completed=run.step, width=20), state, loss)
        return Group(table, Text(self._summary()))
