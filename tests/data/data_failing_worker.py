"""Functions for worker processes that fail in several ways."""

import os
from collections.abc import Callable


def failing(message: str) -> Callable[[str], str]:
    def run(item: str) -> str:
        if item == "exit":
            os._exit(7)
        if item == "print":
            print("noise on the standard output")
            return "printed"
        raise ValueError(f"{message}: {item}")

    return run
