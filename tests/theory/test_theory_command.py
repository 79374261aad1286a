"""`coupled-adam theory`: its output, files and refusals, on real runs."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from theory_models import milestone_run
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.theory import theory_page
from coupled_adam.theory.record import OPTIMIZERS, run_from_json
from coupled_adam.theory.run_figures import CAPTIONS
from coupled_adam.theory.story import findings
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.theory.theory_numbers import LEGEND

cli = CliRunner(env={"COLUMNS": "60", "TERMINAL_WIDTH": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied run with two milestones, measured with its page."""
    run = milestone_run(tmp_path_factory.mktemp("command"))
    result = cli.invoke(app, ["theory", str(run), "--batches", "3", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (run / "printed.txt").write_text(result.stdout)
    return run


def theory(*words: object) -> tuple[int, str]:
    result = cli.invoke(app, ["theory", *map(str, words)])
    return result.exit_code, result.output


def refusal(*words: object) -> str:
    code, output = theory(*words)
    assert code == 2, output
    assert "Traceback" not in output
    assert output.startswith("Error: ")
    return " ".join(output.split())


def test_it_prints_rows_for_milestones_means_and_the_paper_on_any_terminal(run: Path) -> None:
    printed = (run / "printed.txt").read_text()
    assert re.match(r"run: 3 batches\b.* 2 checkpoints\n", printed)
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["768"], ["1.54k"])]
    assert [row[0] for row in rows] == ["768", "1.54k"] * 2  # 6 and 12 steps of 8 x 16 tokens, in two tables
    assert "…" not in printed
    assert "0.85(7)" in printed
    assert "1.18(9)" in printed
    assert LEGEND in printed


def test_it_explains_the_tables_in_words(run: Path) -> None:
    printed = (run / "printed.txt").read_text()
    sentences = findings(TheoryFolder(run).read_run())
    assert len(sentences) == 3
    assert "\n".join(sentences) in printed


def test_the_printed_sums_agree_with_the_paper(run: Path) -> None:
    measured = TheoryFolder(run).read_run()
    for checkpoint in measured.checkpoints:
        assert max(checkpoint.gradient_sums["output"]) < 1e-6
        sums = {name: checkpoint.update(name) for name in OPTIMIZERS}
        assert sums["sgd"].output < 1e-6
        assert sums["coupled"].output < 1e-6
        assert sums["adam"].output > 1e-3
        assert sums["coupled"].total == pytest.approx(sums["coupled"].input, abs=1e-5)


def test_it_writes_the_page_and_the_figures_and_prints_their_paths(run: Path) -> None:
    written = run / "theory" / "theory.html"
    assert f"Page: {written}" in (run / "printed.txt").read_text()
    [title] = re.findall("<title>(.*)</title>", written.read_text())
    assert title.endswith(": run")
    names = {path.stem for path in (run / "theory" / "figures").iterdir()}
    assert names == set(CAPTIONS)


def test_only_the_record_is_printed_as_json_and_nothing_is_measured_twice(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theory_page, "write_page", lambda *_: Path("elsewhere.html"))  # drawing it takes seconds
    before = (run / "theory" / "step-000000012.npz").stat().st_mtime_ns
    result = cli.invoke(app, ["theory", str(run), "--batches", "3", "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "Page: elsewhere.html\n"
    [found] = json.loads(result.stdout).values()
    assert run_from_json(json.dumps(found), "printed") == TheoryFolder(run).read_run()
    assert (run / "theory" / "step-000000012.npz").stat().st_mtime_ns == before


def test_several_runs_are_shown_side_by_side_and_one_checkpoint_can_be_selected(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    code, output = theory(run, other, "--batches", 3, "--checkpoint", 6, "--no-page")
    assert code == 0, output
    for name in ("run", "other"):
        assert re.search(rf"^{name}: 3 batches\b.* 1 checkpoint\n", output, re.MULTILINE)
    assert "1.54k" not in output


def test_bad_input_is_one_clear_message(run: Path, tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)
    assert re.search(r"step 7\b.* 6, 12$", refusal(run, "--checkpoint", 7))
    assert "twice" in refusal(run, run)
    assert "twice" in refusal(run, run / ".." / run.name)


def test_a_run_without_milestones_is_measured_at_its_newest_checkpoint(tmp_path: Path) -> None:
    bare = milestone_run(tmp_path, checkpoints={"every": 5, "milestones": 0, "keep": 2})
    for _ in range(2):  # measured, then read from the folder
        code, output = theory(bare, "--batches", 1, "--no-page")
        assert code == 0, output
        found = TheoryFolder(bare).read_run()
        assert [numbers.step for numbers in found.checkpoints] == [12]
        assert "Note: the run has no milestones" in output
        assert "step 12" in output
        assert "--set checkpoints.milestones=10" in output
    code, output = theory(bare, "--checkpoint", 12, "--batches", 1, "--no-page")
    assert code == 0, output
    assert "milestones" not in output
    shutil.rmtree(tmp_path / "corpus")
    message = refusal(bare, "--fresh", "--checkpoint", 12)
    assert re.search(r"corpus: .*'small'.*`coupled-adam data prepare`", message)
    shutil.rmtree(bare / "checkpoints")
    shutil.rmtree(bare / "theory")
    message = refusal(bare)
    assert str(bare) in message
    assert "no milestones to measure" in message


def test_a_page_without_its_packages_is_refused_before_anything_is_measured(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert re.match(r"Error: jinja2 .*theory\.html.*--no-page.*pip install ", refusal(run))
