"""The command `coupled-adam`, in this process and once in a separate one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coupled_adam
from coupled_adam import cli

COMMAND = Path(sys.executable).with_name("coupled-adam")
OPENMP = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}

runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def test_help_shows_the_first_command_and_where_to_look_next() -> None:
    shown = " ".join(runner.invoke(cli.app, ["--help"]).output.split())  # however wide the terminal is
    assert "coupled-adam demo" in shown
    assert "from coupled_adam import CoupledAdamW" in shown
    shown = " ".join(runner.invoke(cli.app, ["demo", "--help"]).output.split())
    for words in ("two minutes", "mean-embedding ratio", "--out", "study run demo"):
        assert words in shown


def test_version_is_the_package_version() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"coupled-adam {coupled_adam.__version__}\n")


def test_bad_options_are_refused_by_name() -> None:
    result = runner.invoke(cli.app, ["demo", "--sead", "1"])
    assert result.exit_code == 2
    assert "--sead" in result.output
    assert "Traceback" not in result.output


def test_the_installed_command_lets_openmp_threads_sleep(tmp_path: Path) -> None:
    """libgomp prints its settings when it is loaded: the variables must be set before torch is imported."""
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    done = subprocess.run(
        [COMMAND, "train", "--list"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout, "control characters in a pipe"
    if "GOMP_" in done.stderr:  # another OpenMP has other variables
        assert "GOMP_SPINCOUNT = '0'" in done.stderr


@pytest.mark.parametrize(("policy", "spins"), [(None, None), ("ACTIVE", "7")])
def test_help_needs_no_torch_and_keeps_the_users_variables(policy: str | None, spins: str | None) -> None:
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


def test_public_names_are_listed_before_import_and_imported_on_first_use() -> None:
    program = (
        "import sys, coupled_adam; listed = dir(coupled_adam); assert 'torch' not in sys.modules\n"
        "assert {'CoupledAdamW', 'convert_state_dict', 'param_groups', '__version__'} <= set(listed), listed\n"
        "from coupled_adam import *\n"
        "from coupled_adam.optimizer import coupled_adamw\n"
        "assert CoupledAdamW is coupled_adam.CoupledAdamW is coupled_adamw.CoupledAdamW\n"
        "assert not hasattr(coupled_adam, 'CoupledAdam')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
