"""docs/study.md and docs/study-reference.md: the example is a valid study, and everything they name exists."""

import itertools
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from page_examples import ROOT, read_examples, run_here
from typer.main import get_command

from coupled_adam.base.text import short
from coupled_adam.cli import app
from coupled_adam.config import study_sections as sections
from coupled_adam.config.builtin_files import STUDIES
from coupled_adam.config.study_config import Study, load_study, parse_study, with_settings
from coupled_adam.metrics import FREQUENCY_PREFIX, METRICS, TABLE_METRICS, TASK_LIMIT, TASKS, THEORY_PREFIX
from coupled_adam.report import result_tables as tables
from coupled_adam.study.expansion import cells_of, chosen
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.overview import gpu_hours, hours
from coupled_adam.study.results import STORED, Result, to_json
from coupled_adam.study.runner import LAUNCHERS
from coupled_adam.study.selection import cells_in

HOW_TO = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
REFERENCE_PAGE = ROOT / "docs" / "study-reference.md"
REFERENCE = REFERENCE_PAGE.read_text(encoding="utf-8")
MINE = next(block for block in re.findall(r"```toml\n(.*?)```", HOW_TO, re.DOTALL) if block.startswith("name"))
COMMANDS = [
    words
    for block in re.findall(r"```sh\n(.*?)```", HOW_TO + REFERENCE, re.DOTALL)
    for words in (shlex.split(line, comments=True) for line in block.splitlines())
    if words[0] == "coupled-adam"
]


def section(heading: str) -> str:
    """The section of the reference whose heading contains these words, with its subsections."""
    parts = re.split(r"^(#+) (.*)\n", REFERENCE, flags=re.MULTILINE)[1:]
    [start] = [number for number in range(0, len(parts), 3) if heading in parts[number + 1]]
    level = len(parts[start])
    text = parts[start + 2]
    for number in range(start + 3, len(parts), 3):
        if len(parts[number]) <= level:
            break
        text += parts[number + 1] + "\n" + parts[number + 2]
    return text


def table(first: str) -> str:
    """The table of the reference whose first column has this title."""
    [found] = re.findall(rf"^\| {first} \|.*?(?=\n\n|\Z)", REFERENCE, re.MULTILINE | re.DOTALL)
    return found


