"""docs/architecture.md is up to date: every function it names exists, and every module is listed."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import coupled_adam

PACKAGE = Path(coupled_adam.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:data|training|models|config|study|report)\.(?!toml\b|md\b)[\w.]+)`", PAGE)


@pytest.mark.parametrize("name", NAMED)
def test_a_function_named_on_the_page_exists(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if PACKAGE.joinpath(*parts[:length]).with_suffix(".py").is_file():
            found = import_module(".".join(["coupled_adam", *parts[:length]]))
            for part in parts[length:]:
                found = getattr(found, part)
            assert callable(found)
            return
    pytest.fail(f"no module for {name}")


def test_both_walkthroughs_are_on_the_page() -> None:
    assert len(NAMED) == len(set(NAMED)) > 20


def test_every_listed_module_exists_and_none_is_missing() -> None:
    drawn = PAGE.partition("    src/coupled_adam/\n")[2].partition("    benchmarks/")[0]
    names = set(re.findall(r"\b([a-z_0-9]+)\.py\b", drawn))
    modules = {path.stem for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert names - modules - {"__init__"} == set()
    described_as_a_whole = ("commands", "inspection", "figures")
    rest = {path.stem for path in PACKAGE.rglob("*.py") if path.parent.name not in described_as_a_whole} & modules
    assert rest - names == set()
