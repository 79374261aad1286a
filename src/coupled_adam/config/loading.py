"""Where the values of a config come from: a preset, a TOML file, a run folder, and `--set section.key=value`."""

import difflib
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_toml, read_toml
from coupled_adam.config.builtin_files import PRESETS, preset_text
from coupled_adam.config.explanations import unknown_key
from coupled_adam.config.field_types import is_text
from coupled_adam.config.run_sections import Section, all_keys, keys_of

FILE_NAME = "config.toml"


def read_values(spec: str) -> tuple[str, dict[str, Any]]:
    """What to call the source in messages, and its values.

    Args:
        spec: the name of a preset, the path of a TOML file, or a run folder.
    """
    if spec in PRESETS:
        return f"preset {spec}", parse_toml(preset_text(spec), f"preset {spec}")
    path = Path(spec).expanduser()
    if not spec.strip():
        raise UserError(_unknown_preset(spec))
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise UserError(f"{spec} is a folder without {FILE_NAME}; expected a run folder, a TOML file or a preset")
    elif not path.exists() and path.suffix != ".toml" and len(path.parts) == 1:
        raise UserError(_unknown_preset(spec))
    try:
        return str(path), read_toml(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or run folder; presets are: {', '.join(PRESETS)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _unknown_preset(spec: str) -> str:
    near = difflib.get_close_matches(spec, PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{spec!r} is no preset and no file; {hint}presets are: {', '.join(PRESETS)}"


def set_value(values: dict[str, Any], override: str, model: type[Section]) -> str:
    """Set one key of `values`.

    Args:
        values: the values of all sections, changed in place.
        override: `section.key=value`; the value is read as TOML, and as text when it is none.
        model: the class of the whole config.

    Returns:
        the dotted key.
    """
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not key:
        raise UserError("expected section.key=value, such as optimizer.lr=3e-4")
    keys = keys_of(model.model_fields.get(key))
    if keys:
        raise UserError(f"{key} is a section; set one of its keys: {', '.join(f'{key}.{name}' for name in keys)}")
    field = all_keys(model).get(key)
    if field is None:
        raise UserError(unknown_key(key, model))
    value = _parse(text)
    # A name or folder may look like a number or a date; it is text all the same.
    value = text if is_text(field) and not isinstance(value, str) else value
    section, _, name = key.rpartition(".")
    target = values.setdefault(section, {}) if section else values
    if isinstance(target, dict):  # else the file gives the section a value, which is reported as that
        target[name] = value
    return key


def _parse(text: str) -> Any:
    """A value read as TOML, or the text itself when it is none."""
    try:
        parsed = parse_toml(f"value = {text}", "value")
    except ValueError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text
