"""Types of config values, each with a description of the expected value.

The description sits next to the check, so error messages and the reference page always agree with it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import parse_tokens, percentage


@dataclass(frozen=True)
class Expected:
    """Description of the expected value."""

    words: str


def _check_steps(amount: int | str) -> int | str:
    if amount < 0 if isinstance(amount, int) else percentage(amount) is None:
        raise UserError(f"{amount!r} is neither a number of steps nor a percentage")
    return amount


Count = Annotated[int, Field(gt=0), Expected("a whole number above 0")]
WholeNumber = Annotated[int, Field(ge=0), Expected("a whole number of at least 0")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Expected("a whole number from 0 to 2^63 - 1")]
Tokens = Annotated[
    int, BeforeValidator(parse_tokens), Field(gt=0), Expected('a number of tokens, such as 5000000, "5B" or "300k"')
]
Steps = Annotated[
    int | str, AfterValidator(_check_steps), Expected('a number of steps, or a share of the run such as "1%"')
]
Number = Annotated[float, Expected("a number")]
Positive = Annotated[float, Field(gt=0), Expected("a number above 0")]
NotNegative = Annotated[float, Field(ge=0), Expected("a number of at least 0")]
Share = Annotated[float, Field(ge=0, le=1), Expected("a number from 0 to 1")]
Fraction = Annotated[float, Field(gt=0, le=1), Expected("a number above 0 and at most 1")]
Decay = Annotated[float, Field(ge=0, lt=1), Expected("a number in [0, 1)")]
Text = Annotated[str, Field(min_length=1), Expected("text")]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"),
    Expected("letters, digits and . _ + - only, beginning with a letter or digit"),
]


def kinds(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself, including `Annotated` metadata."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from kinds(member)
    else:
        yield annotation


def is_optional(annotation: Any) -> bool:
    """Whether a value may be "none" in the file, None in Python."""
    return NoneType in kinds(annotation)


def is_text(field: FieldInfo) -> bool:
    """Whether the value of a key must be text or "none"."""
    members = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds(field.annotation)]
    return set(members) - {NoneType} == {str}


def expected(field: FieldInfo) -> str:
    """Describe the expected value of a key.

    Example:
        >>> expected(FieldInfo(annotation=Count | None)), expected(FieldInfo(annotation=bool | Literal["auto"]))
        ('a whole number above 0 or "none"', 'true, false or "auto"')
    """
    # pydantic moves top-level `Annotated` metadata to field.metadata.
    words = _expected_in(field.metadata) or [word for kind in kinds(field.annotation) for word in _words(kind)]
    last = ", or " if any("," in word for word in words) else " or "
    return last.join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _words(kind: Any) -> list[str]:
    if kind is NoneType:
        return ['"none"']
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [f'"{choice}"' for choice in get_args(kind)]
    return _expected_in(get_args(kind))


def _expected_in(metadata: Iterable[Any]) -> list[str]:
    return [extra.words for extra in metadata if isinstance(extra, Expected)]
