"""docs/with-muon.md: every example runs as written, with the result that the page states."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elsewhere import SECONDS, assert_ran_elsewhere, marked, run_elsewhere
from muon_page_checks import CHECKS
from page_examples import MUON_PAGE, USING_PAGE, Example, read_examples, run_here, save_files

EXAMPLES = [example for example in read_examples(MUON_PAGE) if not example.file]

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder as a reader has it, with tiny.py and both.py."""
    for page in (USING_PAGE, MUON_PAGE):
        save_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("tiny", "both"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the examples that need their own processes; those with the same launcher start together."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for way in ("process", "torchrun 2"):
        run_elsewhere(EXAMPLES, way, "muon_page_checks", folder, pages_with_files=[USING_PAGE])
    return folder


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run == "here"])
@pytest.mark.usefixtures("folder")
def test_example_runs_as_written(example: Example) -> None:
    CHECKS[example.title](run_here(example))


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run != "here"])
def test_example_runs_as_written_in_its_own_processes(example: Example, elsewhere: Path) -> None:
    assert_ran_elsewhere(example, elsewhere)


def test_every_example_has_its_own_check_and_heading() -> None:
    assert sorted(example.title for example in EXAMPLES) == sorted(CHECKS)


def test_the_page_is_linked_from_the_one_about_the_optimizer() -> None:
    assert f"]({MUON_PAGE.name})" in USING_PAGE.read_text(encoding="utf-8")
