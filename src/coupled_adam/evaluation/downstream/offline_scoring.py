"""Evaluate on two machines: one has lm-eval and the tasks, the other the model and the GPU.

    here     write_task_requests    write the requests of the tasks as tokens
    there    answer_requests        write their scores; needs only torch and this package
    here     evaluate_scores        compute the metrics

The scores identify the model, so the results are the same as those of an evaluation on one machine.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coupled_adam import __version__
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import require_writable
from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.downstream.evaluate import (
    OnNote,
    OnProgress,
    OpenedRun,
    ResultsFile,
    add_tasks,
    environment,
    run_loss,
)
from coupled_adam.evaluation.downstream.harness_model import answering_model, looked_up, written_down
from coupled_adam.evaluation.downstream.requests_file import (
    RequestFile,
    ScoreFile,
    TokenRequest,
    read_requests,
    read_scores,
    write_requests,
    write_scores,
)
from coupled_adam.evaluation.downstream.scoring import Precision
from coupled_adam.evaluation.downstream.task_results import Downstream, LossResult, Subject, file_name
from coupled_adam.evaluation.run_tokenizer import tokenizer_of
from coupled_adam.evaluation.weights import run_config
from coupled_adam.tokenizer import Tokenizer


def write_task_requests(
    file: Path,
    tokens: Tokenizer,
    *,
    tasks: Sequence[str],
    task_data: Path | None,
    limit: int | None,
    on_progress: OnProgress = lambda *_: None,
) -> RequestFile:
    """Write all requests of some tasks as tokens.

    Args:
        file: to write.
        tokens: the tokenizer of the models to evaluate.
        tasks: names of lm-eval tasks.
        task_data: folder of local files; None for lm-eval's own datasets.
        limit: use only the first documents of each task; None for all.
        on_progress: called at the start and end of a task.
    """
    if not tasks:
        raise UserError("no tasks to write requests for; pass --tasks")
    harness.check_tasks(tasks, task_data)
    require_writable(file)
    asked: dict[str, list[TokenRequest]] = {}
    about: dict[str, Any] = {}
    for name in tasks:
        on_progress(name, 0, 1)
        task = harness.load_task(name, task_data)
        found: dict[TokenRequest, None] = {}
        harness.evaluate_task(answering_model(tokens, written_down(found)), name, task, limit)
        asked[name] = list(found)
        about[name] = {"version": str(task.VERSION), "data": harness.data_hash(name, task_data)}
        on_progress(name, 1, 1)
    settings = {
        "package": __version__,
        "lm_eval": harness.lm_eval_version(),
        "tokenizer": tokens.name,
        "tokenizer_sha256": tokens.sha256,
        "vocabulary_size": tokens.size,
        "limit": limit,
        "tasks": about,
    }
    requests = RequestFile(asked, settings)
    write_requests(file, requests)
    return requests


def answer_requests(
    run: Path,
    requests_file: Path,
    scores_file: Path,
    *,
    checkpoint: int | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    with_loss: bool = True,
    fresh: bool = False,
    on_progress: OnProgress = lambda *_: None,
    on_note: OnNote = lambda _: None,
) -> ScoreFile:
    """Score all requests of a file with the model of a run. Scores are written after each task, so a stopped call can
    be resumed.

    Args:
        run: the run folder.
        requests_file: from `write_task_requests`.
        scores_file: to write.
        checkpoint, device, precision, with_loss, on_progress, on_note: as in `evaluate_run`.
        fresh: repeat finished tasks.
    """
    requests = read_requests(requests_file)
    opened = OpenedRun.of(run, checkpoint, device, precision, on_note)
    rows, size = opened.config.rows, int(requests.settings.get("vocabulary_size", 0))
    if size > rows:
        raise UserError(
            f"{requests_file} was written with {requests.settings.get('tokenizer')}, a tokenizer with {size} tokens, "
            f"but the table of {run} has {rows} rows: the vocabulary does not match; write it with the run's tokenizer"
        )
    require_writable(scores_file)
    made = requests.settings
    subject = opened.subject(made.get("tokenizer_sha256"), made.get("lm_eval"), made.get("limit"))
    scores = None if fresh else _scores_so_far(scores_file, requests, subject, on_note)
    if scores is None:
        about = {
            "subject": asdict(subject),
            "checkpoint": checkpoint,
            "run": _run_identity(run),
            "environment": environment(opened.device),
            "seconds": {},
            "loss": None,
        }
        scores = ScoreFile.of(requests, {}, about)
    model = scores.model
    if with_loss:
        stored = None if model["loss"] is None else LossResult.from_json(model["loss"])
        loss = run_loss(opened, on_progress, on_note, stored)
        model = {**model, "loss": None if loss is None else asdict(loss)}
    for name in [name for name in requests.tasks if name not in scores.scores]:
        started = time.monotonic()
        on_progress(name, 0, len(requests.tasks[name]))
        try:
            answers = opened.score(name, requests.tasks[name], on_progress)
        except ValueError as error:
            raise UserError(f"task {name}: {error}") from None
        model = {**model, "seconds": {**model["seconds"], name: round(time.monotonic() - started, 3)}}
        added = ScoreFile.of(requests, {name: answers}, model)
        scores = replace(added, scores={**scores.scores, **added.scores})
        write_scores(scores_file, scores)
    if scores.model != model or not scores_file.is_file():
        scores = replace(scores, model=model)
        write_scores(scores_file, scores)
    return scores


def evaluate_scores(
    scores_file: Path,
    *,
    tasks: Sequence[str] | None = None,
    run: Path | None,
    out: Path | None,
    task_data: Path | None,
    tokenizer: str | None = None,
    fresh: bool = False,
    on_progress: OnProgress = lambda *_: None,
    on_note: OnNote = lambda _: None,
) -> tuple[Downstream, Path]:
    """Compute the metrics from a file of scores.

    Args:
        scores_file: from `answer_requests`.
        tasks: some of those in the file; None for all.
        run: folder of the scored run, for the results; needs no checkpoints. None to write to `out`.
        out: file of the results; None for the run folder.
        task_data: same as for the requests.
        tokenizer: of the requests, if it is neither in the run nor found by its name.
        fresh: repeat finished tasks.
        on_progress, on_note: as in `evaluate_run`.

    Returns:
        The results and their file.
    """
    scores = read_scores(scores_file)
    try:
        subject = Subject(**scores.model["subject"])
        loss = None if scores.model["loss"] is None else LossResult.from_json(scores.model["loss"])
        identity, where, seconds = (scores.model[key] for key in ("run", "environment", "seconds"))
    except (KeyError, TypeError) as error:
        raise UserError(f"{scores_file}: does not identify its model ({error}); score the requests again") from None
    if run is not None and _run_identity(run) != identity:
        raise UserError(
            f"{scores_file}: these scores are from the run {_described(identity)}, but the settings of {run}, "
            f"{_described(_run_identity(run))}, differ; pass the folder of the run that was scored"
        )
    if run is None and out is None:
        raise UserError("pass the folder of the run that was scored, or a file for the results with --out")
    left = [name for name in scores.settings.get("tasks", ()) if name not in scores.scores]
    if tasks is None and left:
        on_note(f"{scores_file} lacks {', '.join(left)}: `eval answer` was stopped; run it again to resume")
    tasks = list(scores.scores) if tasks is None else tasks
    missing = [name for name in tasks if name not in scores.scores]
    if missing:
        raise UserError(f"{scores_file}: has no scores of {', '.join(missing)}; it has {', '.join(scores.scores)}")
    harness.check_tasks(tasks, task_data)
    if subject.lm_eval != harness.lm_eval_version():
        raise UserError(
            f"{scores_file}: its requests were written with lm-eval {subject.lm_eval}, but {harness.lm_eval_version()} "
            "is installed here; install the same version, or write the requests again"
        )
    tokens = _tokenizer_of_requests(scores, run, tokenizer)
    path = out or Path(str(run)) / file_name(scores.model.get("checkpoint"), subject.limit)
    results = ResultsFile.open(path, subject, where, fresh=fresh, tasks=tasks, on_note=on_note)
    results = add_tasks(
        results.with_loss(loss),
        tasks,
        task_data,
        lambda task: answering_model(tokens, looked_up(scores, task)),
        on_progress,
        seconds,
    )
    return results.found, path


def _scores_so_far(path: Path, requests: RequestFile, subject: Subject, on_note: OnNote) -> ScoreFile | None:
    """Existing scores of the same requests by the same model."""
    if not path.is_file():
        return None
    scores = read_scores(path)
    if scores.requests_digest == requests.digest and scores.model.get("subject") == asdict(subject):
        return scores
    on_note(f"{path} has scores of other requests or of another model; replacing them")
    return None


def _run_identity(run: Path) -> dict[str, Any]:
    """Settings that identify a run without its weights."""
    config = run_config(run)
    return {
        "name": config.name,
        "seed": config.seed,
        "optimizer": config.optimizer.model_dump(),
        "model": config.model.model_dump(),
        "tokens": config.training.tokens,
    }


def _described(identity: dict[str, Any]) -> str:
    """Short description of a run; its name alone is often that of the preset."""
    return f"{identity['name']!r} ({identity['optimizer']['embeddings']}, seed {identity['seed']})"


def _tokenizer_of_requests(scores: ScoreFile, run: Path | None, tokenizer: str | None) -> Tokenizer:
    """Open the tokenizer that the requests were written with."""
    written_with = scores.settings.get("tokenizer")
    try:
        tokens = tokenizer_of(tokenizer or run or str(written_with))
    except (UserError, OSError) as error:  # the run or the requests come from another machine
        if tokenizer is not None:
            raise
        raise UserError(f"{error}. The requests were written with {written_with}, the one for --tokenizer") from None
    if tokens.sha256 != scores.settings.get("tokenizer_sha256"):
        raise UserError(
            f"the requests were written with the tokenizer {written_with}, not {tokens.name}; pass the former with "
            "--tokenizer"
        )
    return tokens
