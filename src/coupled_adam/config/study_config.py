"""The study file: a base config, the axes of the grid, what is evaluated.

Everything a user can get wrong here is a UserError whose lines each name one key, its value and what is expected.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_toml, user_path
from coupled_adam.config.builtin_files import PRESETS, STUDY
from coupled_adam.config.cross_checks import wrong_between_keys_of_study
from coupled_adam.config.field_types import Expected, Name, Seed, Text
from coupled_adam.config.loading import Setting, build, parse_setting, read_values
from coupled_adam.config.run_config import Config
from coupled_adam.config.schema import Section, keys_of
from coupled_adam.config.study_sections import (
    Axis,
    EvaluationSection,
    ModelAxis,
    OptimizerAxis,
    ReportSection,
    SelectSection,
    Settings,
    SlurmSection,
    TokensAxis,
)


class Study(Section):
    """A whole study."""

    name: Name
    """Name of the study; its folder is called after it."""
    title: Text
    """One line for lists and the report."""
    description: str = ""
    """What is compared, and what to know before running it."""
    base: Text
    """Training config that all runs start from: a preset, or a TOML file (a path from the study file on)."""
    seeds: Annotated[list[Seed], Axis, Field(min_length=1), Expected("a whole number, or a list of different ones")]
    """One run of every cell for each."""
    tokens: TokensAxis | None = None
    """Data sizes D; none: that of the base."""
    set: Settings = Field(default_factory=dict)
    """Settings of all runs; those of a model, of a data size and of an optimizer come on top."""
    override: Settings = Field(default_factory=dict)
    """Settings of all runs that win over all others, as --set gives them."""
    models: Annotated[list[ModelAxis], Expected("tables [[models]]")] = Field(default_factory=list)
    """Model sizes N; none: the base itself."""
    optimizers: Annotated[list[OptimizerAxis], Expected("tables [[optimizers]]")]
    """How the embeddings are trained."""
    select: SelectSection = Field(default_factory=SelectSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    report: ReportSection = Field(default_factory=ReportSection)
    slurm: SlurmSection = Field(default_factory=SlurmSection)

    @model_validator(mode="after")
    def _check(self) -> "Study":
        wrong = list(wrong_between_keys_of_study(self))
        if wrong:
            raise UserError("\n".join(wrong))
        return self

    def candidates_of(self, optimizer: OptimizerAxis) -> tuple[str, list[float]] | None:
        """The setting that is selected for an optimizer, with the values to try; None where none is."""
        return next(iter((optimizer.select or self.select.values).items()), None)

    def base_of(self, model: ModelAxis | None) -> str:
        """What `load_config` takes for a model of the study."""
        return model.base if model is not None and model.base is not None else self.base


# Axes of the grid, which `--set` cannot change.
AXES = ("seeds", "tokens", "models", "optimizers")


def load_study(spec: str) -> Study:
    """Read and check a study.

    Args:
        spec: the name of a study that comes with the package, the path of a TOML file, or the folder of a study. A name
            wins over a folder of that name; write `./demo` for the folder.

    Raises:
        ValueError: for everything that is wrong with it, one line for each mistake.

    Example:
        >>> study = load_study("demo")
        >>> study.seeds, [optimizer.embeddings for optimizer in study.optimizers]
        ([1, 2, 3], ['adamw', 'coupled'])
    """
    read = read_values(spec, STUDY)
    return _with_whole_paths(build(Study, read.source, read.values), read.folder)


def parse_study(text: str, source: str, folder: Path) -> Study:
    """A study from the text of its file.

    Args:
        text: TOML.
        source: what to call it in messages.
        folder: where the file lies; base configs are looked for from there.

    Example:
        >>> from coupled_adam.config.toml_writing import to_toml
        >>> demo = load_study("demo")
        >>> parse_study(to_toml(demo), "copy", Path()) == demo
        True
    """
    return _with_whole_paths(build(Study, source, parse_toml(text, source)), folder)


def with_settings(study: Study, texts: Iterable[str]) -> tuple[Study, list[Setting]]:
    """The study with what `--set` says of its own sections, and the settings that are left: those of the runs.

    Args:
        study: as `load_study` reads it.
        texts: `section.key=value` each.

    Example:
        >>> study, left = with_settings(load_study("demo"), ["evaluation.measures=false", "log.every=3"])
        >>> study.evaluation.measures, [(setting.key, setting.value) for setting in left]
        (False, [('log.every', 3)])
    """
    own, left = [], []
    for text in texts:
        setting = parse_setting(text, Config)
        if setting.key in AXES:
            raise UserError(
                f"--set {text}: the {setting.key} are those of the study; run a part of it with --only, such as --only "
                f"'*/seed-1', or change a copy of it: coupled-adam study show {study.name} > mine.toml"
            )
        if keys_of(Study.model_fields.get(setting.key.partition(".")[0])):
            own.append(parse_setting(text, Study))
        else:
            left.append(setting)
    return build(Study, f"study {study.name}", study.model_dump(), own) if own else study, left


def with_override(study: Study, settings: Iterable[Setting]) -> Study:
    """The study with settings of all its runs, so that a copy of it gives the same runs."""
    return study.model_copy(update={"override": study.override | {each.key: each.value for each in settings}})


def _with_whole_paths(study: Study, folder: Path) -> Study:
    """The study with its base files named so that they are found from the current directory."""

    def whole(base: str | None) -> str | None:
        return base if base is None or base in PRESETS else str(folder / user_path(base))

    models = [model.model_copy(update={"base": whole(model.base)}) for model in study.models]
    return study.model_copy(update={"base": whole(study.base), "models": models})


def one_paragraph(text: str) -> str:
    """A description without the line breaks of its file.

    Example:
        >>> one_paragraph("Two lines\\n  of one.\\n\\nAnother.")
        'Two lines of one.\\n\\nAnother.'
    """
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
