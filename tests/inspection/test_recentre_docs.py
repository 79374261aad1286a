"""docs/recentre.md: its options, refusals, JSON keys, families and Python match the command."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from recentred_models import gpt2, save

from coupled_adam.cli import app
from coupled_adam.inspection.plain_sentence import CENTRED_BELOW
from coupled_adam.inspection.recentring.probability_check import Difference
from coupled_adam.inspection.recentring.recentre_model import LARGEST_DIFFERENCE, Recentred

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "recentre.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_complete() -> None:
    command: Any = typer.main.get_command(app)
    options = {name for each in command.commands["recentre"].params for name in each.opts if name.startswith("--")}
    assert set(re.findall(r"^\| `(--[a-z]+)", PAGE, re.MULTILINE)) == options - {"--help"}


def test_the_page_names_every_field_of_the_json_and_the_limits() -> None:
    last = PAGE.partition("## In Python")[2]
    for kind in (Recentred, Difference):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in last, field.name
    assert f"above {LARGEST_DIFFERENCE:.0e}".replace("e-0", "e-") in PAGE
    assert f"Below {CENTRED_BELOW}" in PAGE


def test_links_have_targets() -> None:
    for target, anchor in re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", PAGE):
        text = (DOCS / target).read_text(encoding="utf-8")
        headings = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in
                    re.findall(r"^#+ (.*)$", text, re.MULTILINE)]  # fmt: skip
        assert not anchor or anchor in headings, anchor
    assert "recentre.md" in (DOCS / "inspect.md").read_text(encoding="utf-8")


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    save(gpt2(), tmp_path / "models" / "mine")
    exec(example, {})
    assert capsys.readouterr().out.startswith("positions ")
    assert (tmp_path / "models" / "mine-centred" / "config.json").is_file()
