"""Warnings are shown even after an error, because they may explain it."""

import warnings
from contextlib import suppress

import pytest

from coupled_adam.base.progress import warnings_as_notes


class Failed(Exception):
    """Ends the work."""


@warnings_as_notes()
def work(category: type[Warning], error: Exception | None) -> None:
    warnings.simplefilter("always")
    warnings.warn("two tables", UserWarning, stacklevel=1)
    warnings.warn("an overflow", category, stacklevel=1)
    if error is not None:
        raise error


@pytest.mark.parametrize("category", [RuntimeWarning, FutureWarning, ResourceWarning])
@pytest.mark.parametrize("error", [None, Failed()])
def test_other_warnings_are_shown_once_even_after_an_error(
    category: type[Warning], error: Exception | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(category) as shown, suppress(Failed):
        work(category, error)
    assert [(warning.category, str(warning.message)) for warning in shown] == [(category, "an overflow")]
    assert capsys.readouterr().err == "Note: two tables\n"
