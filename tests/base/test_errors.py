"""A mistake that a user can fix gives one line and exit code 2; an internal error keeps its traceback."""

import errno
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

import coupled_adam
from coupled_adam.base import errors
from coupled_adam.base.errors import UserError, as_user_error, blaming_user
from coupled_adam.cli import app


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (UserError, ValueError),
        (errors.MissingPackageError, ImportError),
        (errors.UserOSError, OSError),
        (errors.UserConnectionError, ConnectionError),
    ],
)
def test_user_errors_have_builtin_types_and_can_be_pickled(kind: type[UserError], also: type) -> None:
    error = pickle.loads(pickle.dumps(kind("the thing: the remedy")))
    assert isinstance(error, (ValueError, also))
    assert isinstance(error, also)
    assert as_user_error(error) is error
    assert str(error) == "the thing: the remedy"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EROFS])
def test_disk_errors_are_user_errors(number: int) -> None:
    error = as_user_error(OSError(number, "what it says", "the/file"))
    assert error is not None
    assert str(error) == "the/file: what it says"


@pytest.mark.parametrize(
    "error",
    [ValueError("numpy"), KeyError("k"), TypeError("t"), ImportError("i"), OSError(errno.EBADF, "b"), OSError("a")],
)
def test_any_other_error_is_internal(error: Exception) -> None:
    assert as_user_error(error) is None


def test_errors_of_a_library_can_be_declared_user_errors() -> None:
    with pytest.raises(UserError, match="wrong shape"), blaming_user():
        raise ValueError("wrong shape")
    with pytest.raises(TypeError), blaming_user():
        raise TypeError("a bug")


COMMANDS = {
    "inspect": (["inspect", "m.npy"], "coupled_adam.inspection.model_inspection.inspect_models"),
    "train": (["train", "tiny"], "coupled_adam.training.run_tokens.is_prepared"),
    "data prepare": (["data", "prepare"], "coupled_adam.data.prepare.prepare"),
    "data info": (["data", "info", "folder"], "coupled_adam.data.corpus.open_corpus"),
    "export": (["export", "run", "out"], "coupled_adam.evaluation.run_export.export_run"),
    "eval": (["eval", "run"], "coupled_adam.evaluation.downstream.evaluate.evaluate_run"),
    "theory": (["theory", "run"], "coupled_adam.theory.measure.theory_of_run"),
    "convert": (["convert", "a", "b", "--to", "coupled"], "coupled_adam.conversion.convert_checkpoint"),
    "study run": (["study", "run", "demo", "--out", "out"], "coupled_adam.study.expansion.cells_of"),
    "study report": (["study", "report", "folder"], "coupled_adam.report.contents.read_report"),
}


@pytest.fixture(scope="module")
def everything_imported() -> None:
    """A module first imported while a function is replaced would keep the replacement."""
    for module in pkgutil.walk_packages(coupled_adam.__path__, "coupled_adam."):
        if not module.name.endswith(("__main__", "_kernels")):  # those need packages that may be missing
            import_module(module.name)


def _raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


@pytest.mark.usefixtures("everything_imported")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_internal_error_in_a_command_keeps_its_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, function = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "results.jsonl").touch()
    bug = ValueError("planted")
    monkeypatch.setattr(function, _raising(bug))
    result = CliRunner().invoke(app, arguments)
    assert result.exception is bug, result.output

    monkeypatch.setattr(function, _raising(UserError("planted: mend it\x1b[2J")))
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), result.output
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, "Error: planted: mend it\\x1b[2J")


def test_the_traceback_reaches_the_terminal(tmp_path: Path) -> None:
    script = (
        "import sys, coupled_adam.inspection.model_inspection as room, coupled_adam.cli as cli\n"
        "def planted(*_): raise ValueError('planted')\n"
        "room.inspect_models = planted\n"
        "sys.argv = ['coupled-adam', 'inspect', 'm.npy']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: planted")


def test_a_user_error_keeps_its_type_when_other_errors_are_converted() -> None:
    for kind in (errors.MissingPackageError, errors.UserOSError, errors.UserConnectionError):
        given = kind("the thing: the remedy")
        with pytest.raises(kind) as caught, blaming_user():
            raise given
        assert caught.value is given
