"""Load and validate a config from a built-in file, a TOML file or a folder, plus `--set key=value`.

Runs and studies are loaded in the same three steps: `read_values`, `parse_setting`, `build`.
"""

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_toml, read_toml, user_path
from coupled_adam.config.builtin_files import FileKind
from coupled_adam.config.explanations import explain, unknown_key
from coupled_adam.config.field_types import is_text
from coupled_adam.config.schema import Section, all_keys, section_at
from coupled_adam.config.toml_writing import toml_value

AnyConfig = TypeVar("AnyConfig", bound=Section)
COMMAND_LINE = "--set"


@dataclass(frozen=True)
class Values:
    """Content of a file before validation."""

    source: str
    """Name of the file in messages."""
    values: dict[str, Any]
    folder: Path
    """Folder of the file; relative paths in it may start there."""


def read_values(spec: str, kind: FileKind) -> Values:
    """Read a built-in file, a TOML file or the config in a folder.

    Args:
        spec: a built-in name or a path; the name wins over a folder of the same name.
        kind: the kind of file.
    """
    if spec in kind.names:
        source = f"{kind.noun} {spec}"
        return Values(source, parse_toml(kind.text(spec), source), Path())
    path = user_path(spec)
    if not spec.strip():
        raise UserError(_unknown_name(spec, kind))
    if path.is_dir():
        path = path / kind.file_name
        if not path.is_file():
            expected = f"expected a {kind.folder}, a TOML file or a {kind.noun}"
            raise UserError(f"{spec} is a folder without {kind.file_name}; {expected}")
    elif not path.exists() and path.suffix != ".toml" and len(path.parts) == 1:
        raise UserError(_unknown_name(spec, kind))
    try:
        return Values(str(path), read_toml(path), path.parent)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or {kind.folder}; {kind.nouns} are: {', '.join(kind.names)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _unknown_name(spec: str, kind: FileKind) -> str:
    near = difflib.get_close_matches(spec, kind.names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{spec!r} is neither a {kind.noun} nor a file; {hint}{kind.nouns} are: {', '.join(kind.names)}"


@dataclass(frozen=True)
class Setting:
    """A key and a value that overrides the file."""

    key: str
    """Dotted key; empty if `text` is not key=value."""
    value: Any
    text: str
    """As the user wrote it."""
    origin: str = COMMAND_LINE
    """Prefix of messages about this setting."""

    def blamed(self, line: str) -> str:
        """Prefix a message with the origin of the setting."""
        return f"{self.origin} {line}".lstrip()


def parse_settings(texts: Iterable[str], model: type[Section]) -> list[Setting]:
    """Parse the arguments of `--set`.

    Args:
        texts: each `section.key=value`; a value that is not valid TOML is read as text.
        model: the class of the whole config.

    Example:
        >>> from coupled_adam.config.run_config import Config
        >>> [setting.value for setting in parse_settings(["seed=3", "training.tokens=5B", "data.folder=2024"], Config)]
        [3, '5B', '2024']
    """
    return [parse_setting(text, model) for text in texts]


def parse_setting(text: str, model: type[Section]) -> Setting:
    """Parse one argument of `--set`; `build` validates key and value, together with everything else."""
    key, equals, written = (part.strip() for part in text.partition("="))
    key = key if equals else ""
    return Setting(key, _as_text_where_text(_parse(written), written, key, model), text)


def given_settings(values: Mapping[str, Any], model: type[Section], origin: str = "") -> list[Setting]:
    """Settings from typed values by dotted key, as in a study file."""
    settings = []
    for key, value in values.items():
        written = toml_value(value)
        value = _as_text_where_text(value, written, key, model)
        settings.append(Setting(key, value, f"{key}={written}", origin))
    return settings


def _as_text_where_text(value: Any, written: str, key: str, model: type[Section]) -> Any:
    """Keep the text for keys that hold text: a name or folder may look like a number or a date."""
    field = all_keys(model).get(key)
    return written if field is not None and is_text(field) and not isinstance(value, str) else value


def _parse(text: str) -> Any:
    """Parse a value as TOML; return the text itself if it is not valid TOML."""
    try:
        parsed = parse_toml(f"value = {text}", "value")
    except ValueError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def build(
    model: type[AnyConfig], source: str, values: Mapping[str, Any], settings: Sequence[Setting] = (), mixed: str = ""
) -> AnyConfig:
    """Apply settings to values and validate the result.

    Args:
        model: the class of the whole config.
        source: name of the values in messages.
        values: values of all sections; not modified.
        settings: applied in order; later ones win.
        mixed: name of the settings in messages about conflicts between keys; `--set` if empty.

    Raises:
        UserError: the config is invalid; the message has one line per mistake.
    """
    changed = copy.deepcopy(dict(values))
    wrong: list[str] = []
    by_key: dict[str, Setting] = {}
    for setting in settings:
        try:
            _apply(changed, setting, model)
        except UserError as error:
            wrong.append(setting.blamed(f"{setting.text}: {error}"))
        else:
            by_key[setting.key] = setting
    try:
        config = model.model_validate(changed)
    except ValidationError as error:
        for key, line in explain(error, model):
            # A conflict between keys may come from the file, the settings or both.
            place = f"{source} with {mixed or COMMAND_LINE}" if settings and not key else source
            wrong.append(by_key[key].blamed(line) if key in by_key else f"{place}: {line}")
        raise UserError("\n".join(wrong)) from None
    if wrong:
        raise UserError("\n".join(wrong))
    return config


def _apply(values: dict[str, Any], setting: Setting, model: type[Section]) -> None:
    """Set one key of the values of all sections, in place."""
    key = setting.key
    if not key:
        raise UserError("expected section.key=value, such as optimizer.lr=3e-4")
    section = section_at(model, key)
    if section is not None:
        keys = ", ".join(f"{key}.{name}" for name in all_keys(section))
        raise UserError(f"{key} is a section; set one of its keys: {keys}")
    if key not in all_keys(model):
        raise UserError(unknown_key(key, model))
    *sections, name = key.split(".")
    target: Any = values
    for each in sections:
        target = target.setdefault(each, {})
        if not isinstance(target, dict):  # the file has a value here instead of a section; validation reports it
            return
    target[name] = setting.value
