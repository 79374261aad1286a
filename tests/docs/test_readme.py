"""README.md: every python block runs as written."""

from pathlib import Path

import pytest
from page_examples import README, Example, read_examples, run_here


@pytest.mark.parametrize("example", read_examples(README), ids=str)
def test_example_runs_as_written(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(example)
