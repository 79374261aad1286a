"""Numbers become text in `base/text.py`, `base/notation.py` and `metrics.py`, and nowhere else in the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import coupled_adam

PACKAGE = Path(coupled_adam.__file__).parent
FORMATTERS = {"base/text.py", "base/notation.py", "metrics.py"}
# By file and format: the reason why it does not use them.
ALLOWED = {
    ("optimizer/groups.py", ".0%"): "the optimizer package imports nothing of ours",
    ("optimizer/muon.py", "g"): "the optimizer package imports nothing of ours",
    ("study/optimizer_variants.py", "g"): "names of variants, which are parts of folder names",
    ("study/expansion.py", "g"): "names of candidates, which are parts of folder names",
    ("study/trials.py", ".{}g"): "rounds a number",
    ("theory/theory_numbers.py", ".0e"): "rounds a number",
    ("report/page_data.py", ".{}g"): "rounds numbers for the scripts of the page",
    ("report/published.py", "g"): "names of rows in the published tables",
    ("report/key_numbers.py", "{:.1f}"): "SVG coordinates",
}
NUMBER = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(?:\.(?:\d+|\{\}))?[eEfFgG%]")
IN_A_STRING = re.compile(r"\{[^{}:]*:([^{}]+)\}|%[-+ #0]*\d*(?:\.\d+)?([eEfFgG])(?![\w-])")


def _other_strings(tree: ast.AST) -> set[int]:
    """Constants that are not plain strings: docstrings, and the text of f-strings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found |= set(map(id, node.values))
    return found


def _number_formats(source: str) -> Iterator[tuple[int, str]]:
    """Line and format of each number that becomes text: f-strings, `format`, `str.format` and `%`."""
    tree = ast.parse(source)
    other_strings = _other_strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr):
            parts = node.format_spec.values
            spec = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
            if NUMBER.fullmatch(spec):
                yield node.lineno, spec
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "format":
            yield node.lineno, "format()"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in IN_A_STRING.finditer(node.value):
                if id(node) not in other_strings and (found[2] or NUMBER.fullmatch(found[1])):
                    yield node.lineno, found[0]


def test_the_scan_finds_every_way_to_format_a_number() -> None:
    for source in (
        'f"{x:.3f}"',
        'f"{x:>8.{n}f}"',
        'f"{x:g}"',
        'f"{x:,.0f}"',
        'f"{x:.0%}"',
        'f"{x:+.2e}"',
        'format(x, ".3f")',
        '"{:.1f}".format(x)',
        '"%.3f" % x',
    ):
        assert list(_number_formats(source)), source
    for source in ('f"{x:,}"', 'f"{x:>9}"', 'f"{x:02d}"', 'f"{x}"', '"50% of"', '"""{x:.3f}"""'):
        assert not list(_number_formats(source)), source


def test_numbers_become_text_only_in_the_shared_functions() -> None:
    found, used = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, form in () if name in FORMATTERS else _number_formats(path.read_text("utf-8")):
            used.add((name, form))
            if (name, form) not in ALLOWED:
                found.append(f"{name}:{line} {form}")
    assert not found, "use base/text.py or Metric.text"
    assert set(ALLOWED) - used == set(), "no longer needed"
