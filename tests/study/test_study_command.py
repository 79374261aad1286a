"""`coupled-adam study ...` and `coupled-adam demo` in this process, with a quick stand-in for the worker process."""

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from fabricated_study import fabricated_demo
from study_cli import study
from study_runs import ADAMW, COUPLED, FAKE_WORKER, study_corpus, write_study
from typer.testing import CliRunner

from coupled_adam.base.notation import MISSING
from coupled_adam.commands import demo as demo_command
from coupled_adam.config.builtin_files import STUDIES
from coupled_adam.config.study_config import load_study
from coupled_adam.metrics import METRICS
from coupled_adam.study import launchers, runner
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.results import read_results, write_evaluation
from coupled_adam.study.selection import cells_in

pytestmark = pytest.mark.usefixtures("quick", "empty_folder")
PAIR = ADAMW + COUPLED
FAILING = PAIR + '[[optimizers]]\nname = "fails"\nembeddings = "adamw"\nset = { "optimizer.lr" = 3e-3 }\n'

cli = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def headings(shown: str) -> list[str]:
    """The headings of a printed table; a heading may take several lines."""
    lines = [line.strip("┃").split("┃") for line in shown.splitlines() if line.startswith("┃")]
    return [" ".join(part.strip() for part in parts).strip() for parts in zip(*lines, strict=True)]


def test_list_shows_every_study_with_its_size() -> None:
    shown = study("list").output
    sizes = (6, 12, 18, 18, 18, 15, 10, 3, 65, 84, 55, 108, 48, 18, 30, 90, 42, 18, 18, 54, 99, 72, 8)
    for name, runs in zip(STUDIES, sizes, strict=True):
        assert re.search(rf"│ {name} +│.*│ +{runs} │", shown)


def test_the_demo_output_starts_with_the_embeddings_and_marks_values_without_bold(tmp_path: Path) -> None:
    folder = fabricated_demo(tmp_path / "demo", with_runs=False)
    for result in read_results(folder):
        result.run_folder.mkdir(parents=True)
        write_evaluation(result)
    shown = study("report", str(folder), width=500).output
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    labels = [row[0].split(" (")[0].strip() for row in rows]
    assert labels[:2] == ["‖μ‖ ratio", "ISO"]
    assert labels[-1] == "loss"
    assert [[cell.strip().endswith("*") for cell in row[1:]] for row in rows] == [[False, True]] * len(rows)
    assert "bold" not in shown.lower()
    note = load_study("demo").report.loss_note
    assert note is not None
    assert shown.count(note) == 1
    assert shown.index("85%") < shown.index(METRICS["loss"].label) < shown.index(note)


