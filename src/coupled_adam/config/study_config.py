"""The study file: a base config, the axes of the grid, and the evaluation.

Invalid settings raise a UserError; each line of its message names a key, its value and the expected value.
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
    """All settings of a study."""

    name: Name
    """Name of the study and of its folder."""
    title: Text
    """One line for lists and the report."""
    description: str = ""
    """What the study compares, and what to know before running it."""
    base: Text
    """Training config that all runs start from: a preset, or a TOML file (relative to the study file)."""
    seeds: Annotated[list[Seed], Axis, Field(min_length=1), Expected("a whole number, or a list of different ones")]
    """Every cell runs once with each seed."""
    tokens: TokensAxis | None = None
    """Data sizes D. none: the base's."""
    set: Settings = Field(default_factory=dict)
    """Settings of all runs; settings of a model, a data size or an optimizer override them."""
    override: Settings = Field(default_factory=dict)
    """Settings of all runs that override all others, as given with --set."""
    models: Annotated[list[ModelAxis], Expected("tables [[models]]")] = Field(default_factory=list)
    """Model sizes N. none: only the base."""
    optimizers: Annotated[list[OptimizerAxis], Expected("tables [[optimizers]]")]
    """Optimizers of the embeddings."""
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
        """The setting to select for an optimizer, with its candidate values; None without a selection."""
        return next(iter((optimizer.select or self.select.values).items()), None)

    def base_of(self, model: ModelAxis | None) -> str:
        """The base config of a model, as a spec for `load_config`."""
        return model.base if model is not None and model.base is not None else self.base


# Axes of the grid; `--set` cannot change them.
AXES = ("seeds", "tokens", "models", "optimizers")


def load_study(spec: str) -> Study:
    """Load and validate a study.

    Args:
        spec: the name of a built-in study, the path of a TOML file, or a study folder. A name wins over a folder of the
            same name; write `./demo` for the folder.

    Raises:
        ValueError: the study is invalid; the message has one line per mistake.

    Example:
        >>> study = load_study("demo")
        >>> study.seeds, [optimizer.embeddings for optimizer in study.optimizers]
        ([1, 2, 3], ['adamw', 'coupled'])
    """
    read = read_values(spec, STUDY)
    return _with_whole_paths(build(Study, read.source, read.values), read.folder)


def parse_study(text: str, source: str, folder: Path) -> Study:
    """Parse and validate the text of a study file.

    Args:
        text: TOML.
        source: name of the text in messages.
        folder: folder of the file; paths of base configs are relative to it.

    Example:
        >>> from coupled_adam.config.toml_writing import to_toml
        >>> demo = load_study("demo")
        >>> parse_study(to_toml(demo), "copy", Path()) == demo
        True
    """
    return _with_whole_paths(build(Study, source, parse_toml(text, source)), folder)


def with_settings(study: Study, texts: Iterable[str]) -> tuple[Study, list[Setting]]:
    """Apply the `--set` arguments that concern the study's own sections; return the rest, which concern its runs.

    Args:
        study: from `load_study`.
        texts: each `section.key=value`.

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
                f"--set {text}: the study defines the {setting.key}; run part of it with --only, such as --only "
                f"'*/seed-1', or edit a copy: coupled-adam study show {study.name} > mine.toml"
            )
        if keys_of(Study.model_fields.get(setting.key.partition(".")[0])):
            own.append(parse_setting(text, Study))
        else:
            left.append(setting)
    return build(Study, f"study {study.name}", study.model_dump(), own) if own else study, left


def with_override(study: Study, settings: Iterable[Setting]) -> Study:
    """Store settings of all runs in the study, so that a copy of it gives the same runs."""
    return study.model_copy(update={"override": study.override | {each.key: each.value for each in settings}})


def _with_whole_paths(study: Study, folder: Path) -> Study:
    """Resolve the paths of base configs, so that they are valid from the current directory."""

    def whole(base: str | None) -> str | None:
        return base if base is None or base in PRESETS else str(folder / user_path(base))

    models = [model.model_copy(update={"base": whole(model.base)}) for model in study.models]
    return study.model_copy(update={"base": whole(study.base), "models": models})


def one_paragraph(text: str) -> str:
    """Join the lines of each paragraph of a description.

    Example:
        >>> one_paragraph("Two lines\\n  of one.\\n\\nAnother.")
        'Two lines of one.\\n\\nAnother.'
    """
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
