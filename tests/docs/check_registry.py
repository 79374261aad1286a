"""Checks that run after the examples of a page, by the title of the example."""

from collections.abc import Callable
from typing import Any

Names = dict[str, Any]
"""What an example has defined."""
Check = Callable[[Names], None]


class Checks(dict[str, Check]):
    """The checks of a page."""

    def after(self, title: str) -> Callable[[Check], Check]:
        """Register a check for the example of this title, once."""

        def register(check: Check) -> Check:
            assert title not in self, title
            self[title] = check
            return check

        return register
