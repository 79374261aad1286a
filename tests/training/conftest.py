"""The corpus and the uninterrupted run that many training tests read and none changes."""

from pathlib import Path

import pytest
from small_runs import small_config, train, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def whole_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small_config(corpus), folder)
    return folder
