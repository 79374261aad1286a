"""The command `coupled-adam`, in this process and once as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import coupled_adam
from coupled_adam import cli
from coupled_adam.demo import comparison, text

COMMAND = Path(sys.executable).with_name("coupled-adam")
OPENMP = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}

runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the standard library, which takes seconds to read."""
    words = [f"word{chr(97 + number)}" for number in range(20)]
    corpus = text.build_corpus([" ".join(words * (10 + number)) for number in range(20)], 30)
    monkeypatch.setattr(text, "standard_library_corpus", lambda _: corpus)


def test_help_teaches_the_first_step_and_what_to_look_at() -> None:
    shown = runner.invoke(cli.app, ["--help"]).output
    assert "Start with coupled-adam demo" in shown
    assert "from coupled_adam import CoupledAdamW" in shown
    shown = runner.invoke(cli.app, ["demo", "--help"]).output
    for words in ("about a minute", "mean-embedding ratio", "--steps", "--seed", "--out", "default: 300"):
        assert words in shown


def test_version_is_the_packages() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"coupled-adam {coupled_adam.__version__}\n")


@pytest.mark.usefixtures("short_text")
def test_demo_prints_the_comparison_and_writes_the_report(tmp_path: Path) -> None:
    out = tmp_path / "new" / "fol [red] der"
    result = runner.invoke(cli.app, ["demo", "--steps", "3", "--seed", "7", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for words in (
        "AdamW",
        "CoupledAdamW",
        "validation loss",
        "mean-embedding ratio",
        "optimizer state",
        "Against AdamW",
    ):
        assert words in result.output
    assert result.output.endswith(f"Report: {out / 'report.html'}\n")
    html = (out / "report.html").read_text()
    for words in ("3 steps of 16 x 64 tokens, seed 7", torch.__version__, coupled_adam.__version__, "--steps=3"):
        assert words in html
    assert [path.name for path in out.iterdir()] == ["report.html"]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--sead", "1"]])
def test_bad_options_are_refused_by_name(arguments: list[str]) -> None:
    result = runner.invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("out", ["file", "file/below", "taken"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    monkeypatch.setattr(comparison, "compare", lambda *_: pytest.fail("trained"))
    result = runner.invoke(cli.app, ["demo", "--out", str(tmp_path / out)])
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: cannot write '{tmp_path / out / 'report.html'}' (")
    assert result.output.count("\n") == 1


def test_a_python_without_documentation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(text, "topic_documents", list)
    result = runner.invoke(cli.app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.startswith("Error: the standard library in ")


@pytest.mark.usefixtures("short_text")
def test_a_disk_that_fills_up_is_reported_after_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    result = runner.invoke(cli.app, ["demo", "--steps", "1", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "Against AdamW" in result.output
    assert "(No space left on device)" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_text")
def test_interrupt_ends_with_130_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "compare", interrupt)
    result = runner.invoke(cli.app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_installed_command_runs_the_demo_with_openmp_threads_that_sleep(tmp_path: Path) -> None:
    """libgomp prints what it has read when it is loaded: the variables must be set before torch is."""
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(
        [COMMAND, "demo", "--steps", "2"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Report: demo/report.html\n")
    assert "\x1b" not in done.stdout, "control characters in a pipe"
    assert (tmp_path / "demo" / "report.html").stat().st_size > 4000
    if "GOMP_" in done.stderr:  # another OpenMP has other variables
        assert "GOMP_SPINCOUNT = '0'" in done.stderr


@pytest.mark.parametrize(("policy", "spins"), [(None, None), ("ACTIVE", "7")])
def test_help_needs_no_torch_and_what_the_user_set_is_kept(policy: str | None, spins: str | None) -> None:
    program = (
        "import os, sys; from coupled_adam.cli import main\n"
        "sys.argv = ['coupled-adam', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    if policy and spins:
        environment |= {"OMP_WAIT_POLICY": policy, "GOMP_SPINCOUNT": spins}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"False {policy or 'PASSIVE'} {spins or '0'}"


def test_public_names_are_listed_before_and_found_when_asked_for() -> None:
    program = (
        "import sys, coupled_adam; listed = dir(coupled_adam); assert 'torch' not in sys.modules\n"
        "assert {'CoupledAdamW', 'convert_state_dict', 'param_groups', '__version__'} <= set(listed), listed\n"
        "from coupled_adam import *\n"
        "from coupled_adam.optimizer import coupled_adamw\n"
        "assert CoupledAdamW is coupled_adam.CoupledAdamW is coupled_adamw.CoupledAdamW\n"
        "assert not hasattr(coupled_adam, 'CoupledAdam')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
