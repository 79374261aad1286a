"""The structure of the package: module names are unique, and imports go one way."""

import ast
import sys
from collections import Counter
from pathlib import Path

import coupled_adam

PACKAGE = Path(coupled_adam.__file__).parent
# A command and the package it calls have the same name.
COMMANDS = "commands"
# training/config.py keeps the import path that config/ had in version 0.1.
KNOWN_TWICE = {"config"}
KNOWN_OF_THE_STANDARD_LIBRARY: set[str] = set()


def modules() -> list[Path]:
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.parts[-2] != COMMANDS]
    return [path.parent if path.name == "__init__.py" else path for path in found if not path.name.startswith("__main")]


def imported_by(path: Path) -> set[str]:
    """The full names of all modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(room: str, imported: str) -> list[str]:
    """The files of a package that import another package."""
    return [
        path.name
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if any(name == imported or name.startswith(f"{imported}.") for name in imported_by(path))
    ]


def test_no_two_modules_have_the_same_name() -> None:
    names = Counter(path.stem for path in modules())
    assert {name for name, count in names.items() if count > 1} <= KNOWN_TWICE


def test_no_module_has_a_name_from_the_standard_library() -> None:
    assert {path.stem for path in modules()} & sys.stdlib_module_names <= KNOWN_OF_THE_STANDARD_LIBRARY


def test_study_does_not_import_report() -> None:
    rooms = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]
    assert "study" in rooms
    assert "report" in rooms
    for room in set(rooms) - {COMMANDS, "report"}:
        assert importers(room, "coupled_adam.report") == [], room


def test_report_imports_nothing_that_trains_measures_or_launches() -> None:
    running = ("runner", "launchers", "worker", "measurement", "task_evaluation", "theory_evaluation", "energy")
    for module in running:
        assert importers("report", f"coupled_adam.study.{module}") == [], module
    assert importers("report", "coupled_adam.commands") == []
