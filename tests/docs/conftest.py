"""The files of docs/frameworks.md, saved and imported as a reader would."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_examples import FRAMEWORKS_PAGE, MUON_PAGE, USING_PAGE, read_examples, save_files

PAGES = (USING_PAGE, MUON_PAGE, FRAMEWORKS_PAGE)


@pytest.fixture
def framework_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder with all files of the page, and of the pages it refers to."""
    for page in PAGES:
        save_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in {Path(example.file).stem for page in PAGES for example in read_examples(page) if example.file}:
        sys.modules.pop(name, None)
