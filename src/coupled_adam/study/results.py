"""Results of a study: one `Result` per finished run, kept in its run folder and collected in `results.jsonl`.

Every run writes its own `evaluation.json`; `results.jsonl` is rewritten from those, sorted. So runs that finish at the
same time, on one machine or several, cannot corrupt each other's rows, and a lost file can be restored.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_json, read_text, write_whole
from coupled_adam.metrics import METRICS, TASK_LIMIT, TASKS, other_tasks, up_to_date
from coupled_adam.study.trials import Trial

RESULTS_FILE = "results.jsonl"
EVALUATION = "evaluation.json"
EMBEDDINGS_FILE = "embeddings.npz"
RUNS = "runs"
RUN_PARTS = (RUNS, "*", "seed-*")
"""Pattern of run folders in a study folder."""


@dataclass(frozen=True)
class Result:
    """One finished run."""

    study: str
    """Name of the study."""
    cell: str
    """Shared by runs that differ only in the seed, such as "125M-5B-coupled"."""
    seed: int
    optimizer: str
    """Name of the optimizer variant in the study: "standard", "coupled", "coupled n=2", "sgd f=300"."""
    settings: dict[str, Any]
    """The [optimizer] section of the config, and "tied"."""
    model: str
    """Name of the model in the study, such as "125M"."""
    parameters: int
    tokens: int
    """Data size D in tokens."""
    metrics: dict[str, float | None]
    """Metrics; those not measured are None or absent. Metrics of an untied input table have the prefix `input_`."""
    seconds: float
    """Training and evaluation time, over all starts."""
    tokens_per_second: float | None
    energy_joules: float | None
    config_hash: str
    """Hash of the settings that determine what the run computes."""
    package: str
    commit: str | None
    torch: str
    device: str
    run: str
    """The run folder, relative to the study folder it was trained in."""
    loss_split: str = "test"
    """Split of `loss`: "test", or "val" if the corpus has no test split."""
    trial: Trial | None = None
    """The run's role in a selection; None if it has none."""
    folder: Path = field(default=Path(), compare=False)
    """The study folder the row was read from. Not stored, because the folder can be moved."""

    @property
    def is_candidate(self) -> bool:
        """Whether the run only served to select a setting and is not reported."""
        return self.trial is not None and self.trial.is_candidate

    @property
    def run_folder(self) -> Path:
        """Folder of the run, with its curves (metrics.jsonl), embeddings.npz and checkpoints."""
        return self.folder / self.run


STORED = tuple(each.name for each in fields(Result) if each.name != "folder")
_NUMBERS = ("seconds", "tokens_per_second", "energy_joules")
_OPEN = ("tokens_per_second", "energy_joules", "commit", "trial")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "seed": int,
    "parameters": int,
    "tokens": int,
    "settings": dict,
    "metrics": dict,
    "trial": dict,
    **dict.fromkeys(_NUMBERS, (int, float)),
}


def to_json(result: Result) -> str:
    """Write one row as a line of JSON; non-finite numbers become null."""
    values = {name: value for name, value in asdict(result).items() if name in STORED}
    values["metrics"] = {name: _finite(value) for name, value in values["metrics"].items()}
    return json.dumps(values, allow_nan=False)


def from_json(text: str, folder: Path, source: str) -> Result:
    """Read what `to_json` wrote.

    Args:
        text: the JSON.
        folder: the study folder.
        source: name of the text in error messages.
    """
    remedy = "run the study again to rewrite it"
    try:
        values = parse_json(text, source)
        json.dumps(values, ensure_ascii=False).encode()  # JSON can spell a lone surrogate, but UTF-8 cannot
    except UnicodeEncodeError:
        raise UserError(f"{source}: invalid Unicode text; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{error}; {remedy}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source}: expected an object with the keys {', '.join(STORED)}; {remedy}")
    for name, value in (("loss_split", "test"), ("trial", None)):
        values.setdefault(name, value)  # missing in old rows
    missing = [name for name in STORED if name not in values]
    if missing:
        raise UserError(f"{source}: {', '.join(missing)} missing; {remedy}")
    for name in STORED:
        if not (values[name] is None and name in _OPEN) and not _is_kind(values[name], _KINDS.get(name, str)):
            raise UserError(f"{source}: invalid value {name} = {_short(values[name])}; {remedy}")
    values["metrics"] = up_to_date(values["metrics"])
    for name, value in values["metrics"].items():
        if value is not None and not _is_kind(value, (int, float)):
            raise UserError(f"{source}: metric {name!r} is {_short(value)}; expected a finite number; {remedy}")
    if values["trial"] is not None:
        try:
            values["trial"] = Trial.from_json(values["trial"])
        except ValueError as error:
            raise UserError(f"{source}: trial = {_short(values['trial'])}: {error}; {remedy}") from None
    if not _lies_inside(values["run"]):
        raise UserError(f"{source}: run = {_short(values['run'])} is outside the study folder; {remedy}")
    return Result(**{name: values[name] for name in STORED}, folder=folder)