@pytest.mark.parametrize("name", STUDIES)
def test_show_prints_a_file_that_is_the_study(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(study("show", name).output)
    assert load_study(str(tmp_path / "mine.toml")) == load_study(name)


@pytest.mark.parametrize("name", STUDIES)
def test_a_dry_run_shows_the_plan_and_starts_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "Worker", lambda *_: pytest.fail("a worker was started"))
    result = study("run", name, "--dry-run")
    assert result.exit_code == 0
    cells = cells_in(StudyFolder(tmp_path), load_study(name))
    for id in {cell.id for cell in cells}:
        assert f"│ {id} " in result.output
    assert f"{name}: {len(cells)} runs" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_stopped_study_ends_with_the_exit_code_of_its_signal(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_study", lambda *_, **__: runner.StudyOutcome(left=2, signal=name))
    result = study("run", str(write_study(tmp_path, PAIR)), "--out", "out")
    assert result.exit_code == code
    assert re.search(rf"{name}: 2 runs .*: coupled-adam study run .*--out out", result.output), result.output


def test_a_dry_run_counts_the_gpu_hours() -> None:
    # 125M: per token 6 N + 12 L H T operations, N without positions; 5B tokens, three seeds, at 45% of 989 TFLOP/s.
    parameters = 50304 * 768 + 12 * 12 * 768**2
    hours = 3 * 5e9 * (6 * parameters + 12 * 12 * 768 * 1024) / (0.45 * 989e12) / 3600
    shown = study("run", "paper-small-scale", "--dry-run", "--only", "125M-5B-coupled").output
    found = re.search(r"│ 125M-5B-coupled │ 1,2,3 │ +0 │ 124M │ +5B │ 50.9k │ +([\d.]+) │", shown)
    assert found is not None
    assert float(found[1]) == pytest.approx(hours, rel=0.02)


def test_a_run_prints_the_comparison_and_where_the_report_is(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    result = study("run", str(file), "--out", "out", "--set", "log.every=3")
    assert result.exit_code == 0, result.output
    for words in ("4 runs", "standard", "coupled", "loss (↓)", "Report: out/report.html"):
        assert words in result.output
    for path in ("report.html", "results.jsonl", "study.toml", "tables/main.csv"):
        assert (tmp_path / "out" / path).is_file()
    assert load_study("out").override == {"log.every": 3}
    assert study("status", "out").output.endswith("4 finished\n")


def test_the_folder_is_compared_with_the_study_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Path] = []
    compare = StudyFolder.require_fit

    def counted(folder: StudyFolder, *of_study: Any) -> None:
        compared.append(folder.path)
        compare(folder, *of_study)

    monkeypatch.setattr(StudyFolder, "require_fit", counted)
    assert study("run", str(write_study(tmp_path, ADAMW)), "--out", "out").exit_code == 0
    assert compared == [Path("out")]


def test_the_column_of_a_single_optimizer_is_named_after_it_and_its_tokens(tmp_path: Path) -> None:
    write_study(tmp_path, COUPLED)
    alone = study("run", "study.toml", "--out", "alone").output
    assert re.search(r"┃ +┃ +1.54k ┃\n┃ +┃ +coupled ┃", alone), alone
    write_study(tmp_path, COUPLED, more='tokens = ["1.536k", "2.56k"]\n')
    two_sizes = study("run", "study.toml", "--out", "sizes").output
    assert re.search(r"┃ +┃ +1.54k ┃ +2.56k ┃\n┃ +┃ +coupled ┃ +coupled ┃", two_sizes), two_sizes
    write_study(tmp_path, PAIR)
    pair = study("run", "study.toml", "--out", "pair").output
    assert re.search(r"┓\n┃ +┃ standard ┃ coupled ┃\n┡", pair), pair


def test_a_failed_run_gives_exit_code_1_and_is_shown_by_status(tmp_path: Path) -> None:
    file = write_study(tmp_path, FAILING)
    result = study("run", str(file), "--out", "out")
    assert result.exit_code == 1
    assert "small-1.536k-fails/seed-1: the loss is nan" in result.output  # from the stand-in
    assert re.search(rf"2 runs .*: coupled-adam study run {file} --out out\n", result.output), result.output
    shown = study("status", "out").output
    assert re.search(r"small-1\.536k-fails/seed-2 +│ failed +│.*loss is nan", shown)
    assert headings(shown) == ["run", "status", "step", "training loss", "test loss", "why it failed"]
    assert shown.endswith("4 finished, 2 failed\n")
    assert study("run", str(file), "--out", "out").exit_code == 0


def test_status_shows_training_and_test_loss_in_separate_columns(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "out", "--only", "*-coupled")
    result = next(each for each in read_results(Path("out")) if each.seed == 2)
    (result.run_folder / "metrics.jsonl").write_text('{"kind": "train", "step": 12, "loss": 9.25}\n')
    shown = study("status", "out").output
    assert headings(shown)[2:] == ["step", "training loss", "test loss"]
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    rows = {label: rest for label, _, *rest in cells}
    assert rows["small-1.536k-coupled/seed-2"] == ["12/12", "9.250", f"{result.metrics['loss']:.3f}"]
    assert rows["small-1.536k-standard/seed-2"] == ["", "", ""]


@pytest.mark.parametrize("command", ["status", "report"])
@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_that_is_not_a_study_is_refused_with_an_example(command: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = study(command, folder)
    assert result.exit_code == 2
    assert re.search(
        rf"^Error: {folder} .*study\.toml.*results\.jsonl.*`coupled-adam study run`.*runs/demo", result.output
    )
    assert result.output.count("\n") == 1


def test_a_report_without_a_finished_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "results.jsonl").write_text("")
    result = study("report", "none")
    assert result.exit_code == 2
    assert result.output.startswith("Error: none: ")
    assert result.output.count("\n") == 1


def test_folders_are_merged_into_one_report(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "a", "--only", "*/seed-1")
    study("run", str(file), "--out", "b", "--only", "*/seed-2", "--only", "*-coupled")
    assert [len(read_results(Path(name))) for name in "ab"] == [2, 3]
    refused = study("report", "a", "b")
    assert (refused.exit_code, "--out" in refused.output) == (2, True)
    result = study("report", "a", "b", "--out", "both")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "both" / "report.html").is_file()
    rows = (tmp_path / "both" / "tables" / "runs.csv").read_text().splitlines()
    assert len(rows) == 1 + 4


