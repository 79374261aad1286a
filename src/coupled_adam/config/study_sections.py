"""The parts of a study file: every key of a model, of an optimizer, of what is evaluated, of the report and of a
cluster's jobs.

The text under a key says what it means. What is wrong between keys is found in `cross_checks`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from coupled_adam.config.field_types import (
    Count,
    Expected,
    Name,
    Number,
    Positive,
    Seed,
    Share,
    Steps,
    Text,
    Tokens,
    WholeNumber,
)
from coupled_adam.config.schema import Section
from coupled_adam.paper_tasks import with_those_of_paper


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _flat(value: Any) -> Any:
    """`"model.tied" = false` and `model.tied = false` (a table in a table, for TOML) mean the same."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= (
            {f"{key}.{name}": each for name, each in _flat(inner).items()} if isinstance(inner, dict) else {key: inner}
        )
    return flat


def _task_names(value: Any) -> Any:
    """Names from a list, from text with commas as --set gives it, or the paper's seven; each once."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return value
    return with_those_of_paper(names)


Settings = Annotated[
    dict[str, Any],
    BeforeValidator(_flat),
    Expected('settings of a training config by their names, such as { "optimizer.lr" = 1e-3, "model.tied" = false }'),
]
Label = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=, -]*$"),
    Expected("letters, digits, spaces and . _ + = , - only, beginning with a letter or digit"),
]
Axis = BeforeValidator(_as_list)
TokensAxis = Annotated[
    list[Tokens], Axis, Field(min_length=1), Expected('a number of tokens such as "5B", or a list of them')
]


TaskNames = Annotated[
    list[Text],
    BeforeValidator(_task_names),
    Field(min_length=1),
    Expected('"paper", which is its seven tasks, or names of lm-eval such as ["arc_easy", "race"]'),
]


Candidates = Annotated[
    dict[str, list[int | float]],
    BeforeValidator(_flat),
    Expected('one setting with the numbers to try, such as { "optimizer.lr" = [1e-3, 2e-3, 4e-3] }'),
]
ExponentAxis = Annotated[list[Share], Axis, Field(min_length=1), Expected("a number from 0 to 1 or a list of them")]


class ModelAxis(Section):
    """One entry of [[models]]: a size N."""

    name: Name
    """What it is called in folders and tables, such as 125M."""
    base: Text | None = None
    """Preset or TOML file to start from; none: that of the study."""
    tokens: TokensAxis | None = None
    """Data sizes D of this model; none: those of the study."""
    set: Settings = Field(default_factory=dict)
    """Settings of this model."""


class OptimizerAxis(Section):
    """One entry of [[optimizers]]: one way to train the embeddings, or one for each value of a list."""

    name: Label | None = None
    """What it is called in folders and tables; none: standard, coupled, coupled n=2, partial y=0.25 mean-free,
    sgd f=300, ..."""
    embeddings: Literal["adamw", "coupled", "sgd"]
    """Optimizer of the embeddings."""
    lr: Annotated[list[Positive], Axis, Field(min_length=1), Expected("a number above 0 or a list of them")] | None = (
        None
    )
    """Highest learning rate of the whole model, or a list of them: the loss over the learning rate."""
    scale_exponent: (
        Annotated[list[Number], Axis, Field(min_length=1), Expected("a number or a list of numbers")] | None
    ) = None
    """coupled only: n, or a list of them."""
    row_exponent: ExponentAxis | None = None
    """coupled only: y, or a list of them."""
    column_exponent: ExponentAxis | None = None
    """coupled only: x, or a list of them."""
    mean_free: bool | None = None
    """coupled only: subtract the mean from every update."""
    row_exponent_start: Share | None = None
    """coupled only: where an annealed row exponent begins."""
    anneal: Steps | None = None
    """coupled only: how long it takes to row_exponent."""
    sgd_factor: (
        Annotated[list[Positive], Axis, Field(min_length=1), Expected("a number above 0 or a list of them")] | None
    ) = None
    """sgd only, and needed there: f, or a list of them."""
    couple: Literal["output", "input", "all"] | None = None
    """Which embeddings are meant, in an untied model."""
    centre: bool | None = None
    """Subtract the mean embedding after each step."""
    set: Settings = Field(default_factory=dict)
    """Other settings, such as { "model.tied" = false }."""
    select: Candidates = Field(default_factory=dict)
    """What [select] tries for this optimizer instead of its own values: one setting, and as many values."""


class SelectSection(Section):
    """A setting that is chosen for each optimizer, model and data size by validation loss, on a seed of its own. The
    runs with the other seeds then use the winner."""

    values: Candidates = Field(default_factory=dict)
    """The setting and the values to try, ascending, such as { "optimizer.lr" = [1e-3, 2e-3, 4e-3] }; empty: nothing is
    selected."""
    trial_seed: Seed = 0
    """Seed of the candidates; not among the study's seeds, which are reported."""
    extend: WholeNumber = 2
    """Where the winner is the smallest or the largest value, one more is tried beyond it, by the ratio of the last two,
    up to so many times. 0: never; the winner is then only flagged."""


class EvaluationSection(Section):
    """What is measured of a trained model. Loss and embeddings during the training are always recorded."""

    test_loss: bool = True
    """Mean loss over the whole test split."""
    loss_by_frequency: bool | None = None
    """Loss and calibration in ten bins of token frequency. none: wherever the test loss is measured, which takes one
    pass for both; a result that has its loss already is finished without it. true: of those results too."""
    quantised_loss: bool = False
    """Test loss with the vocabulary tables rounded to int8 and int4, with one scale a row and one for 32 columns."""
    measures: bool = True
    """All measures of the embeddings."""
    wordsim: Text | None = None
    """Folder of word-similarity benchmarks, or "download"; none: without them, and without r_cos."""
    tasks: TaskNames | None = None
    """Downstream tasks by their names in lm-eval, or "paper" for its seven; none: no tasks."""
    task_data: Text | None = None
    """Folder of local files for the tasks; none: lm-eval's own datasets, which are downloaded."""
    task_limit: Count | None = None
    """Documents of each task, from the first, for a try; none: all."""
    theory: bool = False
    """The paper's theory, measured at ten milestones of each run, or at those that the config keeps."""
    theory_batches: Count = 20
    """Batches at each of them."""


class ReportSection(Section):
    """How the report is arranged, and what it says beside the loss."""

    lead: Literal["loss", "embeddings"] = "loss"
    """What the verdict, the tables and the page begin with."""
    loss_note: Text | None = None
    """What a reader has to know of the loss, said beside it; none: nothing."""


DEFAULT_REPORT = ReportSection()


class SlurmSection(Section):
    """What `--launcher slurm` asks the cluster for, for each run."""

    hours: Positive = 24.0
    """Time limit. A run that reaches it is submitted again and goes on from its last checkpoint: what came since is
    lost, so set `checkpoints.minutes` well below it."""
    gpus: Count = 1
    """GPUs of a run; with more than one it is started by torchrun."""
    cpus: Count = 8
    """CPU cores of a run."""
    memory_gb: Positive | None = None
    """Memory; none: what the cluster gives."""
    partition: Text | None = None
    """Partition; none: the cluster's default."""
    account: Text | None = None
    """Account; none: the user's default."""
    options: Settings = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as { qos = "long" }."""
