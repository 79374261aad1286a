"""Record which functions of a module a step calls."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, names: Iterable[str]) -> list[str]:
    """List the names of the module's functions in the order in which the step calls them."""
    calls: list[str] = []
    for name in names:
        function = getattr(module, name)

        def watched(*args: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, watched)
    return calls
