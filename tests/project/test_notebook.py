"""The notebook runs from top to bottom without a network, and its outputs support its text."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "coupled_adam_in_five_minutes.ipynb"
MOST_BYTES = 100_000


def printed(notebook: dict[str, Any]) -> str:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "\n".join("".join(output.get("text", "")) for output in outputs)


def ratios(notebook: dict[str, Any]) -> dict[str, float]:
    """The mean-embedding ratio of every optimizer."""
    found = re.findall(r"^(standard|coupled|partial) +([\d.]+) +[\d.]+ +-?[\d.]+$", printed(notebook), re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("nbmake")
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("notebook") / NOTEBOOK.name
    path.write_bytes(NOTEBOOK.read_bytes())
    options = ["--nbmake", "--nbmake-timeout=120", "--overwrite", "-q", "-p", "no:cacheprovider"]
    # An unused address: a download fails at once.
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", str(path.parent), str(path)],
        env={**os.environ, **proxy, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_the_notebook_runs_and_shows_that_coupling_keeps_the_mean_at_the_origin(executed: dict[str, Any]) -> None:
    found = ratios(executed)
    assert found.keys() == {"standard", "coupled", "partial"}
    assert found["standard"] > 0.5
    assert found["coupled"] < 0.1
    assert found["partial"] < 0.1
    assert any(
        "image/png" in output.get("data", {}) for cell in executed["cells"] for output in cell.get("outputs", [])
    )


def test_the_stored_outputs_are_small_and_up_to_date(executed: dict[str, Any]) -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    stored = json.loads(text)
    assert ratios(stored) == pytest.approx(ratios(executed), abs=0.05)
    kinds = {output["output_type"] for cell in stored["cells"] for output in cell.get("outputs", [])}
    assert "error" not in kinds
    assert not re.search(r"/(home|tmp|root|work|Users)/", printed(stored))
