"""docs/frameworks.md: every example runs as written and gives the result that the page states.

The files of the page, which frameworks import, are tested in the test_framework_*.py next to this file.
"""

from pathlib import Path

import pytest
from elsewhere import SECONDS, assert_ran_elsewhere, marked, run_elsewhere
from framework_checks import CHECKS
from page_examples import FRAMEWORKS_PAGE, USING_PAGE, Example, read_examples

EXAMPLES = [example for example in read_examples(FRAMEWORKS_PAGE) if not example.file]

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all examples, each in its own process, forked from one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run_elsewhere(EXAMPLES, "process", "framework_checks", folder, pages_with_files=[USING_PAGE])
    return folder


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES])
def test_example_runs_as_written(example: Example, elsewhere: Path) -> None:
    assert_ran_elsewhere(example, elsewhere)


def test_every_example_has_its_own_check_and_heading() -> None:
    assert sorted(example.title for example in EXAMPLES) == sorted(CHECKS)


def test_the_page_is_linked_from_the_one_about_the_optimizer() -> None:
    assert f"]({FRAMEWORKS_PAGE.name})" in USING_PAGE.read_text(encoding="utf-8")
