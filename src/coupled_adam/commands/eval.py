"""`coupled-adam eval`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coupled_adam.base.errors import UserError
from coupled_adam.commands import eval_options as options
from coupled_adam.commands.eval_group import EvalGroup
from coupled_adam.commands.eval_offline import answer, requests, score
from coupled_adam.commands.eval_output import note, show, task_bar, tell_study
from coupled_adam.commands.refusal import refuse, user_errors

if TYPE_CHECKING:
    from coupled_adam.evaluation.downstream.task_results import Downstream

MODEL_IS_MISSING = "MODEL is missing; pass a run folder or a Hugging Face model folder"

app = typer.Typer(
    cls=EvalGroup, invoke_without_command=True, subcommand_metavar="| COMMAND ...", rich_markup_mode="markdown"
)
app.command()(requests)
app.command()(answer)
app.command()(score)


@app.callback()
def evaluate(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Run folder or Hugging Face model folder; if its name is also a command, write ./NAME.",
            show_default=False,
        ),
    ] = None,
    tasks: options.Tasks = None,
    limit: options.Limit = None,
    task_data: options.TaskData = None,
    checkpoint: options.Checkpoint = None,
    device: options.Device = None,
    precision: options.Precision = None,
    tokenizer: options.Tokenizer = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Prepared corpus for the test loss of a Hugging Face model.")
    ] = None,
    no_loss: options.NoLoss = False,
    out: options.Out = None,
    fresh: options.Fresh = False,
    as_json: options.AsJson = False,
    old_requests: Annotated[Path | None, typer.Option("--requests", hidden=True)] = None,
    old_answer: Annotated[Path | None, typer.Option("--answer", hidden=True)] = None,
    old_scores: Annotated[Path | None, typer.Option("--scores", hidden=True)] = None,
) -> None:
    """Evaluate a model: its test loss, and the paper's seven downstream tasks with lm-evaluation-harness.

    Acc is the mean of the seven accuracies. Run the same command to resume a stopped evaluation; finished tasks are not
    repeated. `--task-data DIR` reads the tasks from local files and needs no network.

    Requires the extra `eval` of this package, except for `eval answer` and for the loss alone (`--tasks none`).

    If the GPU machine has no lm-eval, run `coupled-adam eval requests RUN requests.safetensors` on another machine,
    then `coupled-adam eval answer RUN requests.safetensors scores.safetensors` on the GPU machine, then
    `coupled-adam eval score RUN scores.safetensors` on the other one again.

    Try: `coupled-adam eval runs/tiny-coupled-seed1 --tasks arc_easy,winogrande --limit 50`
    """
    if ctx.invoked_subcommand is not None:
        return
    if old_requests or old_answer or old_scores:
        _call_in_the_old_way(ctx)
        return
    if model is None:
        refuse(MODEL_IS_MISSING)
    from coupled_adam.paper_tasks import parse_tasks

    with user_errors():
        with task_bar() as on_progress:
            found, path = _evaluate_model(
                Path(model),
                checkpoint=checkpoint,
                tokenizer=tokenizer,
                data=data,
                with_loss=not no_loss,
                tasks=parse_tasks(tasks),
                task_data=task_data,
                limit=limit,
                device=device,
                precision=precision,
                fresh=fresh,
                out=out,
                on_progress=on_progress,
            )
        show(found, path, as_json=as_json)
        if out is None:
            tell_study(Path(model), path, found, aside=as_json)


def _evaluate_model(
    folder: Path,
    *,
    checkpoint: int | None,
    tokenizer: str | None,
    data: Path | None,
    with_loss: bool,
    **of_both: Any,
) -> "tuple[Downstream, Path]":
    """Evaluate a run or a Hugging Face folder.

    Args:
        folder: of the run or the model.
        checkpoint, tokenizer: runs only.
        data: Hugging Face folders only.
        with_loss: whether to evaluate the loss too.
        of_both: arguments that `evaluate_run` and `evaluate_folder` share.

    Returns:
        The results and the file they were written to.
    """
    from coupled_adam.evaluation.downstream.evaluate import evaluate_run
    from coupled_adam.evaluation.downstream.hub_folder import evaluate_folder, is_hugging_face_folder
    from coupled_adam.evaluation.downstream.task_results import file_name

    if not of_both["tasks"] and not with_loss:
        raise UserError("--tasks none with --no-loss leaves nothing to evaluate; remove one of them")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; pass a run folder or a model folder as written by `export`")
    if is_hugging_face_folder(folder):
        unfit = {"--checkpoint": checkpoint, "--tokenizer": tokenizer}
        for name, value in unfit.items():
            if value is not None:
                raise UserError(f"{name} is only for runs, and {folder} is a Hugging Face folder; remove {name}")
        if not of_both["tasks"] and data is None:
            raise UserError(f"--tasks none: the loss of {folder} needs a prepared corpus; pass --data DIR")
        found = evaluate_folder(folder, data=data if with_loss else None, on_note=note, **of_both)
    else:
        if data is not None:
            raise UserError(f"--data is only for Hugging Face folders; the run {folder} has its own corpus; remove it")
        found = evaluate_run(
            folder, checkpoint=checkpoint, tokenizer=tokenizer, with_loss=with_loss, on_note=note, **of_both
        )
    return found, of_both["out"] or folder / file_name(checkpoint, of_both["limit"])


def _call_in_the_old_way(ctx: typer.Context) -> None:
    """Call the sub-command that replaces --requests, --answer or --scores of version 0.1.0."""
    given = {name: value for name, value in ctx.params.items() if value is not None and value is not False}
    option_of = {param.name: param.opts[0] for param in ctx.command.params}
    steps = {name: given.pop(name) for name in ("old_requests", "old_answer", "old_scores") if name in given}
    if len(steps) > 1:
        refuse(f"{' and '.join(option_of[name] for name in steps)} are separate steps; pass one at a time")
    ((step, file),) = steps.items()
    model = given.pop("model", None)
    if model is None and step != "old_scores":
        refuse(MODEL_IS_MISSING)
    if step == "old_requests":
        words = ["requests", given.pop("tokenizer", model), file]
    elif step == "old_answer":
        words = ["answer", model, file, given.pop("out", None)]
    else:
        words = ["score", model, file]
    for name, value in given.items():
        words += [option_of[name], None if value is True else value]
    arguments = [str(word) for word in words if word is not None]
    note(f"{option_of[step]} will be removed in the next release; use: coupled-adam eval {shlex.join(arguments)}")
    command = ctx.command.get_command(ctx, arguments[0])  # type: ignore[attr-defined]
    with command.make_context(arguments[0], arguments[1:], parent=ctx) as inner:
        command.invoke(inner)
