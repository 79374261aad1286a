"""A config written as TOML, each key under its explanation, so that the file of a run teaches how to change it.

The standard library reads TOML and does not write it; this writes the few shapes that a config has.
"""

import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coupled_adam import __version__

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def to_toml(config: BaseModel) -> str:
    """The config as TOML, with every key, its explanation above it; reading it gives back an equal config.

    Args:
        config: values, and sections of values.
    """
    lines = [f"# Written by coupled-adam {__version__}."]
    fields = type(config).model_fields
    sections = []
    for name, value in config:
        if isinstance(value, BaseModel):
            sections.append((name, value))
        else:
            lines += ["", *_key(name, value, fields[name])]
    for name, section in sections:
        lines += ["", "", *_comment(section.__doc__), f"[{name}]"]
        for key, value in section:
            lines += ["", *_key(key, value, type(section).model_fields[key])]
    return "\n".join(lines) + "\n"


def _key(name: str, value: Any, field: FieldInfo) -> list[str]:
    return [*_comment(field.description), f"{name} = {toml_value(value)}"]


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(text or "", width=110, initial_indent="# ", subsequent_indent="# ")


def toml_value(value: Any) -> str:
    """A value as TOML writes it.

    Example:
        >>> print(toml_value(True), toml_value(5_000_000_000), toml_value(1e-8), toml_value("1%"), toml_value(None))
        true 5_000_000_000 1e-08 "1%" "none"
    """
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= 10**6 else str(value)
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml_value(inner)}' for key, inner in value.items())}}}"
    return str(value)  # a float, and in messages a date


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\U{ord(character):08x}"
