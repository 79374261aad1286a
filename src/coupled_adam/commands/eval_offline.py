"""`coupled-adam eval requests`, `eval answer` and `eval score`: an evaluation where the GPU machine has no lm-eval."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import printable_lines
from coupled_adam.commands import eval_options as options
from coupled_adam.commands.eval_output import note, show, table_cell, task_bar, tell_study
from coupled_adam.commands.refusal import refuse, user_errors


def requests(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Whose tokenizer to use: folder of a run or of a Hugging Face model, a tokenizer.json, or `gpt2`.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File of the requests.", show_default=False)],
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    task_data: options.TaskData = None,
) -> None:
    """On two machines, 1: write what the tasks ask, as tokens.

    Try: `coupled-adam eval requests gpt2 requests.safetensors --tasks arc_easy,winogrande`. One file serves all models
    with this tokenizer; of a run, no checkpoint is needed.

    Then, on the machine with the GPU: `coupled-adam eval answer RUN requests.safetensors scores.safetensors`.

    Needs the extra `eval` of this package.
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
        f"{count:,} requests of {len(found.tasks)} tasks: {printable_lines(str(out))}. Score them where the model is: "
        f"coupled-adam eval answer RUN {shlex.quote(printable_lines(out.name))} scores.safetensors"
    )


def answer(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of the run whose model answers.", show_default=False)
    ],
    requests: Annotated[
        Path,
        typer.Argument(metavar="REQUESTS", help="File that `eval requests` wrote.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File of the scores.", show_default=False)],
    checkpoint: options.Checkpoint = None,
    device: options.Device = None,
    precision: options.Precision = None,
    no_loss: options.NoLoss = False,
    fresh: options.Fresh = False,
) -> None:
    """On two machines, 2: score the requests with the model of a run, where the GPU is.

    Try: `coupled-adam eval answer RUN requests.safetensors scores.safetensors`. The same command goes on where it was
    stopped. The test loss is measured too where the corpus of the run is.

    Then, where lm-eval is: `coupled-adam eval score RUN scores.safetensors`.

    Needs torch and this package: no extra, no tokenizer, no network.
    """
    from coupled_adam.evaluation.downstream.offline_scoring import answer_requests

    if out.resolve() == requests.resolve():
        refuse(f"OUT: {out} holds the requests; give the scores a file of their own")
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
    table = Table("task", Column("requests", justify="right"), Column("seconds", justify="right"))
    for name, scores in found.scores.items():
        table.add_row(table_cell(name), f"{len(scores):,}", f"{found.model['seconds'][name]:.1f}")
    Console(highlight=False).print(table)
    typer.echo(
        f"Scores: {printable_lines(str(out))}. For the metrics, where lm-eval is: coupled-adam eval score RUN "
        f"{shlex.quote(printable_lines(out.name))} (and --task-data, if the requests were written with it)"
    )


def score(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="[RUN] SCORES",
            help="Folder of the run that answered, which needs its config.toml alone; and the file that `eval answer` "
            "wrote. RUN may be left out where --out says where the results go.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Some of the tasks in the file.  [default: all]")
    ] = None,
    task_data: Annotated[Path | None, typer.Option(metavar="DIR", help="As it was given to `eval requests`.")] = None,
    tokenizer: options.Tokenizer = None,
    out: options.Out = None,
    fresh: options.Fresh = False,
    as_json: options.AsJson = False,
) -> None:
    """On two machines, 3: compute the metrics of the scores, and write them into the folder of the run.

    Try: `coupled-adam eval score RUN scores.safetensors`, or without a run:
    `coupled-adam eval score scores.safetensors --out results.json`.

    The results are the same as of `coupled-adam eval RUN`. Needs the extra `eval` of this package; no checkpoint, no
    corpus and no GPU.
    """
    from coupled_adam.evaluation.downstream.offline_scoring import evaluate_scores
    from coupled_adam.paper_tasks import parse_tasks

    if len(files) > 2:
        refuse(f"expected [RUN] SCORES, found {len(files)} paths: {' '.join(map(str, files))}")
    run, scores = (None, files[0]) if len(files) == 1 else files
    with user_errors():
        if scores.is_dir():
            raise UserError(f"{scores} is a folder; give RUN and then SCORES, the file that `eval answer` wrote")
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