def first_column(text: str) -> list[str]:
    """The code spans in the first columns of the tables in a text."""
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def load_named(spec: str) -> Study:
    """A study that a command of the page names."""
    return parse_study(MINE, spec, Path()) if spec == "mine.toml" else load_study(spec)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_on_the_study_pages_uses_existing_commands_options_studies_and_runs(command: list[str]) -> None:
    found = get_command(app)
    words = command[1:]
    while hasattr(found, "commands"):
        assert words[0] in found.commands, f"no command {words[0]}"
        found = found.commands[words.pop(0)]
    known = {name for parameter in found.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    values = [(option, value) for option, value in itertools.pairwise(words) if option.startswith("--")]
    if command[1:3] == ["study", "run"]:
        settings = [value for option, value in values if option == "--set"]
        cells = cells_of(*with_settings(load_named(words[0]), settings))
        assert chosen(cells, [value for option, value in values if option == "--only"])
        assert {value for option, value in values if option == "--launcher"} <= set(LAUNCHERS)
    elif command[1:3] == ["study", "show"]:
        assert words[0] in STUDIES


def test_every_option_and_launcher_of_study_run_is_in_the_reference() -> None:
    options = get_command(app).commands["study"].commands["run"].params  # type: ignore[attr-defined]
    named = {name.split()[0] for name in first_column(table("option of `study run`"))}
    assert named == {name for option in options for name in option.opts if name.startswith("--")}
    assert first_column(table("launcher")) == list(LAUNCHERS)


def test_tables_of_the_reference_have_every_key_of_a_study_file() -> None:
    named = [key.strip("[]") for key in first_column(section("The study file"))]
    kinds = (
        sections.ModelAxis,
        sections.OptimizerAxis,
        sections.SelectSection,
        sections.EvaluationSection,
        sections.ReportSection,
        sections.SlurmSection,
    )
    parts = ("models", "optimizers", "select", "evaluation", "report", "slurm")
    expected = [key for key in Study.model_fields if key not in parts]
    expected += [key for kind in kinds for key in kind.model_fields]
    assert sorted(named) == sorted(expected)
    for part in parts:
        assert f"[{part}]" in section("The study file")


def test_defaults_in_the_reference_match_the_study_file() -> None:
    parts = (sections.SelectSection, sections.EvaluationSection, sections.SlurmSection)
    kinds = {key: field for part in parts for key, field in part.model_fields.items()}
    shown = dict(re.findall(r"^\| `(\w+)` \| `?(true|false|\d+)`? \|", section("The study file"), re.MULTILINE))
    selecting = {"trial_seed", "extend"}
    measured = {"test_loss", "quantised_loss", "measures", "theory", "theory_batches"}
    assert shown.keys() == measured | {"hours", "gpus", "cpus"} | selecting
    for key, value in shown.items():
        assert tomllib.loads(f"value = {value}")["value"] == kinds[key].default, key


def test_the_example_of_the_study_page_has_the_plan_shown() -> None:
    cells = cells_of(parse_study(MINE, "mine.toml", Path()))
    assert f"mine: {len(cells)} runs" in HOW_TO
    assert len(re.findall(rf"\b{len(cells)} runs\b", HOW_TO)) > 1, "the text says how many, too"
    for cell in cells:
        assert f"│ {cell.id} " in HOW_TO, cell.id


def test_the_hours_of_the_papers_plan_in_the_reference_are_the_ones_printed() -> None:
    cells = cells_of(load_study("paper-small-scale"))
    title, _, *rows = [[part.strip() for part in row.split("|")[1:-1]] for row in table("model").splitlines()]
    shown = {f"{model}-{size}": value for model, *row in rows for size, value in zip(title[1:], row, strict=True)}
    for id in dict.fromkeys(cell.id for cell in cells):
        needed = hours(gpu_hours([cell for cell in cells if cell.id == id]))
        assert shown[id.rpartition("-")[0]] == needed, id
    assert len(shown) == len({cell.id.rpartition("-")[0] for cell in cells})
    assert f"All {len(cells)} runs need {hours(gpu_hours(cells))} GPU hours" in section("Cost")


def test_the_list_of_studies_in_the_reference_matches_the_package(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]+\| (.+) \| (.+) \| (.+) \|$", table("study"), re.MULTILINE)
    assert [row[0] for row in rows] == list(STUDIES)
    for name, runs, tokens, needed in rows:
        cells = cells_in(StudyFolder(tmp_path), load_study(name))  # before a winner at an edge adds more
        assert int(runs) == len(cells), name
        assert tokens == short(sum(cell.config.training.tokens for cell in cells)), name
        assert needed == hours(gpu_hours(cells)), name


def test_table_of_the_reference_has_every_key_of_a_result() -> None:
    assert first_column(section("results.jsonl")) == list(STORED)
    others = {"input_", THEORY_PREFIX, FREQUENCY_PREFIX, TASK_LIMIT}
    named = set(re.findall(r"`([a-z_0-9]+)`", section("Names of metrics"))) - others
    of_tasks = {task.key for task in TASKS} | {"acc"}
    assert named == {
        *(metric.key for metric in TABLE_METRICS),
        *of_tasks,
        "loss",
        "loss_standard_error",
        "val_loss",
        "train_loss",
    }
    assert named <= METRICS.keys()


def test_python_of_the_reference_reads_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = read_examples(REFERENCE_PAGE)
    values = dict.fromkeys(STORED) | {"cell": "tiny-102.4k-coupled", "seed": 2}
    values["metrics"] = {"loss": 6.25, "mu_norm_ratio": 0.02}
    file = tmp_path / "runs" / "mine" / "results.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(to_json(Result(**values)) + "\n")  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    run_here(replace(example, output="tiny-102.4k-coupled 2 6.25 0.02\n"))


def test_the_reference_lists_all_tables_and_figures() -> None:
    album = pytest.importorskip("coupled_adam.report.figures.figure_list")
    assert {*first_column(table("table"))} == {*tables.NAMES}
    drawn = {entry.name for entry in album.ENTRIES}
    assert {*first_column(table("figure"))} == {name for name in drawn if not name.endswith("_input")}


def test_the_papers_studies_cost_what_the_reference_says() -> None:
    rows = re.findall(r"^\| .+ \| `(paper-[\w-]+)` \| (.+) \|$", HOW_TO, re.MULTILINE)
    assert {name for name, _ in rows} == {name for name in STUDIES if name.startswith("paper-")}
    for name, needed in rows:
        assert re.search(rf"^\| `{name}` \|.*\| {re.escape(needed)} \|$", REFERENCE, re.MULTILINE), name
