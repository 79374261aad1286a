"""Tables of studies and presets on a terminal of 80 columns: names give way, numbers and headings stay whole."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from coupled_adam.config.study_config import Study, load_study
from coupled_adam.study.cell import write_error
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.overview import plan_table, shipped_table, status_table
from coupled_adam.training.estimates import cpu, preset_table

WIDTH = 80


@pytest.fixture(scope="module")
def muon() -> Study:
    """A study whose runs have long names."""
    return load_study("muon")


def printed(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False).print(table)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in out.getvalue()
    return lines


def columns(lines: list[str]) -> list[list[str]]:
    """The pieces of text in every column of a table with lines between columns."""
    rows = [line.strip("┃│").replace("┃", "│").split("│") for line in lines if line[:1] in "┃│" and line]
    return [[piece.strip() for piece in column] for column in zip(*rows, strict=True)]


def test_a_plan_folds_long_names_and_keeps_every_number(muon: Study, tmp_path: Path) -> None:
    cells = cells_of(muon)
    names, seeds, done, *_, steps, hours = columns(printed(plan_table(muon, cells, StudyFolder(tmp_path))))
    assert (seeds[0], done[0], steps[0], hours[0]) == ("seeds", "done", "steps", "GPU hours")
    assert "1,2,3" in seeds
    longest = max((cell.id for cell in cells), key=len)
    assert len(longest) > 40
    assert longest in "".join(names)


def test_a_status_with_failures_keeps_every_number_and_the_whole_reason(muon: Study, tmp_path: Path) -> None:
    cells, folder = cells_of(muon), StudyFolder(tmp_path)
    run = folder.run(cells[0])
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 5004, "loss": 10.8251}\n')
    write_error(run, "CUDA out of memory at step 12 of /a/folder/with-a-name-that-is-longer-than-the-column")
    found = columns(printed(status_table(muon, cells, folder)))
    names, status, steps, train, _, reasons = found
    assert cells[0].label in "".join(names)
    assert "failed" in status
    assert "5,004/5,004" in steps
    assert "10.825" in train
    assert "with-a-name-that-is-longer-than-the-column" in "".join(reasons)
    assert "step" in steps
    assert "training loss" in " ".join(train)


def test_the_lists_of_studies_and_presets_fit() -> None:
    assert {"runs", "tokens", "GPU hours"} <= {column[0] for column in columns(printed(shipped_table()))}
    lines = printed(preset_table(cpu(16)))
    [row] = [line for line in lines if line.startswith("gpt2-125m ")]
    assert {"openwebtext", "124M", "5B", "50,862", "GB", "2", "h", "40", "min"} <= set(row.split())
