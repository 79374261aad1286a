"""docs/measures.md: its examples run in order, as written, and it explains every measure."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.embeddings import EmbeddingMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "measures.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_examples_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(compile(example, "docs/measures.md", "exec"), names)
    assert len(EXAMPLES) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"prints `{last}`" in PAGE


def test_every_measure_is_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", PAGE))
    missing = {field.name for field in fields(EmbeddingMetrics)} - explained
    assert missing <= {"shape", "norms"}
