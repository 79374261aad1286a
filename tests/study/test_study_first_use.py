"""First use of `coupled-adam study`: refusals that change nothing, complete tables on a narrow terminal, the status of
runs that still have to be measured, and messages with the next step."""

import io
import re
import sys
from pathlib import Path

import pytest
from fabricated_study import COUPLED as COUPLED_SETTINGS
from fabricated_study import STANDARD, fabricate, scaled, sgd
from rich.console import Console
from study_cli import study
from study_runs import ADAMW, COUPLED, write_study

from coupled_adam.base.progress import wide_enough
from coupled_adam.config.run_config import load_config, to_toml
from coupled_adam.config.study_config import load_study
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_page import commands
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.study_plans import read_plans
from coupled_adam.report.table_formats import to_rich_comparison
from coupled_adam.study import launchers
from coupled_adam.study.config_hash import config_hash, settings_that_differ
from coupled_adam.study.expansion import Cell, cells_of
from coupled_adam.study.folder import TO_BE_MEASURED, StudyFolder
from coupled_adam.study.results import read_results

pytestmark = pytest.mark.usefixtures("quick", "empty_folder")
PAIR = ADAMW + COUPLED
NARROW = 80
MANY = {"standard": STANDARD, "coupled": COUPLED_SETTINGS, "coupled n=2": scaled(2), "sgd f=100": sgd(100)}
MANY |= {"sgd f=400": sgd(400)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def mark_as_trained(folder: Path) -> list[Cell]:
    """Write the checkpoint of the last step, which the stand-in for the worker omits."""
    cells = cells_of(load_study(str(folder)))
    for cell in cells:
        (folder / cell.run / "checkpoints" / f"step-{cell.config.total_steps}").mkdir(parents=True)
    return cells


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "scipy"])
def test_a_report_that_cannot_be_written_is_found_before_any_training(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "Worker", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setitem(sys.modules, package, None)
    result = study("run", str(write_study(tmp_path, PAIR)), "--out", "made/out")
    assert result.exit_code == 2
    assert re.search(rf"^Error: {package} .*: pip install .*\[study\]'\n$", result.output), result.output
    assert not (tmp_path / "made").exists()


REFUSED: dict[str, tuple[list[str], str]] = {
    "no lm-eval": (["--set", "evaluation.tasks=paper"], "[eval]"),
    "no submitit": (["--launcher", "slurm", "--set", "evaluation.theory=true"], "[cluster]"),
    "no word pairs": (["--set", "evaluation.wordsim=no-words"], "no-words"),
    "no corpus": (["--set", "evaluation.theory=true", "--set", "data.folder=no/corpus"], "no/corpus"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refused_study_does_not_change_a_finished_one(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "out")
    before = contents(tmp_path / "out")
    for package in ("lm_eval", "submitit"):
        monkeypatch.setitem(sys.modules, package, None)
    result = study("run", str(file), "--out", "out", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert contents(tmp_path / "out") == before
    assert study("status", "out").output.endswith("4 finished\n")


@pytest.mark.parametrize(
    ("arguments", "words"), [REFUSED[name] for name in ("no lm-eval", "no submitit", "no word pairs")]
)
def test_a_refused_study_creates_no_folder(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_study(tmp_path, PAIR)
    (tmp_path / "empty").mkdir()
    for package in ("lm_eval", "submitit"):
        monkeypatch.setitem(sys.modules, package, None)
    assert words in study("run", str(file), "--out", "runs/out", *arguments).output
    assert not (tmp_path / "runs").exists()
    assert words in study("run", str(file), "--out", "empty", *arguments).output
    assert (tmp_path / "empty").is_dir()  # which existed before


def test_trained_runs_without_a_requested_metric_are_listed_as_to_be_measured(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "out")
    asked = load_study(str(file)).evaluation.model_copy(update={"theory": True})
    cells = mark_as_trained(tmp_path / "out")
    folder = StudyFolder(tmp_path / "out")
    assert {folder.status(cell, asked) for cell in cells} == {TO_BE_MEASURED}
    plan = study("run", str(file), "--out", "out", "--set", "evaluation.theory=true", "--dry-run").output
    assert re.search(rf"^4 .*{TO_BE_MEASURED}", plan, re.MULTILINE), plan
    assert TO_BE_MEASURED not in study("run", str(file), "--out", "out", "--dry-run").output
    text = (tmp_path / "out" / "study.toml").read_text()
    (tmp_path / "out" / "study.toml").write_text(text.replace("theory = false", "theory = true"))
    shown = study("status", "out").output
    assert re.search(rf"small-1\.536k-coupled/seed-2 +│ {TO_BE_MEASURED}", shown), shown
    assert shown.endswith(f"4 {TO_BE_MEASURED}\n")
    last = cells[-1]
    checkpoints = tmp_path / "out" / last.run / "checkpoints"
    (checkpoints / f"step-{last.config.total_steps}").rename(checkpoints / "step-5")
    (tmp_path / "out" / last.run / "metrics.jsonl").touch()
    assert study("status", "out").output.endswith(f"3 {TO_BE_MEASURED}, 1 stopped\n")


def numbers_of(table: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?\(\d[\d.]*\)", table)


@pytest.mark.parametrize("more", [(), ("acc",)])
def test_a_narrow_terminal_shows_every_digit(more: tuple[str, ...], tmp_path: Path) -> None:
    measured = ("loss", "iso", "mu_norm", "mu_norm_ratio", "rho_log", "kappa", *more)
    folder = fabricate(tmp_path / "s", optimizers=MANY, seeds=(1, 2), noise=0.3, metrics=measured, with_runs=False)
    table = build_tables(gather_grid(read_results(folder)))[0]
    written = [cell.text for row in table.rows for cell in row[4:]]
    assert len(written) == 5 * len(measured)
    output = study("report", str(folder), width=NARROW).output
    shown = output[: output.rindex("┘") + 1]
    assert "…" not in shown
    assert numbers_of(shown) == written
    for name in MANY:
        assert re.search(rf"│ {name} +│", shown), shown
    lines = [line for line in shown.splitlines() if line[:1] in "┏┃│└"]
    if not more:
        assert max(map(len, lines)) <= NARROW
    # Columns with equal values are left out; no line is drawn between optimizers of one size.
    assert "307k" not in shown
    assert shown.count("├") == 0


def test_a_table_of_several_sizes_has_a_line_between_them(tmp_path: Path) -> None:
    sizes = (("S", 1000, 4000), ("S", 1000, 8000))
    folder = fabricate(tmp_path / "s", optimizers=MANY, sizes=sizes, with_runs=False)
    shown = study("report", str(folder), width=NARROW).output
    assert shown.count("├") == 1
    assert re.search(r"│ 4k +│ sgd f=400 +│.*\n├.*\n│ 8k +│ standard +│", shown), shown
    alone = fabricate(
        tmp_path / "t",
        optimizers={"coupled": COUPLED_SETTINGS},
        sizes=[("S", 1000, 1000 * n) for n in range(1, 6)],
        with_runs=False,
    )
    assert study("report", str(alone), width=NARROW).output.count("│ coupled ") == 5


def test_a_few_optimizers_with_long_names_keep_their_digits(tmp_path: Path) -> None:
    names = {f"standard, with a name of some length {n}": {**STANDARD, "lr": n} for n in range(3)}
    folder = fabricate(tmp_path / "s", optimizers=names, with_runs=False)
    shown = study("report", str(folder), width=40).output
    assert "…" not in shown[: shown.rindex("┘")]
    for name in names:
        assert f" {name} ┃" in shown


def test_a_wide_terminal_is_not_changed(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "s", optimizers=MANY, with_runs=False)
    table = to_rich_comparison(build_tables(gather_grid(read_results(folder)))[0])
    assert wide_enough(Console(width=300), table).width == 300
    assert wide_enough(Console(width=20), table).width > 60


def test_a_console_whose_reader_is_gone_stays_quiet(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "s", with_runs=False)
    table = to_rich_comparison(build_tables(gather_grid(read_results(folder)))[0])
    lost = Console(quiet=True, file=io.StringIO())
    wider = wide_enough(lost, table)
    assert (wider.quiet, wider.file) == (True, lost.file)


def repeated(folders: list[Path], out: Path) -> list[str]:
    results = [result for folder in folders for result in read_results(folder)]
    return commands(read_plans(folders, results), results, out)[1:]


def test_the_command_to_repeat_a_report_uses_the_new_runs(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    for name, pattern in (("a b", "*-standard"), ("c", "*-coupled")):
        study("run", str(file), "--out", name, "--only", pattern)
    first, second, both = Path("a b"), Path("c"), Path("both")
    run_first = "coupled-adam study run 'a b/study.toml' --out 'a b-again'"
    run_second = "coupled-adam study run c/study.toml --out c-again"
    assert repeated([first], first) == [run_first]
    assert repeated([first, second], both) == [
        run_first,
        run_second,
        "coupled-adam study report 'a b-again' c-again --out both",
    ]
    # Folders that cannot be run again are used as they are.
    (second / "study.toml").unlink()
    assert repeated([first, second], both)[1:] == ["coupled-adam study report 'a b-again' c --out both"]
    assert repeated([second], second) == ["coupled-adam study report c"]
    assert repeated([second], both) == ["coupled-adam study report c --out both"]


def test_the_refusal_names_the_settings_that_the_user_changed(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "out")
    for cell in cells_of(load_study("out")):
        stored = load_config(str(file.with_name("base.toml")), ["training.threads=1", "training.micro_batch_size=2"])
        config = cell.config.model_copy(update={"training": stored.training})
        (tmp_path / "out" / cell.run / "config.toml").write_text(to_toml(config))
    settings = ("optimizer.lr=3e-3", "log.every=7", "training.device=auto", "checkpoints.every=3")
    changes = [part for setting in settings for part in ("--set", setting)]
    output = study("run", str(file), "--out", "out", *changes).output
    assert output.splitlines()[1:] == [f"{cell.label}: optimizer.lr" for cell in cells_of(load_study("out"))]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("optimizer.lr=3e-5", ["optimizer.lr"]),
        ("data.folder=elsewhere/novels", ["data.folder"]),
        ("data.folder=elsewhere/corpus", []),  # same name
        ("data.source=files", ["data.source"]),
        ("training.threads=7", []),
        ("checkpoints.minutes=7", []),
    ],
)
def test_a_setting_is_named_exactly_if_it_changes_the_hash(setting: str, named: list[str]) -> None:
    before = load_config("tiny", ["data.folder=data/corpus", "data.source=none"])
    now = load_config("tiny", ["data.folder=data/corpus", "data.source=none", setting])
    assert settings_that_differ(before, now) == named
    assert (config_hash(before) != config_hash(now)) == bool(named)


def test_a_study_name_in_place_of_a_folder_suggests_the_folder(tmp_path: Path) -> None:
    study("run", str(write_study(tmp_path, PAIR)))
    for command in ("status", "report"):
        result = study(command, "small")
        assert result.exit_code == 2
        assert re.search("^Error: small .* runs/small\n$", result.output), result.output
        assert study(command, "runs/small").exit_code == 0
        assert "runs/nothing" not in study(command, "nothing").output
    (tmp_path / "small").mkdir()
    assert study("status", "small").output.endswith(" runs/small\n")


def test_help_shows_plain_names() -> None:
    usage = next(line for line in study("report", "--help").output.splitlines() if "Usage:" in line)
    assert "DIR" in usage
    assert usage.count("...") == 1
    assert "...." not in study("run", "--help").output
