"""Names of cells in a file or pipe are whole, however narrow the assumed terminal is, so `grep` finds them."""

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table
from study_cli import study

from coupled_adam.base.progress import with_whole_names
from coupled_adam.config.study_config import load_study
from coupled_adam.study.expansion import cells_of


def test_a_plan_in_a_pipe_has_every_name_on_one_line(tmp_path: Path) -> None:
    result = study("run", "muon", "--dry-run", "--out", str(tmp_path / "out"), width=60)
    assert result.exit_code == 0
    shown = {line.split("│")[1].strip() for line in result.output.splitlines() if line.startswith("│")}
    longest = max((cell.id for cell in cells_of(load_study("muon")) if not cell.is_candidate), key=len)
    assert longest in shown


def test_a_terminal_folds_names_and_a_pipe_does_not() -> None:
    name = "a-name-of-a-run" * 4
    for is_terminal in (True, False):
        out = io.StringIO()
        table = Table("run")
        table.add_row(name)
        console = Console(file=out, width=40, force_terminal=is_terminal, highlight=False)
        with_whole_names(console, table).print(table)
        assert (name in out.getvalue()) is not is_terminal
