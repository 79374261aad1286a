"""`coupled-adam eval requests`, `eval answer` and `eval score`: evaluate on a GPU machine without lm-eval."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted, duration, printable_lines
from coupled_adam.commands import eval_options as options
from coupled_adam.commands.eval_output import note, show, table_cell, task_bar, tell_study
from coupled_adam.commands.refusal import refuse, user_errors


def requests(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model whose tokenizer to use: a run folder, a Hugging Face folder, a tokenizer.json, or `gpt2`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write the requests to.", show_default=False)],
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    task_data: options.TaskData = None,
) -> None:
    """Write the tasks' requests as tokens (two machines, step 1).

    One file serves all models with this tokenizer. A run needs no checkpoint for this step. Requires the extra `eval`
    of this package.

    Next, on the GPU machine: `coupled-adam eval answer RUN requests.safetensors scores.safetensors`

    Try: `coupled-adam eval requests gpt2 requests.safetensors --tasks arc_easy,winogrande`
    """
    from coupled_adam.evaluation.downstream.offline_scoring import write_task_requests
    from coupled_adam.evaluation.run_tokenizer import tokenizer_of
    from coupled_adam.paper_tasks import parse_tasks

    with user_errors(), task_bar() as on_progress:
        found = write_task_requests(
            out,
            tokenizer_of(model),
            tasks=parse_tasks(tasks),
            task_data=task_data,
            limit=limit,
            on_progress=on_progress,
        )
    count = sum(map(len, found.tasks.values()))
    typer.echo(
        f"{counted(count, 'request')} of {counted(len(found.tasks), 'task')}: {printable_lines(str(out))}. "
        "Next, on the GPU machine: "
        f"coupled-adam eval answer RUN {shlex.quote(printable_lines(out.name))} scores.safetensors"
    )


def answer(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder of the model to evaluate.", show_default=False)
    ],
    requests: Annotated[
        Path,
        typer.Argument(metavar="REQUESTS", help="File written by `eval requests`.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write the scores to.", show_default=False)],
    checkpoint: options.Checkpoint = None,
    device: options.Device = None,
    precision: options.Precision = None,
    no_loss: options.NoLoss = False,
    fresh: options.Fresh = False,
) -> None:
    """Score the requests with a run's model (two machines, step 2).

    Run the same command again to resume after an interruption. If the run's corpus is on this machine, the test loss is
    measured too. Requires torch and this package, but no extra, no tokenizer and no network.

    Next, on the machine with lm-eval: `coupled-adam eval score RUN scores.safetensors`

    Try: `coupled-adam eval answer RUN requests.safetensors scores.safetensors`
    """
    from coupled_adam.evaluation.downstream.offline_scoring import answer_requests

    if out.resolve() == requests.resolve():
        refuse(f"OUT: {out} is the file of requests; choose another file for the scores")
    with user_errors(), task_bar() as on_progress:
        found = answer_requests(
            run,
            requests,
            out,
            checkpoint=checkpoint,
            device=device,
            precision=precision,
            with_loss=not no_loss,
            fresh=fresh,
            on_progress=on_progress,
            on_note=note,
        )
    table = Table("task", Column("requests", justify="right"), Column("time", justify="right"))
    for name, scores in found.scores.items():
        table.add_row(table_cell(name), f"{len(scores):,}", duration(found.model["seconds"][name]))
    Console(highlight=False).print(table)
    typer.echo(
        f"Scores: {printable_lines(str(out))}. Next, on the machine with lm-eval: coupled-adam eval score RUN "
        f"{shlex.quote(printable_lines(out.name))} (add --task-data if `eval requests` had it)"
    )


def score(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN] SCORES",
            help="Run folder of the evaluated model (only its config.toml is read), and the file written by "
            "`eval answer`. RUN is optional with --out.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Tasks to compute.  [default: all tasks in the file]")
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of local task files, as in `eval requests`.")
    ] = None,
    tokenizer: options.Tokenizer = None,
    out: options.Out = None,
    fresh: options.Fresh = False,
    as_json: options.AsJson = False,
) -> None:
    """Compute the metrics from the scores and write them to the run folder (two machines, step 3).

    The results are the same as those of `coupled-adam eval RUN`. Requires the extra `eval` of this package, but no
    checkpoint, no corpus and no GPU.

    Try: `coupled-adam eval score RUN scores.safetensors`,
    `coupled-adam eval score scores.safetensors --out results.json`
    """
    from coupled_adam.evaluation.downstream.offline_scoring import evaluate_scores
    from coupled_adam.paper_tasks import parse_tasks

    if len(files) > 2:
        refuse(f"expected [RUN] SCORES, got {len(files)} paths: {' '.join(map(str, files))}")
    run, scores = (None, files[0]) if len(files) == 1 else files
    with user_errors():
        if scores.is_dir():
            raise UserError(f"{scores} is a folder; pass RUN, then SCORES, the file written by `eval answer`")
        with task_bar() as on_progress:
            found, path = evaluate_scores(
                scores,
                tasks=None if tasks is None else parse_tasks(tasks),
                run=run,
                out=out,
                task_data=task_data,
                tokenizer=tokenizer,
                fresh=fresh,
                on_progress=on_progress,
                on_note=note,
            )
        show(found, path, as_json=as_json)
        if run is not None and out is None:
            tell_study(run, path, found, aside=as_json)
