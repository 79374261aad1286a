"""`python-docs`: the installed documentation of Python's standard library, torch and numpy.

Every user has it, so nothing is downloaded. It differs slightly between versions, but is always the same on one
machine, in the same order. The files are parsed, not executed.
"""

import ast
import gc
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.data.sources import Piece, Position
from coupled_adam.data.workers import Workers

Documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PACKAGES = ("torch", "numpy")
# Functions with which torch and numpy attach docstrings to compiled code.
ADD_DOCSTRING = {"add_docstr", "add_docstr_all", "add_newdoc", "add_newdoc_for_scalar_type"}
# Attributes that hold nested statements, in reverse order.
PARTS_OF_STATEMENTS = ("finalbody", "orelse", "handlers", "body")
TEXT_SUFFIXES = (".rst", ".md")
FEWEST_DOCUMENTS = 20
FILES_AT_ONCE = 16


class PythonDocs:
    """One document per file with its docstrings, then the language reference topics of `help()`."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._documents: list[str] | None = None
        self._given = 0

    def found(self) -> dict[str, Any]:
        return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}

    def default_fraction(self) -> float:
        return 0.05

    def pieces(self, position: Position | None) -> Iterator[Piece]:
        self._given = position["document"] if position else 0
        self._documents = self._documents or python_documents(self._processes)
        for text in self._documents[self._given :]:
            self._given += 1
            yield Piece(text)

    def position(self) -> Position:
        return {"document": self._given}

    def progress(self) -> float | None:
        return self._given / len(self._documents) if self._documents else 0.0


def python_documents(processes: int) -> list[str]:
    """Collect all documents on this machine."""
    library = Path(sysconfig.get_path("stdlib"))
    folders = [(library, documentation_files(library))]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # does not import it
        for folder in map(Path, spec.submodule_search_locations or [] if spec else []):
            folders.append((folder, documentation_files(folder)))
    files = [file for _, inside in folders for file in inside]
    batches = [files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]
    with Workers(processes, documentation_reader) as workers:
        documents = [text for texts in workers.map(batches) for text in texts if text]
    documents += topic_documents()
    if len(documents) < FEWEST_DOCUMENTS:
        raise UserError(
            f"{', '.join(str(folder) for folder, _ in folders)}: {len(documents)} documented source files, expected at "
            f"least {FEWEST_DOCUMENTS}; use a Python installation that includes its .py files"
        )
    return documents


def documentation_files(folder: Path) -> list[Path]:
    """Files of a package that may contain documentation, sorted by path."""
    found = []
    for parent, folders, files in os.walk(folder):
        # torch's private folders are its compiler: half of the parsing time for a fifth of the text.
        private = {name for name in folders if name.startswith("_") and folder.name == "torch"}
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS | private]
        found += [Path(parent, name) for name in files if name.endswith((".py", *TEXT_SUFFIXES))]
    return sorted(found)


def documentation_reader() -> Callable[[Sequence[Path]], list[str]]:
    """Make the function that a worker runs: extract the documentation of some files."""

    def read(paths: Sequence[Path]) -> list[str]:
        # A syntax tree has many objects that all live equally long; collecting garbage among them doubles the time.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return [documentation(path) for path in paths]
        finally:
            if was_enabled:
                gc.enable()

    return read


def documentation(path: Path) -> str:
    """Documentation in a file: a text file verbatim; a Python file's docstrings, including those it attaches."""
    if path.suffix in TEXT_SUFFIXES:
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
    tree = _parsed(path)
    return "" if tree is None else "\n\n".join([*_docstrings(tree), *_added_docstrings(tree)])


def topic_documents() -> list[str]:
    """Language reference topics of `help()`, sorted by name."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately
        return []
    return [text for _, text in sorted(topics.items())]


def _parsed(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as invalid escapes in third-party files
        try:
            return ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None


def _docstrings(tree: ast.Module) -> list[str]:
    docstrings = (ast.get_docstring(node) for node in _statements(tree) if isinstance(node, Documentable))
    return [docstring for docstring in docstrings if docstring]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module and its statements in file order; unlike ast.walk, skip expressions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for part in PARTS_OF_STATEMENTS:
            pending += reversed(getattr(node, part, ()))


def _added_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in calls such as add_docstr(torch.abs, "..."); strings without spaces are names."""
    for node in _statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) in ADD_DOCSTRING:
            for inside in ast.walk(node.value):
                if isinstance(inside, ast.Constant) and isinstance(inside.value, str) and " " in inside.value.strip():
                    yield inspect.cleandoc(inside.value)


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
