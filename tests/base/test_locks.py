"""Only one process holds a lock, on any file system and however the previous holder ended."""

import contextlib
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from coupled_adam.base import locks
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import kind_of_file, process_start, where_processes_live
from coupled_adam.base.locks import Holder, LockHeld, is_held, lock_names, locked
from special_files import make_special_file

PREPARED = """
import fcntl, os, sys, time
from pathlib import Path

def no_locks(*_):
    raise OSError(int(sys.argv[2]), "no locks here")

if int(sys.argv[2]):
    fcntl.flock = no_locks
from coupled_adam.base import locks
from coupled_adam.base.locks import locked
"""
HOLDER = (
    PREPARED
    + """
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
)
NONE = 0
ERRORS = [NONE, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.fixture(params=ERRORS, ids=lambda number: errno.errorcode.get(number, "flock"))
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The error number of a file system without locks; 0 for one with locks."""
    if request.param:
        without_locks(monkeypatch, request.param)
    return int(request.param)


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOLCK) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)


def holder_of(path: Path, number: int) -> subprocess.Popen[str]:
    """A process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(number)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def other(tmp_path: Path, missing: int) -> Iterator[subprocess.Popen[str]]:
    process = holder_of(tmp_path / "lock", missing)
    yield process
    process.kill()
    process.wait()


def test_a_lock_that_another_process_holds_is_refused_naming_it(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(LockHeld) as caught, locked(tmp_path / "lock"):
        pytest.fail("two processes hold the lock")
    assert caught.value.by == f"process {other.pid}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # ranks send the error to each other
    assert is_held(tmp_path / "lock")


def test_a_lock_of_a_killed_process_is_taken_over(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert not is_held(tmp_path / "lock")
    with locked(tmp_path / "lock"):
        assert is_held(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_process_holds_no_lock(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    with locked(tmp_path / "lock"):
        pass


@pytest.mark.usefixtures("missing")
def test_a_released_lock_is_free_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        assert not is_held(path)
        with contextlib.suppress(ZeroDivisionError), locked(path):
            assert is_held(path)
            with pytest.raises(LockHeld), locked(path):
                pytest.fail("held twice")
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("missing")
def test_the_empty_file_of_version_0_1_0_is_not_a_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    assert not is_held(tmp_path / "lock")
    with locked(tmp_path / "lock"):
        pass


def test_patience_waits_for_the_other_process(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other.pid}"])
    begin = time.monotonic()
    with locked(tmp_path / "lock", patience=20):
        assert time.monotonic() - begin > 0.3


ONE_AFTER_THE_OTHER = """
locks.SECONDS_BETWEEN_TRIES = 0.001
alone = Path(sys.argv[1]).parent / "alone"
for _ in range(30):
    with locked(Path(sys.argv[1]), patience=50):
        alone.touch(exist_ok=False)
        alone.unlink()
    time.sleep(0.001)
print("ok")
"""
DYING_ONE_AFTER_THE_OTHER = """
locks.SECONDS_BETWEEN_TRIES = 0.001
alone = Path(sys.argv[1]).parent / "alone"
with locked(Path(sys.argv[1]), patience=50):
    alone.touch(exist_ok=False)
    time.sleep(0.01)
    alone.unlink()
    print("ok", flush=True)
    os._exit(0)  # as if it were killed: it lets go of nothing
