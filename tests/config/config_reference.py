"""Generate the reference part of docs/training-config.md from the config classes.

    python tests/config/config_reference.py

rewrites it. Run it after you add a key or change its text.
"""

import re
from pathlib import Path

from pydantic.fields import FieldInfo

from coupled_adam.config.field_types import expected
from coupled_adam.config.run_config import Config
from coupled_adam.config.schema import keys_of
from coupled_adam.config.toml_writing import toml_value

PAGE = Path(__file__).parents[2] / "docs" / "training-config.md"
PART = re.compile(r"(?<=<!-- reference -->\n).*(?=<!-- end of reference -->)", re.DOTALL)


def reference() -> str:
    """A table of keys for the top of the file and for each section."""
    fields = Config.model_fields
    top = {name: field for name, field in fields.items() if keys_of(field) is None}
    parts = ["### Top level\n", *_table(top)]
    shown: dict[str, str] = {}
    for name, field in fields.items():
        if keys_of(field):
            parts += _section(name, field, shown)
    return "\n".join(["", *parts, "", ""])


def _section(name: str, field: FieldInfo, shown: dict[str, str]) -> list[str]:
    """The keys of a section, then its subsections. `shown` maps each table so far to its section, to print it once."""
    keys = keys_of(field)
    values = {key: each for key, each in keys.items() if keys_of(each) is None}
    table = "\n".join(_table(values))
    first = shown.setdefault(table, name)
    body = table if first == name else f"The keys are those of `[{first}]`."
    parts = [f"\n### [{name}]\n", f"{field.annotation.__doc__}\n", body]
    for key, each in keys.items():
        if key not in values:
            parts += _section(f"{name}.{key}", each, shown)
    return parts


def _table(keys: dict[str, FieldInfo]) -> list[str]:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in keys.items():
        default = "required" if field.is_required() else f"`{toml_value(field.default)}`"
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {expected(field)} | {default} | {meaning} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(PART.sub(lambda _: reference(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
