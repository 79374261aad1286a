"""Which functions of a module a step calls."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, names: Iterable[str]) -> list[str]:
    """The names of the module's functions, each time that the step calls one."""
    calls: list[str] = []
    for name in names:
        function = getattr(module, name)

        def watched(*args: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, watched)
    return calls
