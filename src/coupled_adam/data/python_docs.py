"""`python-docs`: the documentation of Python's standard library, of torch and of numpy, as it is installed here.

Every user has it, so nothing is downloaded. It differs a little between versions; on one machine it is always the same,
in the same order. The files are parsed; no code in them is run.
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
# Functions by which torch and numpy give docstrings to what is compiled.
ADD_DOCSTRING = {"add_docstr", "add_docstr_all", "add_newdoc", "add_newdoc_for_scalar_type"}
# Where a statement has others inside it, last one first.
PARTS_OF_STATEMENTS = ("finalbody", "orelse", "handlers", "body")
TEXT_SUFFIXES = (".rst", ".md")
FEWEST_DOCUMENTS = 20
FILES_AT_ONCE = 16


class PythonDocs:
    """One document per file: its docstrings; then the chapters of the language reference that `help()` shows."""

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
    """All documents of this machine."""
    library = Path(sysconfig.get_path("stdlib"))
    folders = [(library, documentation_files(library))]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)  # finds it without importing it
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
            f"least {FEWEST_DOCUMENTS}; use a Python that is installed with its .py files"
        )
    return documents


def documentation_files(folder: Path) -> list[Path]:
    """The files of a package that may have documentation, in the order of their paths."""
    found = []
    for parent, folders, files in os.walk(folder):
        # The private folders of torch are its compiler: half of all the time to parse, for a fifth of the text.
        private = {name for name in folders if name.startswith("_") and folder.name == "torch"}
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS | private]
        found += [Path(parent, name) for name in files if name.endswith((".py", *TEXT_SUFFIXES))]
    return sorted(found)


def documentation_reader() -> Callable[[Sequence[Path]], list[str]]:
    """What a worker runs: the documentation of some files."""

    def read(paths: Sequence[Path]) -> list[str]:
        # A syntax tree is many objects that all live until it is dropped; to search them for garbage doubles the time.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return [documentation(path) for path in paths]
        finally:
            if was_enabled:
                gc.enable()

    return read


def documentation(path: Path) -> str:
    """The documentation in one file: a text as it is; of a Python file its docstrings, and those it adds to others."""
    if path.suffix in TEXT_SUFFIXES:
        try:
            return path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""
    tree = _parsed(path)
    return "" if tree is None else "\n\n".join([*_docstrings(tree), *_added_docstrings(tree)])


def topic_documents() -> list[str]:
    """The chapters of the language reference that `help()` shows, in the order of their names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it apart
        return []
    return [text for _, text in sorted(topics.items())]


def _parsed(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as an invalid escape in somebody else's file
        try:
            return ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None


def _docstrings(tree: ast.Module) -> list[str]:
    docstrings = (ast.get_docstring(node) for node in _statements(tree) if isinstance(node, Documentable))
    return [docstring for docstring in docstrings if docstring]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and its statements in the order of the file; not ast.walk, which enters expressions too."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for part in PARTS_OF_STATEMENTS:
            pending += reversed(getattr(node, part, ()))


def _added_docstrings(tree: ast.Module) -> Iterator[str]:
    """Texts among the arguments of calls such as add_docstr(torch.abs, "..."); names have no spaces."""
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
