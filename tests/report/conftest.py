"""Reports shared by several tests, and the import path to the made-up studies behind them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import COUPLED, STANDARD, fabricate, fabricated_demo

from coupled_adam.config.builtin_files import study_text
from coupled_adam.report.report_writer import write_report

ATTACK = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">{{ 7 * 7 }}"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the demo, with made-up numbers."""
    folder = fabricated_demo(tmp_path_factory.mktemp("report") / "demo")
    page = write_report([folder], folder)
    assert page == folder / "report.html"
    return page


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with hostile names wherever a file can contain one."""
    folder = tmp_path_factory.mktemp("hostile") / "a&b<i>"
    optimizers = {"standard": STANDARD, ATTACK: COUPLED}
    fabricate(folder, name=ATTACK, optimizers=optimizers, sizes=((ATTACK, 1000, 2000),), seeds=(1, 2))
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"device": "cpu"', f'"device": {json.dumps(ATTACK)}'))
    lines = study_text("demo").splitlines()
    lines[1] = f"title = {json.dumps(ATTACK)} # {ATTACK}"
    note = next(number for number, line in enumerate(lines) if line.startswith("loss_note"))
    lines[note] = f"loss_note = {json.dumps(ATTACK)}"
    (folder / "study.toml").write_text("\n".join(lines))
    return write_report([folder], folder)