"""


@pytest.mark.parametrize("script", [ONE_AFTER_THE_OTHER, DYING_ONE_AFTER_THE_OTHER])
def test_concurrent_processes_hold_the_lock_one_after_the_other(tmp_path: Path, missing: int, script: str) -> None:
    command = [sys.executable, "-c", PREPARED + script, str(tmp_path / "lock"), str(missing)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate(timeout=100)[0] for process in processes] == ["ok\n"] * 6
    assert not (tmp_path / "alone").exists()


def test_a_lock_taken_by_another_process_between_two_checks_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was held, released and taken again: only the file of a process that is gone may be removed."""
    marker = tmp_path / f"lock{locks.MARKER}"
    marker.write_text(record_of())  # held by a live process: this one
    look, looks = Path.lstat, []

    def look_and_others_act(path: Path) -> os.stat_result:
        looks.append(path)
        if path == marker and looks.count(marker) == 1:
            marker.unlink()  # released while we check
        try:
            return look(path)
        finally:
            if path == marker and looks.count(marker) == 2:
                marker.write_text(record_of())  # taken just after the check

    without_locks(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", look_and_others_act)
        with pytest.raises(LockHeld), locked(tmp_path / "lock"):
            pytest.fail("two processes hold the lock")
    assert marker.read_text() == record_of()
    assert looks.count(marker) >= 2


def record_of(**changes: object) -> str:
    """The record that this process writes into its lock."""
    own = Holder(where_processes_live(), os.getpid(), process_start(os.getpid()))
    return json.dumps(asdict(own) | changes)


@pytest.mark.parametrize(
    "record",
    [
        record_of(where="another-machine 123", pid=2**22 - 1),
        record_of(where=where_processes_live().replace("pid:[", "pid:[9")),  # another container on this machine
        "",
        "not json",
        "[" * 100_000,
        '{"where": 1}',
        record_of(pid=-1),
        record_of(pid=0),
    ],
    # Explicit ids: the records contain process ids, but all pytest workers must collect the same tests.
    ids=["machine", "container", "empty", "not json", "nested", "other type", "pid -1", "pid 0"],
)
@pytest.mark.parametrize("number", [NONE, errno.ENOLCK])
def test_an_unknown_process_is_assumed_to_be_alive_and_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, number: int
) -> None:
    monkeypatch.setattr(locks, "SECONDS_FOR_A_RECORD", 0.0)
    if number:
        without_locks(monkeypatch, number)
    (tmp_path / "lock.held").write_text(record)
    assert is_held(tmp_path / "lock")
    with pytest.raises(LockHeld) as caught, locked(tmp_path / "lock"):
        pytest.fail("it may be held by another process")
    assert str(tmp_path / "lock.held") in caught.value.remedy
    assert (tmp_path / "lock.held").read_text() == record


def test_a_reused_process_id_is_not_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    (tmp_path / "lock.held").write_text(record_of(pid=os.getppid(), start="1"))
    with locked(tmp_path / "lock"):
        pass


def test_a_lock_taken_with_flock_is_respected_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = holder_of(tmp_path / "lock", NONE)
    without_locks(monkeypatch)
    try:
        with pytest.raises(LockHeld) as caught, locked(tmp_path / "lock"):
            pytest.fail("two processes hold the lock")
        assert caught.value.by == f"process {process.pid}"
    finally:
        process.kill()
        process.wait()
    with locked(tmp_path / "lock"):
        pass


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "dangling link", "folder"])
@pytest.mark.usefixtures("missing")
def test_anything_but_a_file_is_refused_as_a_lock(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "lock", tmp_path / "target"
    if "link" in kind:
        path.symlink_to(target)
        if kind == "link":
            target.write_text("mine")
    else:
        make_special_file(path, kind)
    with pytest.raises(UserError, match=rf"^{path}: .*{kind_of_file(path.lstat().st_mode)}"), locked(path):
        pytest.fail("not a lock")
    assert not is_held(path)
    assert target.exists() == (kind == "link")


def test_other_system_errors_are_not_mistaken_for_missing_lock_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), locked(tmp_path / "lock"):
        pytest.fail("no lock is held")


def test_on_windows_a_byte_after_the_record_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the Windows module: a locked file is refused, and released."""
    taken: set[int] = set()

    def locking(descriptor: int, mode: int, size: int) -> None:
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        assert size == 1
        if mode == 2 and place in taken:
            raise PermissionError(errno.EACCES, "Permission denied")
        taken.add(place) if mode == 2 else taken.remove(place)

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2, LK_UNLCK=0))
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(locks.sys, "platform", "win32")
    path = tmp_path / "lock"
    with locked(path):
        assert taken == {locks.LOCKED_BYTE}
        assert is_held(path)
        with pytest.raises(LockHeld, match=f"process {os.getpid()}"), locked(path):
            pytest.fail("held twice")
    assert taken == set()
    assert not is_held(path)


def test_the_files_of_a_lock_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    with locked(tmp_path / "lock"):
        assert {path.name for path in tmp_path.iterdir()} <= set(lock_names("lock"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not list open files")
def test_a_refused_lock_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(LockHeld), locked(path):
                pass
        assert len(os.listdir("/proc/self/fd")) == before
