"""Triton's interpreter, in half the time.

At every launch, and at every call of a function inside a kernel, it replaces the built-in functions of
triton.language. It finds them by looking at every name of four modules and classes; they are always the same.
"""

import functools
import inspect
from typing import Any


def remember_builtins() -> None:
    """Let the interpreter look for the names of built-in functions once."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_of_builtins(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtin(owner: Any, *rest: Any) -> None:
        for name in names_of_builtins(owner):
            member = getattr(owner, name)
            if is_builtin(member):  # not replaced already
                interpreter._patch_attr(owner, name, member, *rest)

    assert callable(interpreter._patch_builtin)
    interpreter._patch_builtin = patch_builtin