def _is_kind(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a value from JSON has a type; booleans and non-finite numbers do not count as numbers."""
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    return isinstance(value, kind)


def _lies_inside(run: str) -> bool:
    """Whether the path of a run stays inside the study folder."""
    path = PurePosixPath(run)
    return not path.is_absolute() and ".." not in path.parts


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_results(study_folder: Path) -> list[Result]:
    """Read the finished runs of a study folder, in the order of cells and seeds.

    Args:
        study_folder: written by `coupled-adam study run`.
    """
    path = study_folder / RESULTS_FILE
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise UserError(
            f"{study_folder}: {RESULTS_FILE} is missing; pass a study folder with at least one finished run"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return [from_json(line, study_folder, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def merge_results(study_folders: Sequence[Path]) -> list[Result]:
    """Read the finished runs of several study folders as one list.

    If several folders hold a run (same cell, seed and settings), the first wins, and metrics that it lacks are added
    from the others. The same cell and seed with other settings raises a ValueError that names both.
    """
    found: dict[tuple[str, int], Result] = {}
    conflicts = []
    for result in (result for folder in study_folders for result in read_results(folder)):
        key = result.cell, result.seed
        other = found.setdefault(key, result)
        if other.config_hash == result.config_hash:
            found[key] = completed(other, result)
        else:
            conflicts.append(
                f"cell {result.cell}, seed {result.seed}: settings {other.config_hash} in {other.folder}, "
                f"{result.config_hash} in {result.folder}"
            )
    if conflicts:
        raise UserError(
            "these runs have the same name but different settings; report the folders one by one:\n"
            + "\n".join(conflicts)
        )
    return list(found.values())


def completed(result: Result, other: Result) -> Result:
    """Add metrics that the same run has in another folder. Existing values stay, except that tasks evaluated on fewer
    documents are replaced together: accuracies on all and on some documents must not be mixed."""
    found = [result.metrics, other.metrics]
    tasks = {metric.key for metric in (*TASKS, METRICS["acc"], *other_tasks(found))}
    documents = [_documents(metrics, tasks) for metrics in found]
    if documents[0] != documents[1]:
        fewer = documents.index(min(documents))
        found[fewer] = {key: value for key, value in found[fewer].items() if key not in tasks | {TASK_LIMIT}}
    own = {key: value for key, value in found[0].items() if value is not None}
    lacks_loss = result.metrics.get("loss") is None and other.metrics.get("loss") is not None
    return replace(
        result,
        metrics={**found[0], **found[1], **own},
        loss_split=other.loss_split if lacks_loss else result.loss_split,
    )


def _documents(metrics: Mapping[str, float | None], tasks: Iterable[str]) -> float:
    """Number of documents evaluated per task: infinity for all, 0 without tasks."""
    if all(metrics.get(task) is None for task in tasks):
        return 0.0
    limit = metrics.get(TASK_LIMIT)
    return math.inf if limit is None else limit


def read_evaluation(run_folder: Path, study_folder: Path) -> Result | None:
    """Read the result in a run folder; None if it is missing or invalid."""
    path = run_folder / EVALUATION
    try:
        return from_json(read_text(path), study_folder, str(path))
    except (OSError, ValueError):
        return None


def write_evaluation(result: Result) -> None:
    """Write a result to its run folder."""
    write_whole(result.run_folder / EVALUATION, to_json(result) + "\n")


def gather_results(
    study_folder: Path, run_folders: Iterable[Path], trials: Mapping[Path, Trial | None] | None = None
) -> list[Result]:
    """Write results.jsonl from the evaluation.json of the given run folders, in their order.

    Args:
        study_folder: where to write.
        run_folders: of the study; those without a result are skipped.
        trials: by run folder, as the selections stand now; None to keep the stored ones.
    """
    found = [read_evaluation(run_folder, study_folder) for run_folder in run_folders]
    results = [result for result in found if result is not None]
    results = [replace(result, trial=(trials or {}).get(result.run_folder, result.trial)) for result in results]
    write_whole(study_folder / RESULTS_FILE, "".join(to_json(result) + "\n" for result in results))
    return results


def add_metrics(run_folder: Path, metrics: dict[str, float | None]) -> Path | None:
    """Add metrics that were measured later to the result of a run, and rewrite the results of its study.

    Args:
        run_folder: any run.
        metrics: by key; existing ones are replaced. Tasks must cover all documents.

    Returns:
        The study folder; None if the run is not part of a study or has no result.
    """
    run_folder = run_folder.resolve()
    study_folder = run_folder.parents[len(RUN_PARTS) - 1] if len(run_folder.parts) > len(RUN_PARTS) else run_folder
    result = read_evaluation(run_folder, study_folder)
    if result is None or result.run_folder != run_folder:
        return None
    of_tasks = {metric.key for metric in TASKS}
    added, known = metrics.keys() & of_tasks, result.metrics.keys() & of_tasks
    if added and added >= known:
        metrics = {**metrics, TASK_LIMIT: None}
    write_evaluation(replace(result, metrics={**result.metrics, **metrics}))
    # The rows keep their order; runs whose row was lost come last.
    rows = read_results(study_folder) if (study_folder / RESULTS_FILE).is_file() else []
    others = sorted(path.parent for path in study_folder.glob(f"{'/'.join(RUN_PARTS)}/{EVALUATION}"))
    gather_results(study_folder, dict.fromkeys([*(row.run_folder for row in rows), *others]))
    return study_folder


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
