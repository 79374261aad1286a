"""Training, study runs and data preparation use the same lock, and behave the same without flock."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import kind_of_file
from coupled_adam.base.locks import locked
from coupled_adam.config.study_config import load_study
from coupled_adam.data.guards import only_one
from coupled_adam.data.prepare import prepare
from coupled_adam.study import cell as study_cell
from coupled_adam.study.cell import Task, run_cell
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import CLAIM, is_claimed
from coupled_adam.training.run_folder import RunFolder
from special_files import make_special_file


@contextmanager
def run_of_study(folder: Path) -> Iterator[None]:
    with locked(folder / CLAIM):
        yield


USERS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "train": lambda folder: RunFolder(folder).locked(),
    "data": only_one,
    "study": run_of_study,
}


@pytest.fixture(params=[0, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param:
        monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.usefixtures("flock")
@pytest.mark.parametrize("user", USERS)
def test_the_second_process_is_refused_until_the_first_is_done(tmp_path: Path, user: str) -> None:
    (tmp_path / "kept").touch()  # training removes a folder that stayed empty
    with USERS[user](tmp_path):
        with pytest.raises(UserError, match=rf"{tmp_path}\b.*process {os.getpid()}\b"), USERS[user](tmp_path):
            pytest.fail("two at a time")
        assert is_claimed(tmp_path) == (user == "study")
    with USERS[user](tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.usefixtures("flock")
def test_a_study_run_locked_by_another_process_gives_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_cell, "SECONDS_FOR_ANOTHER", 0.0)
    study = load_study("demo")
    task = Task(tmp_path, study.name, cells_of(study)[0], study.evaluation)
    task.folder.mkdir(parents=True)
    with locked(task.folder / CLAIM):
        status, message = run_cell(task)
    assert status == "busy"
    assert f"process {os.getpid()}" in message


@pytest.mark.usefixtures("flock")
def test_data_is_prepared_without_flock_and_no_lock_remains(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 200)
    corpus = prepare(f"text:{tmp_path / 'a.txt'}", "bpe:300", tmp_path / "out", val=0, test=0, processes=1)
    assert corpus.splits == ["train"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"manifest.json", "unigram.npy", "tokenizer.json", "train-00000.bin"}


@pytest.mark.usefixtures("flock")
def test_a_complete_corpus_is_opened_while_another_process_holds_its_lock(tmp_path: Path) -> None:
    """As for a read-only folder, which cannot be locked."""
    (tmp_path / "a.txt").write_text("one two three\n" * 200)
    settings = {"val": 0.0, "test": 0.0, "processes": 1}
    first = prepare(f"text:{tmp_path / 'a.txt'}", "bpe:300", tmp_path / "out", **settings)  # type: ignore[arg-type]
    (tmp_path / "out" / "unfinished").mkdir()
    with only_one(tmp_path / "out"):
        again = prepare(f"text:{tmp_path / 'a.txt'}", "bpe:300", tmp_path / "out", **settings)  # type: ignore[arg-type]
        assert (tmp_path / "out" / "unfinished").is_dir()  # it may be working there
    assert again.fingerprint == first.fingerprint
    prepare(f"text:{tmp_path / 'a.txt'}", "bpe:300", tmp_path / "out", **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "unfinished").exists()


@pytest.mark.parametrize("user", ["train", "data"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_pipe_or_a_device_in_place_of_the_lock_is_refused(tmp_path: Path, user: str, kind: str) -> None:
    make_special_file(tmp_path / "lock", kind)
    kind_found = kind_of_file((tmp_path / "lock").lstat().st_mode)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'lock'}: .*{kind_found}"), USERS[user](tmp_path):
        pytest.fail("no lock is held")


def test_leftovers_of_a_lock_do_not_make_a_folder_look_foreign(tmp_path: Path) -> None:
    from coupled_adam.config.run_config import load_config

    for name in ("lock", "lock.held"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).check(load_config("tiny"), resume=False)
