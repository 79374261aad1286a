"""The study file: a base config, the axes of the grid, what is evaluated. Read from TOML, checked, written as TOML.

Everything a user can get wrong here is a ValueError whose lines each name one key, its value and what is expected.
"""

import difflib
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from coupled_adam import __version__
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import LARGEST_TOML, parse_toml, read_text
from coupled_adam.config.builtin_files import PRESETS
from coupled_adam.config.explanations import explain
from coupled_adam.config.field_types import Expected, Name, Seed, Text
from coupled_adam.config.run_sections import Section
from coupled_adam.config.study_sections import (
    Axis,
    EvaluationSection,
    ModelAxis,
    OptimizerAxis,
    ReportSection,
    Settings,
    SlurmSection,
    TokensAxis,
)
from coupled_adam.config.toml_writing import toml_value

FILE_NAME = "study.toml"
# From small to large, the order in which they are listed.
STUDIES = (
    "demo",
    "single-gpu",
    "untied-heads",
    "centring",
    "single-gpu-scaled",
    "single-gpu-125m",
    "paper-small-scale",
    "paper-scaled",
    "paper-sgd",
    "paper-large-scale",
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
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    report: ReportSection = Field(default_factory=ReportSection)
    slurm: SlurmSection = Field(default_factory=SlurmSection)

    def base_of(self, model: ModelAxis | None) -> str:
        """What `load_config` takes for a model of the study."""
        return model.base if model is not None and model.base is not None else self.base


# Axes of the grid, which `--set` cannot change.
AXES = ("seeds", "tokens", "models", "optimizers")
# Each part is checked by itself: pydantic would report what is wrong in a list under numbers, and what is wrong in a
# section beside the keys of all others.
_LISTS: dict[str, type[Section]] = {"models": ModelAxis, "optimizers": OptimizerAxis}
_SECTIONS: dict[str, type[Section]] = {
    "evaluation": EvaluationSection,
    "report": ReportSection,
    "slurm": SlurmSection,
}


def study_text(name: str) -> str:
    """The TOML file of a study that comes with the package: a good start for a file of one's own.

    Example:
        >>> study_text("demo").splitlines()[0]
        'name = "demo"'
    """
    return (files("coupled_adam.config") / "studies" / f"{name}.toml").read_text(encoding="utf-8")


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
    if spec in STUDIES:
        return parse_study(study_text(spec), f"study {spec}", Path())
    path = Path(spec).expanduser()
    if spec.strip() and path.is_dir():
        if not (path / FILE_NAME).is_file():
            raise UserError(f"{spec} is a folder without {FILE_NAME}; expected the folder of a study, or a TOML file")
        path = path / FILE_NAME
    elif not spec.strip() or (not path.exists() and path.suffix != ".toml"):
        near = difflib.get_close_matches(spec, STUDIES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{spec!r} is no study and no file; {hint}studies are: {', '.join(STUDIES)}")
    try:
        text = read_text(path, LARGEST_TOML)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_study(text, str(path), path.parent)


def parse_study(text: str, source: str, folder: Path) -> Study:
    """A study from the text of its file.

    Args:
        text: TOML.
        source: what to call it in messages.
        folder: where the file lies; base configs are looked for from there.
    """
    values = parse_toml(text, source)
    wrong_parts = {name: lines for name, lines in _wrong_parts(values) if lines}
    wrong = [line for lines in wrong_parts.values() for line in lines]
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        # What is wrong inside a part is said already, in better words.
        wrong += [line for key, line in explain(error, Study) if key.partition(".")[0] not in wrong_parts]
    else:
        wrong += _contradictions(study)
    if wrong:
        raise UserError("\n".join(f"{source}: {line}" for line in wrong))
    return _with_whole_paths(study, folder)


def _wrong_parts(values: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What is wrong in each of [[models]], [[optimizers]], [evaluation], [report] and [slurm], by their names."""
    for name, kind in _LISTS.items():
        entries = values.get(name, [])
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            numbered = enumerate(entries, 1)
            yield name, [line for n, entry in numbered for line in _wrong(entry, kind, f"[[{name}]] number {n}")]
        else:
            keys = ", ".join(kind.model_fields)
            yield name, [f"{name} = {toml_value(entries)}: expected tables [[{name}]] with the keys {keys}"]
    for name, kind in _SECTIONS.items():
        if isinstance(values.get(name), dict):
            yield name, _wrong(values[name], kind, f"[{name}]")


def _wrong(values: dict[str, Any], kind: type[Section], where: str) -> list[str]:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return [f"{where}: {line}" for _, line in explain(error, kind)]
    return []


def _contradictions(study: Study) -> Iterator[str]:
    """What is wrong between keys that are each right by themselves."""
    if not study.optimizers:
        yield '[[optimizers]] is missing: expected at least one, such as [[optimizers]] with embeddings = "coupled"'
    for key, entries in (
        ("seeds", study.seeds),
        ("tokens", study.tokens or []),
        ("[[models]] name", [model.name for model in study.models]),
    ):
        twice = sorted({str(entry) for entry in entries if entries.count(entry) > 1})  # type: ignore[arg-type]
        if twice:
            yield f"{key}: {', '.join(twice)} is there twice; expected each once"
    for optimizer in study.optimizers:
        if optimizer.embeddings == "sgd" and not optimizer.sgd_factor and "optimizer.sgd_factor" not in optimizer.set:
            yield '[[optimizers]] with embeddings = "sgd": sgd_factor is missing; the paper searches 100 to 600'


def with_settings(study: Study, settings: Sequence[str]) -> tuple[Study, list[str]]:
    """The study with what `--set` says of its own sections, and the settings that are left: those of the runs.

    Args:
        study: as `load_study` reads it.
        settings: `section.key=value` each.

    Example:
        >>> study, left = with_settings(load_study("demo"), ["evaluation.measures=false", "log.every=3"])
        >>> study.evaluation.measures, left
        (False, ['log.every=3'])
    """
    own: dict[str, dict[str, Any]] = {}
    left = []
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        section, _, name = key.partition(".")
        if key in AXES:
            raise UserError(
                f"--set {setting}: the {key} are those of the study; run a part of it with --only, such as --only "
                f"'*/seed-1', or change a copy of it: coupled-adam study show {study.name} > mine.toml"
            )
        if section in _SECTIONS and equals:
            own.setdefault(section, {})[name] = value_of(text)
        else:
            left.append(setting)
    changed: dict[str, Section] = {}
    for section, values in own.items():
        values = {**getattr(study, section).model_dump(), **values}
        wrong = _wrong(values, _SECTIONS[section], f"--set {section}")
        if wrong:
            raise UserError("\n".join(wrong))
        changed[section] = _SECTIONS[section].model_validate(values)
    return study.model_copy(update=changed), left


def value_of(text: str) -> Any:
    """What stands behind `KEY=` of `--set`: TOML, or text without its quotes.

    Example:
        >>> value_of("3"), value_of("none"), value_of("[1, 2]")
        (3, 'none', [1, 2])
    """
    try:
        return parse_toml(f"value = {text}", "value")["value"]
    except ValueError:
        return text


def _with_whole_paths(study: Study, folder: Path) -> Study:
    """The study with its base files named so that they are found from the current directory."""

    def whole(base: str | None) -> str | None:
        return base if base is None or base in PRESETS else str(folder / Path(base).expanduser())

    models = [model.model_copy(update={"base": whole(model.base)}) for model in study.models]
    return study.model_copy(update={"base": whole(study.base), "models": models})


def study_toml(study: Study) -> str:
    """The study as TOML; reading it gives back an equal study.

    Example:
        >>> demo = load_study("demo")
        >>> parse_study(study_toml(demo), "copy", Path()) == demo
        True
    """
    lines = [f"# Written by coupled-adam {__version__}."]
    for name, value in study:
        if isinstance(value, Section) or name in _LISTS or isinstance(value, dict):
            continue
        lines.append(f"{name} = {toml_value(value)}")
    for name, settings in (("set", study.set), ("override", study.override)):
        if settings:
            lines += ["", f"[{name}]", *_table(settings)]
    for name in _LISTS:
        for entry in getattr(study, name):
            lines += ["", f"[[{name}]]", *_table(entry.model_dump(exclude_defaults=True))]
    for name in _SECTIONS:
        lines += ["", f"[{name}]", *_table(getattr(study, name).model_dump())]
    return "\n".join(lines) + "\n"


def _table(values: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in values.items()]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_table(value))} }}" if value else "{}"
    return toml_value(value)


def one_paragraph(text: str) -> str:
    """A description without the line breaks of its file.

    Example:
        >>> one_paragraph("Two lines\\n  of one.\\n\\nAnother.")
        'Two lines of one.\\n\\nAnother.'
    """
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