def test_folders_that_contradict_each_other_are_not_merged(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "a")
    study("run", str(file), "--out", "b", "--set", "optimizer.beta2=0.9")
    result = study("report", "a", "b", "--out", "both")
    assert result.exit_code == 2
    assert re.search(r"small-1\.536k-standard, seed 1: .*\ba\b.*\bb\b", result.output), result.output


def test_the_terminal_shows_what_is_missing_and_what_is_not_checked(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    shown = study("run", str(file), "--out", "a", "--only", "*-standard").output
    assert re.search(r"┃ +┃ standard ┃ +coupled ┃\n┃ +┃ +seeds: 2 ┃ +seeds: 0 of 2 ┃", shown), shown
    assert re.search(rf"│ loss \(↓\) │ +1.00\(0\) │ +{MISSING} │", shown), shown
    assert "2 of 4" in shown
    assert shown.endswith(study("report", "a").output)
    (tmp_path / "a" / "study.toml").unlink()
    study("run", str(file), "--out", "b", "--only", "*-coupled")
    (tmp_path / "b" / "study.toml").unlink()
    merged = study("report", "a", "b", "--out", "both").output
    assert re.search(r"study\.toml .*\ba\b", merged), merged
    assert re.search(r"\bruns in b\b.*not checked", merged), merged


def test_parts_of_a_study_with_other_settings_are_not_merged(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "a", "--only", "*-standard")
    study("run", str(file), "--out", "b", "--only", "*-coupled", "--set", "optimizer.lr=3e-2")
    result = study("report", "a", "b", "--out", "both")
    assert result.exit_code == 2
    assert "a/study.toml" in result.output
    assert re.search(r"^small-1\.536k-coupled/seed-1 in b: ", result.output, re.MULTILINE), result.output
    assert not (tmp_path / "both").exists()


def test_a_report_finds_runs_finished_without_the_runner(tmp_path: Path) -> None:
    study("run", str(write_study(tmp_path, PAIR)), "--out", "out")
    (tmp_path / "out" / "results.jsonl").write_text("")
    assert study("report", "out").exit_code == 0
    assert len(read_results(tmp_path / "out")) == 4


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("centring", ["standard, centred"] * 2),
        ("single-gpu-scaled", ["coupled n=-2", "coupled n=-4", "coupled n=2", "coupled n=4"]),
    ],
)
def test_runs_shared_by_two_built_in_studies_are_merged(name: str, added: list[str], tmp_path: Path) -> None:
    settings = (f"data.folder={study_corpus(tmp_path / 'corpus')}", "data.source=none", "evaluation.wordsim=none")
    options = [part for setting in settings for part in ("--set", setting)]
    for each in ("single-gpu", name):
        ran = study("run", each, "--out", each, *options)
        assert ran.exit_code == 0, ran.output
    merged = study("report", "single-gpu", name, "--out", "both")
    assert merged.exit_code == 0, merged.output
    with (tmp_path / "both" / "tables" / "runs.csv").open(newline="") as file:
        optimizers = [row["optimizer"] for row in csv.DictReader(file)]
    assert Counter(optimizers) == Counter(3 * (["standard", "coupled"] * 2 + added))  # three seeds


