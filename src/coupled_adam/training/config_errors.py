"""What pydantic found wrong with a config, in the words of the user's file: key, value, what is expected."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from coupled_adam.training.config_toml import toml_value
from coupled_adam.training.sections import all_keys, keys_of
from coupled_adam.training.values import expected


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """One pair (dotted key, line) for each mistake; the key is empty for one that lies between keys.

    Args:
        error: what `model.model_validate` raised.
        model: the class of the whole config.
    """
    seen = set()
    for details in error.errors(include_url=False):
        key, field = _locate(details["loc"], model)
        if key and key in seen:
            continue  # a union reports each of its members
        seen.add(key)
        for line in _lines(key, field, details, model):
            yield key, line


def _locate(location: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, FieldInfo | None]:
    """The dotted key and its field, without the parts that pydantic adds for the members of a union."""
    path: list[str] = []
    field: FieldInfo | None = None
    fields: dict[str, FieldInfo] | None = model.model_fields
    for part in map(str, location):
        if fields is None:
            break
        path.append(part)
        field = fields.get(part)
        fields = keys_of(field)
    return ".".join(path), field


def _lines(key: str, field: FieldInfo | None, details: Any, model: type[BaseModel]) -> list[str]:
    if not key:
        return str(details["ctx"]["error"]).splitlines()
    if field is None:
        return [f"{key}: {unknown_key(key, model)}"]
    keys = keys_of(field)
    if details["type"] == "missing" and keys:
        required = ", ".join(name for name, inner in keys.items() if inner.is_required())
        return [f"section [{key}] is missing: expected at least its keys {required}"]
    if details["type"] == "missing":
        return [f"{key} is missing: expected {expected(field)}"]
    value = toml_value(details["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    if keys:
        return [f"{key} = {value}: expected a section [{key}] with the keys {', '.join(keys)}"]
    return [f"{key} = {value}: expected {expected(field)}"]


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """What to say of a key that there is not: the one that was probably meant, or those there are."""
    known = list(all_keys(model))
    sections = [name for name, field in model.model_fields.items() if keys_of(field)]
    by_name = {name.rpartition(".")[2]: name for name in reversed(known)}
    name = key.rpartition(".")[2]
    # A key in the wrong section, then a slip in the whole, then a slip in the name with a section forgotten.
    near = [by_name[name]] if name in by_name else difflib.get_close_matches(key, known + sections, n=1, cutoff=0.7)
    near = near or [by_name[other] for other in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]
    if near:
        return f"unknown key; did you mean {near[0]}?"
    inner = keys_of(model.model_fields.get(key.partition(".")[0]))
    there = ", ".join(inner or [name if name not in sections else f"[{name}]" for name in model.model_fields])
    return f"unknown key; expected one of: {there}"
