"""What `coupled-adam eval` and its sub-commands print: progress, notes and the table of results."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.progress import progress_bar, wide_enough
from coupled_adam.base.text import counted, duration, printable_lines
from coupled_adam.metrics import ACCURACY, METRICS

if TYPE_CHECKING:
    from coupled_adam.evaluation.downstream.task_results import Downstream, TaskResult
    from coupled_adam.evaluation.loss_by_frequency import FrequencyBin


@contextmanager
def task_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bar for each task with the time left; without a terminal, one line when a task starts."""
    with progress_bar() as bar:
        begun: set[str] = set()

        def on_progress(name: str, done: int, total: int) -> None:
            if name not in begun and not bar.is_on_terminal:
                bar.say(f"{name} ...")
            begun.add(name)
            # The number of requests is unknown until lm-eval has built them.
            is_known = done or total > 1
            note = f"{done:,}/{counted(total, 'request')}" if is_known else ""
            bar.show(name, done if is_known else None, total, note=note)

        yield on_progress


def show(found: "Downstream", path: Path, *, as_json: bool) -> None:
    """Print results as a table or as JSON."""
    from coupled_adam.evaluation.downstream.task_results import to_json
    from coupled_adam.paper_tasks import PAPER_NAMES, label_of

    if as_json:
        values = {"acc": found.accuracy, "acc_stderr": found.accuracy_error, **to_json(found), "file": str(path)}
        typer.echo(json.dumps(values, indent=1))
        return
    # A narrow terminal wraps names and counts but never truncates them; values stay on one line.
    table = Table(
        Column("task", overflow="fold"),
        Column("metric", overflow="fold"),
        Column("value", justify="right", no_wrap=True),
        Column("examples", justify="right", overflow="fold"),
        Column("time", justify="right", overflow="fold"),
    )
    if found.loss is not None:
        value = METRICS["loss"].text(found.loss.loss, found.loss.standard_error)
        table.add_row(
            table_cell(f"{found.loss.split} split"),
            "loss",
            value,
            counted(found.loss.targets, "token"),
            duration(found.loss.seconds),
        )
    for name, task in sorted(found.tasks.items(), key=lambda item: _place(item[0], PAPER_NAMES)):
        metric, value = _shown_metric(task)
        examples = f"{task.examples:,}" + ("" if task.examples == task.documents else f" of {task.documents:,}")
        table.add_row(table_cell(label_of(name)), table_cell(metric), value, examples, duration(task.seconds))
    if found.accuracy is not None:
        table.add_section()
        table.add_row("mean of the seven", "Acc", ACCURACY.text(found.accuracy, found.accuracy_error), "", "")
    console = Console(highlight=False)
    console.print(table)
    if found.loss is not None and found.loss.by_frequency is not None:
        bins = frequency_table(found.loss.split, found.loss.by_frequency)
        wide_enough(console, bins).print(bins)
    console.print(f"Results: {printable_lines(str(path))}", markup=False, soft_wrap=True)


def frequency_table(split: str, bins: "Sequence[FrequencyBin]") -> Table:
    """Loss and calibration by token frequency, a row for each bin that has tokens."""
    from coupled_adam.base.notation import MISSING
    from coupled_adam.metrics import BIN_CALIBRATION, BIN_LOSS, BIN_TARGETS, BIN_TOKENS

    headings = ("bin", "seen in training", *(each.symbol for each in (BIN_TOKENS, BIN_TARGETS, BIN_LOSS)))
    table = Table(
        *(Column(heading, justify="right") for heading in (*headings, BIN_CALIBRATION.symbol)),
        title=f"{BIN_LOSS.label.capitalize()}, {split} split",
        caption="Bin 1 has the most frequent tokens, which make up half of the training text; each further bin covers "
        "half of the rest. Calibration is the log of the predicted over the observed share; below 0, the model "
        "underestimates these tokens.",
    )
    for number, each in enumerate(bins, 1):
        if each.tokens:
            seen = dict.fromkeys(f"{count:,}" for count in (each.lowest_count, each.highest_count) if count is not None)
            table.add_row(
                str(number),
                " to ".join(seen),
                f"{each.tokens:,}",
                f"{each.targets:,}",
                MISSING if each.loss is None else BIN_LOSS.text(each.loss, each.standard_error),
                MISSING if each.calibration is None else BIN_CALIBRATION.text(each.calibration),
            )
    return table


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _shown_metric(task: "TaskResult") -> tuple[str, str]:
    """Name of a task's main metric, and its value with the standard error."""
    from coupled_adam.base.notation import MISSING
    from coupled_adam.paper_tasks import METRIC

    name = METRIC if METRIC in task.metrics else next((key for key in task.metrics if "_stderr" not in key), None)
    if name is None or not math.isfinite(task.metrics[name]):
        return name or MISSING, MISSING
    error = task.metrics.get(f"{name}_stderr", math.nan)
    return name, ACCURACY.text(task.metrics[name], error if math.isfinite(error) else None)


def tell_study(run: Path, path: Path, found: "Downstream", *, aside: bool) -> None:
    """Add the task results to the study that the run belongs to, if any.

    Args:
        run: folder of the run.
        path: file of the results.
        found: the results.
        aside: print to stderr, because stdout holds JSON.
    """
    from coupled_adam.evaluation.downstream.task_results import file_name
    from coupled_adam.study.results import add_metrics
    from coupled_adam.study.task_evaluation import task_metrics

    if path.name == file_name(None, None) and found.tasks:  # newest checkpoint, all documents
        study = add_metrics(run, task_metrics(found))
        if study is not None:
            typer.echo(f"Added to the results of the study: {printable_lines(str(study))}", err=aside)


def table_cell(text: str) -> Text:
    """A table cell with text from a file, whose brackets are not rich markup."""
    return Text(printable_lines(text))


def note(sentence: str) -> None:
    """Print a note to stderr."""
    typer.echo(f"Note: {printable_lines(sentence)}", err=True)
