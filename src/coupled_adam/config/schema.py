"""Building blocks of configs: sections, arrays of tables, and dotted key names."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from coupled_adam.config.field_types import is_optional


class Section(BaseModel):
    """Base class of config sections: rejects unknown keys, converts no values, immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """Read "none" as None for optional keys, because TOML has no null."""
        if not isinstance(values, dict):
            return values
        open_keys = {key for key, field in cls.model_fields.items() if is_optional(field.annotation)}
        return {key: None if value == "none" and key in open_keys else value for key, value in values.items()}


def keys_of(field: FieldInfo | None) -> dict[str, FieldInfo] | None:
    """The keys of a section; None if the field is a value."""
    section = _section_of(field)
    return None if section is None else section.model_fields


def entries_of(field: FieldInfo | None) -> type[Section] | None:
    """The section class of an array of tables such as [[models]]; None for any other field."""
    annotation = field.annotation if field is not None else None
    entry = get_args(annotation)[0] if get_origin(annotation) is list else None
    return entry if isinstance(entry, type) and issubclass(entry, Section) else None


def section_at(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section with a dotted name, or the config itself for an empty name; None for a value or unknown name."""
    if not key:
        return model
    first, _, rest = key.partition(".")
    inner = _section_of(model.model_fields.get(first))
    return None if inner is None else section_at(inner, rest)


def all_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """All fields of a config by dotted key, including those of nested sections."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = _section_of(field)
        keys |= {name: field} if inner is None else {f"{name}.{key}": each for key, each in all_keys(inner).items()}
    return keys


def _section_of(field: FieldInfo | None) -> type[Section] | None:
    annotation = field.annotation if field is not None else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None
