"""The sections of a study file: models, optimizers, selection, evaluation, report and cluster jobs.

The text under a key explains it. `cross_checks` finds conflicts between keys.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from coupled_adam.config.field_types import (
    Count,
    Expected,
    Fraction,
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
    """Flatten nested tables to dotted keys, so that `"model.tied" = false` and `model.tied = false` are equal."""
    if not isinstance(value, dict):
        return value
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= (
            {f"{key}.{name}": each for name, each in _flat(inner).items()} if isinstance(inner, dict) else {key: inner}
        )
    return flat


def _task_names(value: Any) -> Any:
    """Task names without duplicates, from a list, comma-separated text (from --set) or "paper"."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return value
    return with_those_of_paper(names)


Settings = Annotated[
    dict[str, Any],
    BeforeValidator(_flat),
    Expected('settings of a training config by key, such as { "optimizer.lr" = 1e-3, "model.tied" = false }'),
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
    Expected('"paper" for the paper\'s seven tasks, or lm-eval names such as ["arc_easy", "race"]'),
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
    """Name in folders and tables, such as 125M."""
    base: Text | None = None
    """Preset or TOML file to start from. none: the study's."""
    tokens: TokensAxis | None = None
    """Data sizes D of this model. none: the study's."""
    set: Settings = Field(default_factory=dict)
    """Settings of this model."""


class OptimizerAxis(Section):
    """One entry of [[optimizers]]: one way to train the embeddings, or several if a value is a list."""

    name: Label | None = None
    """Name in folders and tables. none: standard, coupled, coupled n=2, partial y=0.25 mean-free, sgd f=300, ..."""
    embeddings: Literal["adamw", "coupled", "sgd"]
    """Optimizer of the embeddings."""
    lr: Annotated[list[Positive], Axis, Field(min_length=1), Expected("a number above 0 or a list of them")] | None = (
        None
    )
    """Peak learning rate of the whole model, or a list to plot the loss over the learning rate."""
    scale_exponent: (
        Annotated[list[Number], Axis, Field(min_length=1), Expected("a number or a list of numbers")] | None
    ) = None
    """coupled only: n, or a list of values."""
    row_exponent: ExponentAxis | None = None
    """coupled only: y, or a list of values."""
    column_exponent: ExponentAxis | None = None
    """coupled only: x, or a list of values."""
    mean_free: bool | None = None
    """coupled only: subtract the mean from every update."""
    row_exponent_start: Share | None = None
    """coupled only: initial value of an annealed row exponent."""
    anneal: Steps | None = None
    """coupled only: length of the annealing from row_exponent_start to row_exponent."""
    sgd_factor: (
        Annotated[list[Positive], Axis, Field(min_length=1), Expected("a number above 0 or a list of them")] | None
    ) = None
    """sgd only, and required there: f, or a list of values."""
    couple: Literal["output", "input", "all"] | None = None
    """Which embeddings this optimizer trains, in an untied model."""
    centre: bool | None = None
    """Subtract the mean embedding after each step."""
    set: Settings = Field(default_factory=dict)
    """Other settings, such as { "model.tied" = false }."""
    select: Candidates = Field(default_factory=dict)
    """Candidates for this optimizer instead of those in [select]: one setting, with the same number of values."""


class SelectSection(Section):
    """A setting to select by validation loss on a separate seed, for each optimizer, model and data size. The runs with
    the study's seeds then use the best value."""

    values: Candidates = Field(default_factory=dict)
    """The setting and its candidate values, ascending, such as { "optimizer.lr" = [1e-3, 2e-3, 4e-3] }. Empty: no
    selection."""
    trial_seed: Seed = 0
    """Seed of the candidate runs; must not be one of the study's seeds, which are reported."""
    trial_fraction: Fraction = 1.0
    """Fraction of the training tokens that candidate runs use. 0.5 halves the cost of a selection, but the best value
    of a shorter run may differ."""
    extend: WholeNumber = 2
    """If the smallest or largest value wins, try one more beyond it, spaced by the ratio of the last two, up to this
    many times. 0: never; the report then flags the winner."""


class EvaluationSection(Section):
    """What to measure on a trained model. Loss and embeddings during training are always recorded."""

    test_loss: bool = True
    """Mean loss over the whole test split."""
    loss_by_frequency: bool | None = None
    """Loss and calibration in ten bins of token frequency. none: measured together with the test loss, in one pass;
    results that already have a test loss stay as they are. true: measured for those results too."""
    quantised_loss: bool = False
    """Test loss with the vocabulary tables rounded to int8 and int4, with one scale per row or per 32 columns."""
    measures: bool = True
    """All measures of the embeddings."""
    wordsim: Text | None = None
    """Folder of word-similarity benchmarks, or "download". none: no benchmarks and no r_cos."""
    tasks: TaskNames | None = None
    """Downstream tasks by lm-eval name, or "paper" for the paper's seven. none: no tasks."""
    task_data: Text | None = None
    """Folder of local files for the tasks. none: download lm-eval's datasets."""
    task_limit: Count | None = None
    """Number of documents per task, from the first, for a quick test. none: all."""
    theory: bool = False
    """Measure the paper's theory at ten milestones of each run, or at the milestones set in the config."""
    theory_batches: Count = 20
    """Number of batches at each milestone."""


class ReportSection(Section):
    """Order of the report, and a note about the loss."""

    lead: Literal["loss", "embeddings"] = "loss"
    """What the verdict, the tables and the page start with."""
    loss_note: Text | None = None
    """Note shown next to the loss. none: no note."""


DEFAULT_REPORT = ReportSection()


class SlurmSection(Section):
    """Resources that `--launcher slurm` requests for each run."""

    hours: Positive = 24.0
    """Time limit. A run that reaches it is resubmitted and resumes from its last checkpoint. Set `checkpoints.minutes`
    well below it: the work since that checkpoint is lost."""
    gpus: Count = 1
    """GPUs per run; a run with more than one is started by torchrun."""
    cpus: Count = 8
    """CPU cores per run."""
    memory_gb: Positive | None = None
    """Memory in GB. none: the cluster's default."""
    partition: Text | None = None
    """Partition. none: the cluster's default."""
    account: Text | None = None
    """Account. none: the user's default."""
    options: Settings = Field(default_factory=dict)
    """Other sbatch options by long name, such as { qos = "long" }."""
