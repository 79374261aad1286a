"""The settings of a run: `Config`, loaded from a TOML file, a preset or a run folder, with `--set key=value`.

Invalid settings raise a ValueError; each line of its message names a key, its value and the expected value.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted, steps
from coupled_adam.config.builtin_files import RUN
from coupled_adam.config.cross_checks import wrong_between_keys_of_run
from coupled_adam.config.field_types import Name, Seed
from coupled_adam.config.loading import build, parse_settings, read_values
from coupled_adam.config.run_sections import (
    CheckpointSection,
    DataSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainingSection,
)
from coupled_adam.config.schedule import annealed, learning_rate
from coupled_adam.config.schema import Section, all_keys
from coupled_adam.config.table_rows import rows_for, token_count
from coupled_adam.config.toml_writing import to_toml, toml_value
from coupled_adam.models.model_config import ModelConfig

__all__ = [
    "MATTERS_FOR_RESUME",
    "Config",
    "differences",
    "load_config",
    "require_resumable",
    "to_toml",
    "values_by_key",
    "with_rows",
]


class Config(Section):
    """All settings of a run."""

    name: Name
    """Name of the run, used in its folder name."""
    seed: Seed = 1
    """Seed of the initial weights and of the data order."""
    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    training: TrainingSection
    checkpoints: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)

    @model_validator(mode="after")
    def _check(self) -> "Config":
        wrong = list(wrong_between_keys_of_run(self))
        if wrong:
            raise UserError("\n".join(wrong))
        return self

    @property
    def rows(self) -> int:
        """Number of rows V of the embedding tables.

        If `model.vocabulary_size` is "auto", it follows from the corpus, or from `data.tokenizer` before the corpus is
        prepared.

        Example:
            >>> load_config("tiny", ["data.folder=data/none-yet", "data.tokenizer=bpe:2000"]).rows
            2048
        """
        given = self.model.vocabulary_size
        return rows_for(token_count(self.data)) if given == "auto" else given

    def to_model_config(self) -> ModelConfig:
        """The model's part of this config, with the number of rows resolved."""
        return ModelConfig(**self.model.model_dump() | {"vocabulary_size": self.rows})

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.training.batch_size * self.model.context

    @property
    def total_steps(self) -> int:
        """Number of whole steps in D tokens."""
        return self.training.tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """Number of warm-up steps; a share of the run is rounded up."""
        return steps(self.schedule.warmup, self.total_steps)

    @property
    def decay_steps(self) -> int:
        """Number of decay steps at the end of a wsd schedule; 0 for other schedules."""
        return steps(self.schedule.decay, self.total_steps) if self.schedule.kind == "wsd" else 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return learning_rate(
            step,
            lr=self.optimizer.lr,
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            kind=self.schedule.kind,
            final_fraction=self.schedule.final_fraction,
            decay_steps=self.decay_steps,
        )

    @property
    def anneal_steps(self) -> int:
        """Number of steps over which row_exponent is annealed; 0 if it is constant."""
        return 0 if self.optimizer.anneal is None else steps(self.optimizer.anneal, self.total_steps)

    def row_exponent(self, step: int) -> float | None:
        """The row exponent of a step, counted from 0; None if it is constant.

        Example:
            >>> changes = ["row_exponent=0.25", "row_exponent_start=0.75", "anneal=100"]
            >>> config = load_config("tiny", [f"optimizer.{change}" for change in changes])
            >>> [config.row_exponent(step) for step in (0, 50, 100, 200)], load_config("tiny").row_exponent(0)
            ([0.75, 0.5, 0.25, 0.25], None)
        """
        start = self.optimizer.row_exponent_start
        if start is None:
            return None
        return annealed(step, start=start, end=self.optimizer.row_exponent, steps=self.anneal_steps)

    def micro_batch_size(self, ranks: int) -> int:
        """Samples per rank and forward pass: training.micro_batch_size, or the rank's whole share if smaller."""
        size, share = self.training.batch_size, self.training.batch_size // ranks
        if share * ranks != size:
            raise UserError(f"training.batch_size = {size} does not divide by {ranks} ranks")
        micro = min(self.training.micro_batch_size or share, share)
        if share % micro:
            raise UserError(
                f"training.micro_batch_size = {micro} does not divide a rank's share of {counted(share, 'sample')} "
                f"(training.batch_size = {size} on {counted(ranks, 'rank')})"
            )
        return micro


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
    """Load and validate the config of a run.

    Args:
        spec: a preset name, the path of a TOML file, or a run folder (its config.toml is read). A preset name wins over
            a folder of the same name; write `./tiny` for the folder.
        overrides: each `section.key=value`; later ones win. A value that is not valid TOML is read as text:
            `training.tokens=5B`, `optimizer.embeddings=adamw`, `log.wandb=none`.

    Raises:
        ValueError: the config is invalid; the message has one line per mistake.

    Example:
        >>> config = load_config("tiny", ["training.tokens=100k", "seed=3"])
        >>> config.total_steps, config.seed
        (97, 3)
    """
    read = read_values(spec, RUN)
    return build(Config, read.source, read.values, parse_settings(overrides, Config))


def with_rows(config: Config) -> Config:
    """Copy the config with `model.vocabulary_size = "auto"` replaced by the current number of rows.

    Example:
        >>> with_rows(load_config("gpt2-125m", ["data.folder=data/none-yet"])).model.vocabulary_size
        50304
    """
    return config.model_copy(update={"model": config.model.model_copy(update={"vocabulary_size": config.rows})})


def differences(a: Config, b: Config) -> list[str]:
    """Dotted names of the keys whose values differ, in section order.

    Example:
        >>> differences(load_config("tiny"), load_config("tiny", ["seed=2", "log.every=5"]))
        ['seed', 'log.every']
    """
    left, right = values_by_key(a), values_by_key(b)
    return [key for key in left if left[key] != right[key]]


def values_by_key(config: Config) -> dict[str, Any]:
    """All values by dotted key, in section order."""
    return _flat(config)


def _flat(section: Section) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            flat.update({f"{name}.{key}": inner for key, inner in _flat(value).items()})
        else:
            flat[name] = value
    return flat


# These keys change the loss curve only by rounding. All others define the run, so a resumed run must not change them.
_FREE_ON_RESUME = ("micro_batch_size", "device", "compile", "cuda_graphs", "deterministic", "parallel", "threads")

MATTERS_FOR_RESUME = frozenset(
    key
    for key in all_keys(Config)
    if key != "name"
    and not key.startswith(("checkpoints.", "log."))
    and key not in {f"training.{name}" for name in _FREE_ON_RESUME}
    and key not in {"data.folder", "data.source"}  # the same tokens may be elsewhere; checkpoints identify them
)


def require_resumable(stored: Config, wanted: Config) -> None:
    """Raise a UserError if a resumed run would change keys that it must not change.

    Args:
        stored: the config in the run folder.
        wanted: the requested config.
    """
    before, now = values_by_key(stored), values_by_key(wanted)
    fixed = [key for key in differences(stored, wanted) if key in MATTERS_FOR_RESUME]
    if wanted.model.vocabulary_size == "auto":  # keep the run's number of rows
        fixed = [key for key in fixed if key != "model.vocabulary_size"]
    if fixed:
        changes = "\n".join(f"{key} = {toml_value(before[key])}, now {toml_value(now[key])}" for key in fixed)
        raise UserError(
            f"the run {stored.name!r} cannot be resumed with other settings; undo these changes or start a new run:\n"
            f"{changes}"
        )
