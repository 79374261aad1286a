"""Results of an evaluation, as JSON in the model's folder, rewritten after every task.

    downstream.json                         the newest checkpoint, on all documents
    downstream-step-100.json                the checkpoint of step 100
    downstream-limit-50.json                on the first 50 documents of each task

All results of a file belong to one model in one precision, with one tokenizer and one version of lm-eval. Results of
another are replaced, never mixed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, write_whole
from coupled_adam.evaluation.held_out_loss import SplitLoss
from coupled_adam.evaluation.loss_by_frequency import FrequencyBin
from coupled_adam.paper_tasks import MEAN, METRIC, PAPER_TASKS, mean_accuracy

FORMAT = 1
REMEDY = "evaluate again with --fresh"


@dataclass(frozen=True)
class TaskResult:
    """Result of a model on one task."""

    metrics: dict[str, float]
    """By lm-eval's names: acc, acc_stderr, acc_norm, perplexity, ..."""
    examples: int
    """Number of evaluated documents."""
    documents: int
    """Number of documents in the task."""
    version: str
    """Version of the task in lm-eval."""
    data: str | None
    """SHA-256 of the local file; None for lm-eval's own dataset."""
    seconds: float


@dataclass(frozen=True)
class LossResult:
    """The loss over a whole split."""

    loss: float
    """Mean over all targets, in nats."""
    standard_error: float | None
    targets: int
    split: str
    """"test", or "val" if the corpus has no test split."""
    corpus: str
    """Fingerprint of the corpus."""
    seconds: float
    by_frequency: tuple[FrequencyBin, ...] | None = None
    """Loss in ten bins of token frequency, most frequent first; None in files of version 0.1.0."""

    @classmethod
    def of(cls, found: SplitLoss, split: str, corpus: str, seconds: float) -> "LossResult":
        """Make a result from a loss, its split and its corpus."""
        return cls(found.loss, found.standard_error, found.targets, split, corpus, seconds, found.by_frequency)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LossResult":
        """Read the JSON values of `asdict`.

        Raises:
            UserError: the values are not those of a loss.
        """
        try:
            bins = values.get("by_frequency")
            read = None if bins is None else tuple(FrequencyBin(**each) for each in bins)
            return cls(**{**values, "by_frequency": read})
        except (TypeError, AttributeError) as error:
            raise UserError(f"loss: {error}; {REMEDY}") from None


@dataclass(frozen=True)
class Subject:
    """The evaluated model and settings. Results of different subjects are never in one file."""

    name: str
    """Name of the run or of the folder."""
    weights: str
    """Hash of the weights."""
    step: int | None
    """Step of the checkpoint; None for a Hugging Face folder."""
    precision: str
    """"float32" or "bf16"."""
    tokenizer: str | None
    """SHA-256 of its tokenizer.json; None without tasks."""
    lm_eval: str | None
    """Version of lm-eval; None without tasks."""
    limit: int | None
    """Only the first documents of each task were evaluated; None for all."""

    def fits(self, other: "Subject") -> bool:
        """Whether the results of both can be in one file; a missing tokenizer or version matches any."""
        own, others = asdict(self), asdict(other)
        unknown = {key for key in ("tokenizer", "lm_eval") if None in (own[key], others[key])}
        return all(own[key] == others[key] for key in own.keys() - unknown - {"name"})


@dataclass(frozen=True)
class Downstream:
    """All results of one model."""

    subject: Subject
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    """By lm-eval's names."""
    loss: LossResult | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    """Package, torch and device of the last evaluation."""

    @property
    def accuracy(self) -> float | None:
        """The paper's Acc: the mean of the seven accuracies; None if one is missing."""
        return mean_accuracy(
            {name: task.metrics[METRIC] for name, task in self.tasks.items() if METRIC in task.metrics}
        )

    @property
    def accuracy_error(self) -> float | None:
        """Standard error of Acc, from the standard errors of the tasks."""
        if self.accuracy is None:
            return None
        errors = [self.tasks[task.name].metrics.get(f"{METRIC}_stderr", math.nan) for task in PAPER_TASKS]
        error = math.sqrt(sum(error**2 for error in errors)) / len(errors)
        return error if math.isfinite(error) else None  # undefined for a single document

    def metrics(self) -> dict[str, float | None]:
        """The finished ones of the seven accuracies, and their mean, by their keys in a study's results."""
        found: dict[str, float | None] = {
            task.key: self.tasks[task.name].metrics[METRIC] for task in PAPER_TASKS if task.name in self.tasks
        }
        return found if self.accuracy is None else {**found, MEAN: self.accuracy}

    def with_task(self, name: str, result: TaskResult) -> "Downstream":
        """Add the result of a task."""
        return replace(self, tasks={**self.tasks, name: result})


def file_name(checkpoint: int | None, limit: int | None) -> str:
    """File name for a checkpoint (None for the newest) and a limit.

    Example:
        >>> file_name(None, None), file_name(100, 50)
        ('downstream.json', 'downstream-step-100-limit-50.json')
    """
    parts = ["downstream"]
    parts += [] if checkpoint is None else [f"step-{checkpoint}"]
    parts += [] if limit is None else [f"limit-{limit}"]
    return "-".join(parts) + ".json"


def read_downstream(folder: Path, *, checkpoint: int | None = None, limit: int | None = None) -> Downstream | None:
    """Read the results in the folder of a run or model; None if there are none.

    Raises:
        ValueError: the file is damaged or has another format.
    """
    return read_file(folder / file_name(checkpoint, limit))


def read_file(path: Path) -> Downstream | None:
    """Read the results in a file; None if it is missing."""
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{error}; {REMEDY}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
    try:
        if values["format"] != FORMAT:
            raise UserError(f"format is {values['format']!r}, expected {FORMAT}")
        return Downstream(
            Subject(**values["subject"]),
            {str(name): _task(task) for name, task in values["tasks"].items()},
            None if values["loss"] is None else LossResult.from_json(values["loss"]),
            dict(values["environment"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not results of `coupled-adam eval` ({error}); {REMEDY}") from None


def write_file(path: Path, found: Downstream) -> None:
    """Write results atomically."""
    values = {"format": FORMAT, "acc": found.accuracy, "acc_stderr": found.accuracy_error, **to_json(found)}
    write_whole(path, json.dumps(values, indent=1) + "\n")


def to_json(found: Downstream) -> dict[str, Any]:
    """Convert results to JSON values; non-finite numbers, such as an infinite perplexity, become null."""
    values = asdict(found)
    for task in values["tasks"].values():
        task["metrics"] = {name: value if math.isfinite(value) else None for name, value in task["metrics"].items()}
    return values


def _task(values: Mapping[str, Any]) -> TaskResult:
    metrics = {str(name): math.nan if value is None else float(value) for name, value in values["metrics"].items()}
    if METRIC in metrics and not 0 <= metrics[METRIC] <= 1:
        raise UserError(f"{METRIC} is {metrics[METRIC]}, expected 0 to 1")
    return TaskResult(**{**values, "metrics": metrics})
