"""docs/inspect.md shows the command's output, and names every format, measure and threshold."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.inspection.file_formats import SUFFIXES
from coupled_adam.inspection.plain_sentence import ANISOTROPIC_FROM, CENTRED_BELOW, EVEN_FROM, STRONGLY_FROM
from coupled_adam.metrics import TABLE_METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text(encoding="utf-8")


def test_the_first_example_prints_the_output_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"```sh\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    commands, printed = examples[0]
    program, inspect = re.fullmatch(r'python -c "(.*)"\ncoupled-adam (.*)\n', commands).groups()
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert np.load("centred.npy").shape == (5000, 64)
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, inspect.split())
    assert result.stdout == printed


def test_the_page_names_every_format_measure_and_threshold() -> None:
    for suffix in SUFFIXES:
        assert f"`{suffix}`" in PAGE
    for metric in TABLE_METRICS:
        assert f"| {metric.label} | `{metric.key}` | {metric.arrow} |".replace("|  |", "| |") in PAGE
    assert re.search(rf"below {CENTRED_BELOW} \| centred.* ISO .*\b{EVEN_FROM}\b", PAGE)
    assert f"{CENTRED_BELOW} to {ANISOTROPIC_FROM} | somewhat off-centre" in PAGE
    assert f"{ANISOTROPIC_FROM} to {STRONGLY_FROM} | anisotropic" in PAGE
