"""docs/theory.md: its commands and its example run, and it lists the figures and files that are written."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from page_examples import ROOT, read_examples, run_here
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "theory"))
from fabricated_theory import fabricate
from theory_models import milestone_run

from coupled_adam.cli import app
from coupled_adam.config.run_config import load_config
from coupled_adam.theory.record import PUBLISHED
from coupled_adam.theory.run_figures import CAPTIONS
from coupled_adam.theory.theory_numbers import spread

PAGE = ROOT / "docs" / "theory.md"
TEXT = PAGE.read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
COMMANDS = [shlex.split(line) for line in LINES if line.startswith("coupled-adam")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_on_the_theory_page_uses_existing_options_and_settings(command: list[str]) -> None:
    found = get_command(app)
    for word in command[1:]:
        if isinstance(found, TyperGroup):
            found = found.commands[word]
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in command if word.startswith("--")} <= known
    if command[1] == "train":
        settings = [command[place + 1] for place, word in enumerate(command) if word == "--set"]
        config = load_config(command[2], settings)
        assert config.checkpoints.milestones == 10
        # The folder that later commands of the page use.
        default = f"runs/{config.name}-{config.optimizer.embeddings}-seed{config.seed}"
        out = command[command.index("--out") + 1] if "--out" in command else default
        assert any(out in other for other in COMMANDS if other[1] == "theory")


def test_the_command_of_the_page_runs_and_writes_the_files_of_its_table(tmp_path: Path) -> None:
    run = milestone_run(tmp_path)
    done = CliRunner().invoke(app, ["theory", str(run), "--batches", "2"])
    assert done.exit_code == 0, done.output
    table = TEXT.split("| in `RUN/theory/` |")[1].split("\n\n")[0]
    for path in (run / "theory").iterdir():
        name = re.sub(r"\d{9}", "000000300", path.name)
        assert name in table or f"`{path.suffix}`" in table or path.name == "figures", path


def test_the_example_of_the_theory_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fabricate(tmp_path / "runs" / "tiny-coupled-seed1", steps=(300,))
    monkeypatch.chdir(tmp_path)
    [example] = read_examples(PAGE)
    power = run_here(example)["power"]
    assert power == pytest.approx(1.0, abs=0.1)  # the fabricated second moment is proportional


def test_the_theory_page_shows_all_figures() -> None:
    shown = re.findall(r"\]\(images/theory-(\w+)\.svg\)", TEXT)
    assert sorted(shown) == sorted(CAPTIONS)
    for name in shown:
        assert (ROOT / "docs" / "images" / f"theory-{name}.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_papers_values_on_the_theory_page_are_the_published_ones() -> None:
    for name, value in PUBLISHED.items():
        shown = "about 1e-4" if name == "second_moment_A" else spread(value)
        assert f"| {shown} |" in TEXT, name
