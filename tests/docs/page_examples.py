"""Extract the python examples of a Markdown page and run them as a reader would.

A comment line before a block, invisible when rendered, says how the block is run:

    <!-- file: NAME -->      not run, but saved as NAME for the other examples to import
    <!-- run: process -->    in its own process, for libraries with global state
    <!-- run: torchrun N --> on N ranks
    <!-- run: gpu -->        only with CUDA

A block without a comment runs in the test process. A `text` block directly after it is its expected output.
"""

import ast
import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
USING_PAGE = ROOT / "docs" / "using-coupledadamw.md"
USING_REFERENCE = ROOT / "docs" / "coupledadamw-reference.md"
FRAMEWORKS_PAGE = ROOT / "docs" / "frameworks.md"
MUON_PAGE = ROOT / "docs" / "with-muon.md"
README = ROOT / "README.md"

BLOCK = re.compile(
    r"^(?:<!-- (?P<key>run|file): (?P<value>[^\n]+) -->\n)?"
    r"```python\n(?P<source>.*?)^```\n"
    r"(?:```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One python block of a page."""

    page: Path
    title: str
    """The heading above it."""
    first_line: int
    """Its first line in the page, counted from 1."""
    source: str
    file: str | None
    """The file name to save it under, if it is not run."""
    run: str
    """"here", "process", "torchrun N" or "gpu"."""
    output: str | None
    """Its expected output, if the page shows it."""

    @property
    def folder(self) -> str:
        """Name of its own folder, if it runs in another process."""
        return f"{self.page.stem}-{self.first_line}"

    def __str__(self) -> str:
        return f"{self.title}, line {self.first_line}"


def read_examples(page: Path) -> list[Example]:
    """All python blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    without_code = re.sub(r"^```.*?^```$", lambda m: " " * len(m.group()), text, flags=re.MULTILINE | re.DOTALL)
    headings = [(match.start(), match.group(1)) for match in HEADING.finditer(without_code)]
    return [
        Example(
            page=page,
            title=[title for start, title in headings if start < match.start()][-1],
            first_line=text.count("\n", 0, match.start("source")) + 1,
            source=match["source"],
            file=match["value"] if match["key"] == "file" else None,
            run=match["value"] if match["key"] == "run" else "here",
            output=match["output"],
        )
        for match in BLOCK.finditer(text)
    ]


def imported_modules(example: Example) -> set[str]:
    """The modules that an example imports."""
    nodes = list(ast.walk(ast.parse(example.source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def save_files(page: Path, folder: Path) -> None:
    """Write the blocks that are files into a folder, so that the others can import them."""
    for example in read_examples(page):
        if example.file:
            (folder / example.file).write_text(example.source, encoding="utf-8")


def run_here(example: Example) -> dict[str, Any]:
    """Run an example in this process, compare its output, and return its global names."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    torch.manual_seed(0)
    # The empty lines make tracebacks show the line of the page.
    code = compile("\n" * (example.first_line - 1) + example.source, str(example.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    if example.output is not None:
        assert printed.getvalue() == example.output
    return namespace


def run_beside_tiny(example: Example, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Like `run_here`, with the page's tiny.py in a folder of its own."""
    save_files(USING_PAGE, folder)
    monkeypatch.syspath_prepend(folder)
    names = run_here(example)
    sys.modules.pop("tiny", None)
    return names
