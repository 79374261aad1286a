"""The table of `coupled-adam inspect` on a terminal of 80 columns: names are folded, numbers are not."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coupled_adam.cli import app

NAME = "a-model-whose-name-is-longer-than-its-column"


@pytest.mark.parametrize("count", [2, 6])
def test_models_with_long_names_keep_every_number(tmp_path: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    paths = [str(tmp_path / f"{NAME}-{place}.npy") for place in range(count)]
    for place, path in enumerate(paths):
        np.save(path, generator.normal(size=(60, 4)).astype(np.float32) + 3 * place)
    shown = CliRunner().invoke(app, ["inspect", *paths], env={"COLUMNS": "80"}).output
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) <= 80 or count > 5
    measured = json.loads(CliRunner().invoke(app, ["inspect", *paths, "--json"]).stdout)
    for place, model in enumerate(measured["models"], 1):
        column = [row.split("│")[place + 1].strip() for row in rows]
        for key in ("iso", "mu_norm", "mu_norm_ratio", "kappa"):
            value = model["tables"][0][key]
            assert any(abs(float(cell) - value) <= 1e-3 * abs(value) for cell in column if is_number(cell)), key


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
