"""`coupled-adam eval`."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import printable_lines
from coupled_adam.commands.refusal import refuse, user_errors

if TYPE_CHECKING:
    from coupled_adam.evaluation.downstream.results import Downstream, TaskResult

# The steps of an evaluation in two halves, each with the options that it has no use for.
HALVES = {
    "--requests": ("--checkpoint", "--device", "--precision", "--data", "--no-loss", "--out", "--fresh", "--json"),
    "--answer": ("--tasks", "--limit", "--task-data", "--tokenizer", "--data", "--json"),
    "--scores": ("--limit", "--checkpoint", "--device", "--precision", "--data", "--no-loss"),
}


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a run or of a Hugging Face model; with --requests also a tokenizer.json or `gpt2`.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Tasks of lm-eval; `paper`: its seven; `none`: the loss alone.  [default: paper]"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N documents of each task, for a try.")
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of local files, for the paper's tasks without a network.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(metavar="STEP", min=0, help="Of a run.  [default: the newest whole one]")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where to compute.  [default: as the run was trained]")
    ] = None,
    precision: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Of the weights.  [default: as the run was trained; of other models bf16 on CUDA]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="A tokenizer.json or `gpt2`, where the corpus of the run is not here."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Prepared corpus for the loss of a Hugging Face model.")
    ] = None,
    no_loss: Annotated[bool, typer.Option("--no-loss", help="Leave out the test loss.")] = False,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="In two halves, 1: write what the tasks ask.")
    ] = None,
    answer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="2, where the GPU is: score such requests with a run, into --out."),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(metavar="FILE", help="3: compute the metrics of such scores; MODEL is the run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the results.  [default: downstream.json in MODEL]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Repeat what was evaluated already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Evaluate a model: its test loss, and the paper's seven downstream tasks through lm-evaluation-harness.

    Try: `coupled-adam eval runs/tiny-coupled-seed1 --tasks arc_easy,winogrande --limit 50`. Without a network, with
    files of your own: `coupled-adam eval RUN --task-data DIR`. A task that is done is not repeated, so a stopped
    evaluation goes on where it was.

    A GPU machine without lm-eval: `coupled-adam eval RUN --requests requests.safetensors` here,
    `coupled-adam eval RUN --answer requests.safetensors --out scores.safetensors` there, and
    `coupled-adam eval RUN --scores scores.safetensors` here again.

    Acc is the mean of the seven accuracies. Needs the extra `eval` of this package, but for --answer and for the loss
    of a run alone (`--tasks none`).
    """
    from coupled_adam.evaluation.downstream.tasks import parse_tasks

    _check_halves(
        {
            "--requests": requests,
            "--answer": answer,
            "--scores": scores,
            "--tasks": tasks,
            "--limit": limit,
            "--task-data": task_data,
            "--checkpoint": checkpoint,
            "--device": device,
            "--precision": precision,
            "--tokenizer": tokenizer,
            "--data": data,
            "--no-loss": no_loss,
            "--out": out,
            "--fresh": fresh,
            "--json": as_json,
        }
    )
    if model is None and scores is None:
        refuse("MODEL is missing: the folder of a run or of a Hugging Face model")
    with user_errors():
        names = parse_tasks(tasks)
        if requests is not None:
            assert model is not None
            _write_requests(tokenizer or model, requests, names, task_data, limit)
            return
        if answer is not None:
            assert model is not None
            _answer(
                Path(model),
                answer,
                out,
                checkpoint=checkpoint,
                device=device,
                precision=precision,
                with_loss=not no_loss,
                fresh=fresh,
            )
            return
        with progress_bar() as on_progress:
            if scores is not None:
                from coupled_adam.evaluation.downstream.halves import evaluate_scores

                found, path = evaluate_scores(
                    scores,
                    tasks=None if tasks is None else names,
                    run=None if model is None else Path(model),
                    out=out,
                    task_data=task_data,
                    tokenizer=tokenizer,
                    fresh=fresh,
                    on_progress=on_progress,
                    on_note=_note,
                )
            else:
                found, path = _evaluate_model(
                    Path(str(model)),
                    checkpoint=checkpoint,
                    tokenizer=tokenizer,
                    data=data,
                    with_loss=not no_loss,
                    tasks=names,
                    task_data=task_data,
                    limit=limit,
                    device=device,
                    precision=precision,
                    fresh=fresh,
                    out=out,
                    on_progress=on_progress,
                )
        _show(found, path, as_json=as_json)
        if model is not None and out is None:
            _tell_study(Path(model), path, found, aside=as_json)


