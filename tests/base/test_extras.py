"""Extras: a missing package is named with the command that installs it from this package's own source."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.base import extras
from coupled_adam.base.errors import MissingPackageError, UserError
from coupled_adam.base.extras import require

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GIT = {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}
ORIGINS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "an index": (None, "pip install 'coupled-adam[eval]'"),
    "a folder, editable": (
        {"url": "file:///home/me/my%20code", "dir_info": {"editable": True}},
        "pip install -e '/home/me/my code[eval]'",
    ),
    "a folder": ({"url": "file:///home/me/code", "dir_info": {}}, "pip install '/home/me/code[eval]'"),
    "a wheel": (
        {"url": "file:///tmp/coupled_adam-0.2.0-py3-none-any.whl", "archive_info": {"hash": "sha256=00"}},
        "pip install '/tmp/coupled_adam-0.2.0-py3-none-any.whl[eval]'",
    ),
    "a wheel elsewhere": (
        {"url": "https://example.com/a.whl", "archive_info": {}},
        "pip install 'coupled-adam[eval] @ https://example.com/a.whl'",
    ),
    "git": (
        {"url": "https://example.com/me/code.git", "vcs_info": GIT},
        f"pip install 'coupled-adam[eval] @ git+https://example.com/me/code.git@{COMMIT}'",
    ),
    "git, in a subdirectory": (
        {"url": "file:///home/me/code", "vcs_info": GIT, "subdirectory": "python"},
        f"pip install 'coupled-adam[eval] @ git+file:///home/me/code@{COMMIT}#subdirectory=python'",
    ),
}


class Installed:
    """A distribution with or without a direct_url.json."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(("origin", "command"), ORIGINS.values(), ids=ORIGINS)
def test_an_extra_is_installed_from_the_source_of_the_package(
    origin: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))
    assert extras.install_command("eval") == command
    with pytest.raises(ImportError) as raised:
        extras.require("no_such_package", "eval", "to try")
    assert str(raised.value).startswith("no_such_package ")
    assert " to try" in str(raised.value)
    assert str(raised.value).endswith(f" {command}")


def test_a_checkout_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", not_installed)
    root = Path(__file__).parents[2]
    if not (root / "src" / "coupled_adam" / "base").samefile(Path(extras.__file__).parent):
        pytest.skip("the package under test is not this checkout")
    assert extras.install_command("eval") == f"pip install -e '{root}[eval]'"


def test_an_installed_package_is_imported() -> None:
    assert extras.require("json", "eval", "to try") is json


def test_base_loads_only_the_standard_library() -> None:
    script = "import sys; before = set(sys.modules); import coupled_adam.base.extras; "
    script += "print({name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'coupled_adam'}"


def test_a_missing_package_is_a_user_error_and_an_import_error() -> None:
    with pytest.raises(MissingPackageError) as caught:
        require("no_such_package", "study", "to count tokens")
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, ImportError)
