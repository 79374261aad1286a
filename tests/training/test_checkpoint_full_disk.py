"""A full disk loses at most one save."""

import errno
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_examples import TABLES, assert_loads, state_of_step, write_two_checkpoints

from coupled_adam.training.checkpoint import dcp_files as checkpoint_files
from coupled_adam.training.checkpoint import save_and_load as checkpoints
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, newest_good


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writer with two checkpoints."""
    write_two_checkpoints(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@contextmanager
def largest_file(limit: int) -> Iterator[None]:
    """Let the operating system refuse to write more than this many bytes, as on a full disk.

    Not a fixture: pytest writes its own report before a fixture ends.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_file_is_an_error_that_names_the_kept_checkpoint(folder: Path) -> None:
    writer = CheckpointWriter(folder, keep=2)
    with largest_file(20_000):
        writer.save(3, {"model.w": torch.ones(20_000)}, {})
        with pytest.raises(OSError, match="step 3") as caught:
            writer.wait()
    assert caught.value.errno == errno.EFBIG
    for part in (str(folder), "__0_0.distcp", "step-000000001, step-000000002", "space"):
        assert part in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000001", "step-000000002"]
    writer.save(4, state_of_step(4), {})
    writer.wait()
    assert_loads(newest_good(folder, on_skip=pytest.fail), 4)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse_tensors(descriptor: int) -> None:
    """Refuse the first fsync, which must be that of a tensor file."""
    assert Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix == ".distcp"
    refuse()


def refuse_as_safetensors_does(*_: object, **__: object) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("where", "name", "refusal"),
    [
        (os, "fsync", refuse_tensors),
        (pickle, "dump", refuse),  # of .metadata
        (checkpoint_files, "write_tables", refuse_as_safetensors_does),
        (checkpoints, "write_record", refuse),
        (checkpoints, "put_in_place", refuse),
    ],
)
def test_wherever_the_disk_fills_up_the_next_save_reports_it_and_the_following_one_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str, refusal: Callable[..., None]
) -> None:
    writer, is_refused = CheckpointWriter(folder, keep=2), threading.Event()

    def noted(*arguments: object, **options: object) -> None:
        is_refused.set()
        refusal(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, noted)
        writer.save(3, state_of_step(3), {}, tables=TABLES)
        assert is_refused.wait(timeout=20)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        writer.save(4, state_of_step(4), {})
    assert caught.value.errno == errno.ENOSPC
    assert "step 3" in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000001", "step-000000002"]
    writer.save(5, state_of_step(5), {}, tables=TABLES)
    writer.wait()
    assert_loads(newest_good(folder, on_skip=pytest.fail), 5)


def test_any_other_failure_is_reported_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("for a test")

    writer = CheckpointWriter(folder, keep=2)
    monkeypatch.setattr(checkpoints, "write_record", fail)
    writer.save(3, state_of_step(3), {})
    with pytest.raises(RuntimeError, match=r"step 3 .*ZeroDivisionError: for a test"):
        writer.wait()
    writer.wait()


ON_A_SMALL_DISK = """
import sys, errno, torch
from pathlib import Path
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load, newest_good
folder = Path(sys.argv[1])
writer = CheckpointWriter(folder, keep=2)
tensors = {"model.w": torch.ones(500, 100)}  # 200 kB in tensors and 200 kB in tables; the disk has 1 MB
tables = Tables("w", "w", 500)
failures = 0
for step in range(1, 7):
    tensors["model.w"].fill_(step)
    try:
        writer.save(step, tensors, {}, tables=tables)
        writer.wait()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert "step-000000001, step-000000002" in str(error), error
        failures += 1
assert failures == 4, failures
path = newest_good(folder, on_skip=print)
assert load(path, tensors) == {"step": 2}
assert tensors["model.w"].eq(2).all()
writer = CheckpointWriter(folder, keep=1)
import shutil; shutil.rmtree(folder / "step-000000001")  # somebody frees some space
writer.save(7, tensors, {}, tables=tables)
writer.wait()
assert newest_good(folder, on_skip=print).name == "step-000000007"
print("ok")
"""


def test_a_run_survives_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Uses a 1 MB file system in memory that only the child sees."""
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(ON_A_SMALL_DISK)
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1"'
    try:
        subprocess.run([*unshare, "sh", "-c", mount, "sh", str(disk)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system is not permitted here: {error}")
    command = [*unshare, "sh", "-c", f'{mount} && exec "$2" "$3" "$1"', "sh", str(disk), sys.executable, str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.stdout.endswith("ok\n"), result.stdout + result.stderr