def _check_halves(options: Mapping[str, Any]) -> None:
    """Refuse options that a step of an evaluation in two halves would pass over in silence."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    steps = [name for name in HALVES if name in given]
    if len(steps) > 1:
        refuse(f"{' and '.join(steps)} are steps of their own; give one at a time")
    unused = [name for step in steps for name in HALVES[step] if name in given]
    if unused:
        refuse(f"{', '.join(unused)} has no meaning with {steps[0]}; leave it out")


def _evaluate_model(
    folder: Path,
    *,
    checkpoint: int | None,
    tokenizer: str | None,
    data: Path | None,
    with_loss: bool,
    **options: Any,
) -> "tuple[Downstream, Path]":
    """Evaluate a run or a Hugging Face folder; the results, and where they are."""
    from coupled_adam.evaluation.downstream.evaluate import evaluate_run
    from coupled_adam.evaluation.downstream.hub_folder import evaluate_folder, is_hugging_face_folder
    from coupled_adam.evaluation.downstream.results import file_name

    if not options["tasks"] and not with_loss:
        raise UserError("--tasks none with --no-loss leaves nothing to evaluate; leave one of them out")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give that of a run, or of a model that `export` or others wrote")
    if is_hugging_face_folder(folder):
        unfit = {"--checkpoint": checkpoint, "--tokenizer": tokenizer}
        for name, value in unfit.items():
            if value is not None:
                raise UserError(f"{name} is for runs, and {folder} is a Hugging Face folder; leave it out")
        if not options["tasks"] and data is None:
            raise UserError(f"--tasks none: the loss of {folder} needs a prepared corpus; give one with --data DIR")
        found = evaluate_folder(folder, data=data if with_loss else None, on_note=_note, **options)
    else:
        if data is not None:
            raise UserError(f"--data is for Hugging Face folders; {folder} has a corpus of its own, leave it out")
        found = evaluate_run(
            folder, checkpoint=checkpoint, tokenizer=tokenizer, with_loss=with_loss, on_note=_note, **options
        )
    return found, options["out"] or folder / file_name(checkpoint, options["limit"])


def _write_requests(spec: str, file: Path, tasks: list[str], task_data: Path | None, limit: int | None) -> None:
    from coupled_adam.evaluation.downstream.halves import write_task_requests
    from coupled_adam.evaluation.run_tokenizer import tokenizer_of

    with progress_bar() as on_progress:
        found = write_task_requests(
            file, tokenizer_of(spec), tasks=tasks, task_data=task_data, limit=limit, on_progress=on_progress
        )
    count = sum(map(len, found.tasks.values()))
    typer.echo(
        f"{count:,} requests of {len(found.tasks)} tasks: {printable_lines(str(file))}. Score them where the model is: "
        f"coupled-adam eval RUN --answer {printable_lines(file.name)} --out scores.safetensors"
    )


def _answer(run: Path, requests: Path, out: Path | None, **options: Any) -> None:
    from coupled_adam.evaluation.downstream.halves import answer_requests

    if out is None:
        raise UserError("--answer: say where the scores go, with --out FILE")
    if out.resolve() == requests.resolve():
        raise UserError(f"--out: {out} holds the requests; give the scores a file of their own")
    with progress_bar() as on_progress:
        found = answer_requests(run, requests, out, on_progress=on_progress, on_note=_note, **options)
    table = Table("task", Column("requests", justify="right"), Column("seconds", justify="right"))
    for name, scores in found.scores.items():
        table.add_row(_cell(name), f"{len(scores):,}", f"{found.model['seconds'][name]:.1f}")
    Console(highlight=False).print(table)
    typer.echo(
        f"Scores: {printable_lines(str(out))}. For the metrics, where lm-eval is: coupled-adam eval RUN --scores "
        f"{printable_lines(out.name)} (and --task-data, if the requests were written with it)"
    )


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each task on the error output, with the time left; a line for each if it is no terminal."""
    # Its own stream: lm-eval is kept from printing by taking sys.stderr away for a while.
    console = Console(file=sys.stderr, highlight=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests,"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    begun: dict[str, Any] = {}

    def on_progress(name: str, done: int, total: int) -> None:
        if name not in begun:
            for earlier in begun.values():
                bar.update(earlier, visible=False)
            begun[name] = bar.add_task(name, total=None)
            if not console.is_terminal:
                console.print(f"{name} ...", markup=False)
        # Until the requests of a task are made, their number is not known.
        bar.update(begun[name], completed=done, total=total if done or total > 1 else None)

    with bar:
        yield on_progress


def _show(found: "Downstream", path: Path, *, as_json: bool) -> None:
    from coupled_adam.base.text import shorthand
    from coupled_adam.evaluation.downstream.results import to_json
    from coupled_adam.evaluation.downstream.tasks import PAPER_NAMES, label_of

    if as_json:
        values = {"acc": found.accuracy, "acc_stderr": found.accuracy_error, **to_json(found), "file": str(path)}
        typer.echo(json.dumps(values, indent=1))
        return
    # In a narrow terminal names and numbers are broken, none is cut off; the values stay whole.
    table = Table(
        Column("task", overflow="fold"),
        Column("metric", overflow="fold"),
        Column("value", justify="right", no_wrap=True),
        Column("examples", justify="right", overflow="fold"),
        Column("seconds", justify="right", overflow="fold"),
    )
    if found.loss is not None:
        value = shorthand(found.loss.loss, found.loss.standard_error, 3)
        table.add_row(
            _cell(f"{found.loss.split} split"),
            "loss",
            value,
            f"{found.loss.targets:,} tokens",
            f"{found.loss.seconds:.1f}",
        )
    for name, task in sorted(found.tasks.items(), key=lambda item: _place(item[0], PAPER_NAMES)):
        metric, value = _shown_metric(task)
        examples = f"{task.examples:,}" + ("" if task.examples == task.documents else f" of {task.documents:,}")
        table.add_row(_cell(label_of(name)), _cell(metric), value, examples, f"{task.seconds:.1f}")
    if found.accuracy is not None:
        table.add_section()
        table.add_row("mean of the seven", "Acc", shorthand(found.accuracy, found.accuracy_error, 3), "", "")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Results: {printable_lines(str(path))}", markup=False, soft_wrap=True)


def _place(name: str, order: tuple[str, ...]) -> int:
    return order.index(name) if name in order else len(order)


def _shown_metric(task: "TaskResult") -> tuple[str, str]:
    """The metric that a task is judged by, with its standard error."""
    from coupled_adam.base.notation import MISSING
    from coupled_adam.base.text import shorthand
    from coupled_adam.evaluation.downstream.tasks import METRIC

    name = METRIC if METRIC in task.metrics else next((key for key in task.metrics if "_stderr" not in key), None)
    if name is None or not math.isfinite(task.metrics[name]):
        return name or MISSING, MISSING
    error = task.metrics.get(f"{name}_stderr", math.nan)
    return name, shorthand(task.metrics[name], error if math.isfinite(error) else None, 3)


def _tell_study(run: Path, path: Path, found: "Downstream", *, aside: bool) -> None:
    """Add the tasks to the results of the study that the run belongs to, if it belongs to one.

    Args:
        run: its folder.
        path: file of the results.
        found: the results.
        aside: say so on the error output, because the other one is for a program.
    """
    from coupled_adam.evaluation.downstream.results import file_name
    from coupled_adam.study.results import add_metrics
    from coupled_adam.study.task_evaluation import task_metrics

    if path.name == file_name(None, None) and found.tasks:  # of the newest checkpoint, on all documents
        study = add_metrics(run, task_metrics(found))
        if study is not None:
            typer.echo(f"Added to the results of the study: {printable_lines(str(study))}", err=aside)


def _cell(text: str) -> Text:
    """A name from a file, in which brackets are no markup."""
    return Text(printable_lines(text))


def _note(sentence: str) -> None:
    typer.echo(f"Note: {printable_lines(sentence)}", err=True)
