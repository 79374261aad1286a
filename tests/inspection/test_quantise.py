"""`coupled-adam inspect --quantise`, compared with a literal computation in numpy.

Legend: V vocabulary rows, H hidden size.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.embeddings.integers import quantise

V, H = 5000, 72  # more rows than a block, and a last group of 8 columns


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["inspect", *map(str, arguments)])


def shifted() -> np.ndarray:
    generator = np.random.default_rng(0)
    return (generator.standard_normal((V, H)) + 3 * generator.standard_normal(H)).astype(np.float32)


def rounded(E: np.ndarray, largest: int, group: int) -> np.ndarray:
    """Round number by number."""
    result = np.empty_like(E)
    for i, row in enumerate(E):
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = max(abs(float(x)) for x in part) / largest
            result[i, start : start + group] = [round(float(x) / scale) * scale for x in part]
    return result


def test_the_errors_match_a_literal_computation(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", shifted())
    result = run(tmp_path / "table.npy", "--quantise", "int8,int4", "--json")
    found = json.loads(result.stdout)["models"][0]["tables"][0]["quantised"]
    assert [(each["integers"], each["scale"]) for each in found] == [
        ("int8", "row"),
        ("int8", "group of 32"),
        ("int4", "row"),
        ("int4", "group of 32"),
    ]
    E = shifted().astype(np.float64)
    centred = E - E.mean(0)
    for each in found:
        largest, group = {"int8": 127, "int4": 7}[each["integers"]], {"row": H, "group of 32": 32}[each["scale"]]
        for exact, suffix in ((E, ""), (centred, "_recentred")):
            error = rounded(exact, largest, group) - exact
            assert each[f"table{suffix}"] == pytest.approx(100 * np.linalg.norm(error) / np.linalg.norm(centred))
            vectors = np.random.default_rng(1).standard_normal((H, 64))
            vectors /= np.linalg.norm(vectors, axis=0)
            noise, signal = (error @ vectors).var(0).mean(), (E @ vectors).var(0).mean()
            assert each[f"logits{suffix}"] == pytest.approx(100 * np.sqrt(noise / signal), rel=0.15)  # other vectors
        assert each["table_recentred"] < 0.8 * each["table"]


def test_a_table_of_few_integers_has_no_error() -> None:
    E = torch.tensor([[7.0, -3.0, 0.0, 1.0], [14.0, 2.0, -14.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(quantise(E, "int4", None), E)
    assert torch.equal(quantise(E, "int4", 3)[:, :3], E[:, :3])


def test_equal_rows_have_no_error_to_compare_with(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.ones((40, 8), np.float32))
    result = run(tmp_path / "table.npy", "--quantise", "int8", "--json")
    (first, _) = json.loads(result.stdout)["models"][0]["tables"][0]["quantised"]
    assert first["table"] is None
    assert first["logits"] is None


def test_terminal_and_page_show_the_errors_of_every_table(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", shifted()[:200])
    np.save(tmp_path / "b.npy", shifted()[200:500])
    page = tmp_path / "page.html"
    result = run(tmp_path / "a.npy", tmp_path / "b.npy", "--quantise", "int4", "--html", page)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "int4 per" in line]
    assert len(lines) == 4
    for line in lines:
        assert line.count("→") == 2
    assert page.read_text().count("→") >= 8
    assert "int4" not in run(tmp_path / "a.npy").stdout
    assert "quantised" not in run(tmp_path / "a.npy", "--json").stdout


def test_other_integers_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", shifted()[:100])
    result = run(tmp_path / "a.npy", "--quantise", "int8,int3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'int3'" in result.stderr
    assert result.stderr.count("\n") == 1
