"""What every config is made of: sections of keys, tables of an array, and the dotted names of all keys."""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from coupled_adam.config.field_types import is_optional


class Section(BaseModel):
    """A part of a config: unknown keys are refused, values are not converted, nothing changes afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """TOML has no null: "none" stands for it, in the keys that may be left open."""
        if not isinstance(values, dict):
            return values
        open_keys = {key for key, field in cls.model_fields.items() if is_optional(field.annotation)}
        return {key: None if value == "none" and key in open_keys else value for key, value in values.items()}


def keys_of(field: FieldInfo | None) -> dict[str, FieldInfo] | None:
    """The keys of a section; None for a value."""
    annotation = field.annotation if field is not None else None
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else None


def entries_of(field: FieldInfo | None) -> type[Section] | None:
    """The section that each table of an array such as [[models]] is; None for everything else."""
    annotation = field.annotation if field is not None else None
    entry = get_args(annotation)[0] if get_origin(annotation) is list else None
    return entry if isinstance(entry, type) and issubclass(entry, Section) else None


def all_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every value of a config by its dotted name."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = keys_of(field)
        keys |= {name: field} if inner is None else {f"{name}.{key}": each for key, each in inner.items()}
    return keys