def test_a_study_is_planned_run_and_watched_without_torch(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "SimLex-999.txt").write_text("word1\tword2\tPOS\tSimLex999\nold\tnew\tA\t1.58\n")
    file = write_study(tmp_path, PAIR, more='evaluation = { wordsim = "words" }\n')
    manifest = tmp_path / "corpus" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tokenizer": "tokenizer.json"}))
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"old": 0, "new": 1}, "old")).save(
        str(tmp_path / "corpus" / "tokenizer.json")
    )
    program = f"""
import sys
from coupled_adam.commands import study
from coupled_adam.study import launchers, runner
launchers.WORKER, runner.visible_gpus = {FAKE_WORKER!r}, list
run_study = runner.run_study

def without_report(*arguments, **options):  # which does load torch, when all runs are done
    outcome = run_study(*arguments, **options)
    outcome.finished = 0
    return outcome

runner.run_study = without_report
for command in (["list"], ["run", "demo", "--dry-run"], ["run", {str(file)!r}, "--out", "out"], ["status", "out"]):
    study.app(command, standalone_mode=False)
    assert "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished  small-") == 4


REFUSED: dict[str, tuple[list[str], str]] = {
    "an unknown study": (["run", "dmeo"], r"'dmeo'.* demo\?"),
    "an unknown launcher": (["run", "demo", "--launcher", "k8s"], "--launcher .*'k8s'.*: local, torchrun"),
    "a pattern of nothing": (["run", "demo", "--only", "x"], "--only x: .*: tiny-307.2k-standard"),
    "a wrong setting": (["run", "demo", "--set", "optimizer.lrr=1"], r"--set optimizer\.lrr=1: .*optimizer\.lr\b"),
    "a setting without value": (["run", "demo", "--set", "lr"], "--set lr"),
    "an axis": (["run", "single-gpu", "--set", "training.tokens=5M"], "30M-5M-standard/seed-1;.*--only"),
    "seeds": (["run", "demo", "--set", "seeds=1"], "seeds.*--only"),
    "no study there": (["status", "nothing"], r"nothing .*study\.toml .*results\.jsonl"),
    "nothing to report": (["report", "nothing"], r"nothing .*study\.toml .*results\.jsonl"),
    "no name": (["run", ""], "''.*: demo, "),
    "a wrong evaluation": (
        ["run", "demo", "--set", "evaluation.wordsin=x"],
        r"--set evaluation\.wordsin=x: .*evaluation\.wordsim\?",
    ),
    "nothing to show": (["show", "nothing"], "^Error: .*'nothing'"),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_invalid_commands_are_refused_in_one_line(arguments: list[str], named: str, tmp_path: Path) -> None:
    result = study(*arguments)
    assert result.exit_code == 2
    assert re.search(named, result.output, re.DOTALL), result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_setting_is_reported_once() -> None:
    for setting in ("foo", "optimizer.lrr=1", "optimizer.lr=-1"):
        output = study("run", "demo", "--set", setting).output
        assert output.count("study demo:") == 1, output
        assert "foo=" not in output


def test_the_evaluation_can_be_set(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR, more='evaluation = { wordsim = "no-words" }\n')
    result = study("run", str(file), "--out", "out", "--set", "evaluation.wordsim=none", "--set", "log.every=3")
    assert result.exit_code == 0, result.output
    stored = load_study("out")
    assert (stored.evaluation.wordsim, stored.override) == (None, {"log.every": 3})


def test_a_tokenizer_that_cannot_be_opened_is_found_before_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coupled_adam.study import words
    from coupled_adam.training import run_tokens

    def offline(spec: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(run_tokens, "open_tokenizer", offline)
    monkeypatch.setattr(words, "word_pairs_of", lambda *_: [])
    file = write_study(tmp_path, PAIR, more='evaluation = { wordsim = "words" }\n')
    manifest = tmp_path / "corpus" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tokenizer": "gpt2"}))
    result = study("run", str(file), "--out", "out")
    assert result.exit_code == 2
    assert re.search(
        r"evaluation\.wordsim .*'gpt2'.*no network.*--set evaluation\.wordsim=none", result.output, re.DOTALL
    )
    assert not any(tmp_path.glob("out/runs/*"))


def test_status_reports_unreadable_files_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coupled_adam.study import folder

    def denied(run_folder: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(run_folder))

    study("run", str(write_study(tmp_path, PAIR)), "--out", "out", "--only", "*-coupled")
    monkeypatch.setattr(folder, "is_claimed", denied)
    result = study("status", "out")
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.rstrip().endswith("Permission denied")


def test_a_long_study_prints_its_estimated_time_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coupled_adam.study import overview

    file = write_study(tmp_path, PAIR)
    assert "GPU hours" not in study("run", str(file), "--out", "short").output
    monkeypatch.setattr(overview, "gpu_hours", lambda cells: 2.5 * len(cells))
    shown = study("run", str(file), "--out", "long").output
    assert re.search(r"^Small: 4 runs .*\blong, .*\b10\.0 GPU hours", shown, re.MULTILINE), shown


def test_runs_removed_from_the_study_are_reported(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    study("run", str(file), "--out", "out")
    file.write_text(file.read_text().replace("seeds = [1, 2]", "seeds = [2]"))
    words = ": small-1.536k-coupled/seed-1, small-1.536k-standard/seed-1\n"
    assert words in study("run", str(file), "--out", "out").output
    assert words in study("report", "out").output


@pytest.mark.parametrize("out", ["file", "file/below", "taken"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_run(tmp_path: Path, out: str) -> None:
    file = write_study(tmp_path, PAIR)
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    result = study("run", str(file), "--out", out)
    assert result.exit_code == 2
    assert re.search(rf"^Error: .*'{out}/report\.html' \(.*--out", result.output), result.output
    assert result.output.count("\n") == 1


def test_a_study_continues_after_its_output_is_closed(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    program = (
        f"import sys; from coupled_adam.study import launchers; launchers.WORKER = {FAKE_WORKER!r}\n"
        "from coupled_adam.commands.study import app; app()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "run", str(file), "--out", "out"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert len(read_results(tmp_path / "out")) == 4


def test_missing_data_and_word_pairs_are_found_before_any_run(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR, more='evaluation = { wordsim = "no-words" }\n')
    result = study("run", str(file), "--out", "a")
    assert result.exit_code == 2
    assert "no-words" in result.output
    result = study("run", str(file), "--out", "b", "--set", "data.folder=no-corpus")
    assert result.exit_code == 2
    assert "no-corpus" in result.output
    result = study("run", str(file), "--out", "c", "--set", "model.vocabulary_size=32")
    assert result.exit_code == 2
    assert re.search(r"model\.vocabulary_size .*\b32\b.*corpus.*\b61\b", result.output, re.DOTALL), result.output
    assert not any(tmp_path.glob("*/runs/*"))


def test_a_corpus_without_a_test_split_is_reported(tmp_path: Path) -> None:
    file = write_study(tmp_path, PAIR)
    manifest = tmp_path / "corpus" / "manifest.json"
    values: dict[str, Any] = json.loads(manifest.read_text())
    del values["splits"]["test"]
    manifest.write_text(json.dumps(values))
    assert re.search(r"corpus .*\btest\b.*\bvalidation\b", study("run", str(file)).output)


def test_without_submitit_the_slurm_launcher_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    result = study("run", str(write_study(tmp_path, PAIR)), "--out", "out", "--launcher", "slurm")
    assert result.exit_code == 2
    assert "cluster" in result.output
    assert "submitit" in result.output


def test_demo_is_the_study_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(demo_command, "run_and_report", lambda *args, **options: asked.append((args, options)))
    app = typer.Typer()
    app.command()(demo_command.demo)
    assert cli.invoke(app, ["--out", "here"]).exit_code == 0
    ((args, options),) = asked
    assert args == ("demo", Path("here"))
    assert options["again"] == ["coupled-adam", "demo", "--out=here"]
    shown = cli.invoke(app, ["--help"]).output
    for words in ("two minutes", "mean-embedding ratio", "--out", "study run demo"):
        assert words in shown
