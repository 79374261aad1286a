"""Optional packages: imported on first use, with an install command in the error if one is missing.

The command depends on where this package was installed from: a folder, a git repository, a wheel or an index. pip
records that in direct_url.json (PEP 610).
"""

import importlib
import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from coupled_adam.base.errors import MissingPackageError

PACKAGE = "coupled-adam"


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional package; if it is missing, the error says how to install it.

    Example:
        >>> require("no_such_package", "study", "to count tokens")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        coupled_adam.base.errors.MissingPackageError: no_such_package is needed to count tokens; install it with: ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{module} is needed {purpose}; install it with: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """The command that installs an extra of this package from the package's own origin."""
    try:
        origin = distribution(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        checkout = Path(__file__).parents[3]  # src/coupled_adam/base/extras.py
        is_checkout = (checkout / "pyproject.toml").is_file()
        return _pip(f"{checkout}[{extra}]", "-e") if is_checkout else _pip(f"{PACKAGE}[{extra}]")
    return _from_origin({} if origin is None else json.loads(origin), extra)


def _from_origin(origin: dict[str, Any], extra: str) -> str:
    """The install command for the content of a direct_url.json, which is empty for a package from an index."""
    url = str(origin.get("url", ""))
    if not url:
        return _pip(f"{PACKAGE}[{extra}]")
    if url.startswith("file:") and "vcs_info" not in origin:
        path = url2pathname(urlsplit(url).path)
        is_editable = origin.get("dir_info", {}).get("editable", False)
        return _pip(f"{path}[{extra}]", *(["-e"] if is_editable else []))
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    folder = origin.get("subdirectory")
    return _pip(f"{PACKAGE}[{extra}] @ {url}" + (f"#subdirectory={folder}" if folder else ""))


def _pip(requirement: str, *options: str) -> str:
    return shlex.join(["pip", "install", *options, requirement])
