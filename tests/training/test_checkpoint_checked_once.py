"""A checkpoint is hashed once; while its files do not change, it is known to be intact."""

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_examples import TABLES, state_of_step

from coupled_adam.training.checkpoint import checkpoint_folder, save_and_load
from coupled_adam.training.checkpoint.checkpoint_folder import CHECKED_FILE, StoredFile, stored_file
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, damage, newest_good


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint that was just written."""
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=2)
    writer.save(1, state_of_step(1), {}, tables=TABLES)
    writer.wait()
    (path,) = checkpoint_folder.checkpoints_in(tmp_path / "checkpoints")
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed."""
    names: list[str] = []

    def noted(path: Path) -> StoredFile:
        names.append(path.name)
        return stored_file(path)

    monkeypatch.setattr(save_and_load, "stored_file", noted)
    return names


def tensors_of(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("*.distcp")
    return path


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_files_are_hashed_only_at_the_first_check(checkpoint: Path, hashed: list[str]) -> None:
    assert damage(checkpoint) is None
    assert sorted(hashed) == sorted({path.name for path in checkpoint.iterdir()} - {"state.json", CHECKED_FILE})
    hashed.clear()
    assert damage(checkpoint) is None
    assert newest_good(checkpoint.parent, on_skip=print) == checkpoint
    assert hashed == []


def test_a_byte_that_changes_right_after_the_check_is_found(checkpoint: Path) -> None:
    assert damage(checkpoint) is None
    flip_a_byte(tensors_of(checkpoint))
    assert "sha256" in (damage(checkpoint) or "")
    flip_a_byte(tensors_of(checkpoint))
    assert damage(checkpoint) is None


def test_a_file_with_a_reset_time_is_hashed_again(checkpoint: Path) -> None:
    assert damage(checkpoint) is None
    path = tensors_of(checkpoint)
    before = path.stat()
    flip_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert "sha256" in (damage(checkpoint) or "")


def test_a_copy_is_hashed_even_if_its_times_are_preserved(checkpoint: Path, hashed: list[str]) -> None:
    assert damage(checkpoint) is None
    copy = checkpoint.parent.parent / "other" / checkpoint.name
    shutil.copytree(checkpoint, copy)  # as cp -a does
    assert tensors_of(copy).stat().st_mtime_ns == tensors_of(checkpoint).stat().st_mtime_ns
    hashed.clear()
    assert damage(copy) is None
    assert tensors_of(copy).name in hashed


def test_hashes_of_another_record_are_not_trusted(checkpoint: Path) -> None:
    assert damage(checkpoint) is None
    record = checkpoint_folder.read_record(checkpoint)
    name = tensors_of(checkpoint).name
    files = record.files | {name: StoredFile(record.files[name].bytes, "0" * 64)}
    changed = checkpoint_folder.Record(record.step, record.milestone, record.state, files)
    checkpoint_folder.write_record(checkpoint, changed)
    assert "sha256" in (damage(checkpoint) or "")


@pytest.mark.parametrize("content", ["", "[]", '{"files": {}}', "{" * 1000])
def test_a_damaged_list_of_times_only_causes_another_hash(content: str, checkpoint: Path, hashed: list[str]) -> None:
    (checkpoint / CHECKED_FILE).write_text(content)
    assert damage(checkpoint) is None
    assert hashed
    hashed.clear()
    assert damage(checkpoint) is None
    assert hashed == []


def test_a_damaged_checkpoint_is_not_remembered_as_intact(checkpoint: Path) -> None:
    flip_a_byte(tensors_of(checkpoint))
    assert damage(checkpoint) is not None
    assert not (checkpoint / CHECKED_FILE).exists()


def test_a_read_only_folder_is_checked_too(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_folder, "write_whole", refuse)
    assert damage(checkpoint) is None
    assert not (checkpoint / CHECKED_FILE).exists()
