"""Packages that only some measures need, imported when they are used."""

import importlib
from types import ModuleType


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a package, or say which extra brings it.

    Example:
        >>> require("no_such_package", "study", "to count tokens")
        Traceback (most recent call last):
        ImportError: no_such_package is needed to count tokens; install it with: pip install 'coupled-adam[study]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed {purpose}; install it with: pip install 'coupled-adam[{extra}]'"
        ) from error
