"""Write a config as TOML, with a comment that explains each key.

The standard library reads TOML but does not write it; this module writes only the value types that configs use.
"""

import itertools
import re
import textwrap
from typing import Any

from pydantic.fields import FieldInfo

from coupled_adam import __version__
from coupled_adam.config.schema import Section, entries_of

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def to_toml(config: Section) -> str:
    """Write a config as TOML with a comment above each key; reading it back gives an equal config.

    Args:
        config: of a run or a study: values, sections, tables of settings and arrays of tables.
    """
    lines = [f"# Written by coupled-adam {__version__}."]
    tables = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section | dict) or entries_of(field):
            tables += ["", "", *_table(name, value, field)] if value else []
        else:
            lines += ["", *_explained(name, value, field)]
    return "\n".join(lines + tables) + "\n"


def _table(name: str, value: Any, field: FieldInfo) -> list[str]:
    """Lines of a section with all keys, of settings, or of an array of tables with the non-default keys."""
    if isinstance(value, Section):
        lines = [*_comment(value.__doc__), f"[{name}]"]
        sections = []
        for key, inner in type(value).model_fields.items():
            own = getattr(value, key)
            if isinstance(own, Section):  # after all values: TOML would read later ones as part of it
                sections += ["", "", *_table(f"{name}.{key}", own, inner)]
            else:
                lines += ["", *_explained(key, own, inner)]
        return lines + sections
    if isinstance(value, dict):
        return [*_comment(field.description), f"[{name}]", *_pairs(value)]
    entries = [[f"[[{name}]]", *_pairs(entry.model_dump(exclude_defaults=True)), ""] for entry in value]
    return [*_comment(field.description), *itertools.chain.from_iterable(entries)][:-1]


def _explained(name: str, value: Any, field: FieldInfo) -> list[str]:
    return [*_comment(field.description), f"{name} = {toml_value(value)}"]


def _pairs(values: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {toml_value(value)}" for key, value in values.items()]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(text or "", width=110, initial_indent="# ", subsequent_indent="# ")


def toml_value(value: Any) -> str:
    """Format a value as TOML.

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
        return f"{{ {', '.join(_pairs(value))} }}" if value else "{}"
    return str(value)  # a float, and in messages a date


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return character if character.isprintable() else f"\\U{ord(character):08x}"
