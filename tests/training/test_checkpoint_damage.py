"""Damaged, foreign and malicious checkpoints are named and skipped."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_examples import FILES, assert_loads, state_of_step, write_two_checkpoints

from coupled_adam.base.errors import UserError
from coupled_adam.training.checkpoint import checkpoint_folder as checkpoint_record
from coupled_adam.training.checkpoint.checkpoint_folder import read_record, stored_file, write_record
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, damage, load, newest_good


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_two_checkpoints(folder)
    return folder


@pytest.fixture
def folder(two_checkpoints: Path, tmp_path: Path) -> Path:
    """Two checkpoints that a test may damage."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    # In state.json, the last digit of the tokens: it changes a value but not the syntax.
    position = content.index(b"12345") + 4 if path.name == "state.json" else len(content) // 2
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [remove, truncate, lengthen, empty, flip_a_bit])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    folder: Path, file: str, harm: Callable[[Path], None]
) -> None:
    if file == "state.json" and harm in (truncate, lengthen):
        harm = empty  # white space at the end is not damage
    path = folder / "step-000000002" / file
    before = path.stat().st_size
    harm(path)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    (message,) = skipped
    assert str(folder / "step-000000002") in message
    assert file in message
    if harm is remove:
        assert "missing" in message
    if file != "state.json" and harm in (truncate, lengthen, empty):
        assert re.search(rf"\b{path.stat().st_size} bytes\b.*\b{before}\b", message), message
    if harm is flip_a_bit:
        assert "sha256" in message or "checksum" in message


def test_intact_checkpoints_are_used(folder: Path) -> None:
    assert damage(folder / "step-000000001") is None
    assert_loads(newest_good(folder, on_skip=pytest.fail), 2)


def test_if_all_are_damaged_there_is_none(folder: Path) -> None:
    for step in (1, 2):
        remove(folder / f"step-00000000{step}/__0_0.distcp")
    skipped: list[str] = []
    assert newest_good(folder, on_skip=skipped.append) is None
    assert len(skipped) == 2


@pytest.mark.parametrize("content", ["[1]", "{}", '{"format": 2}', "not json", '{"format": 1, "sha256": "x"}'])
def test_a_state_file_with_other_contents_is_refused(folder: Path, content: str) -> None:
    (folder / "step-000000002/state.json").write_text(content)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert re.search(r"step-000000002 .*\bstate\.json .*\(.+\)", skipped[0]), skipped


def rewrite_state(checkpoint: Path, **changes: object) -> None:
    """Write other values into state.json, with a valid checksum."""
    content = json.loads((checkpoint / "state.json").read_text()) | changes
    del content["sha256"]
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(content | {"sha256": checksum}))


@pytest.mark.parametrize("step", [-1, 0, 1, 3, 10**30, True, 2.0, "2", None, [2]])
def test_a_step_that_differs_from_the_folder_is_damage(folder: Path, step: object) -> None:
    rewrite_state(folder / "step-000000002", step=step)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert "step" in skipped[0].partition("state.json")[2]
    with pytest.raises(ValueError, match="step"):
        load(folder / "step-000000002", state_of_step(2))


def test_a_step_after_the_last_of_the_run_is_damage(folder: Path) -> None:
    assert_loads(newest_good(folder, on_skip=pytest.fail, last_step=2), 2)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append, last_step=1), 1)
    assert "step-000000002" in skipped[0]


def test_the_state_of_the_run_cannot_have_another_step(folder: Path) -> None:
    rewrite_state(folder / "step-000000002", state={"step": -7, "tokens": 5})
    assert load(folder / "step-000000002", state_of_step(2)) == {"step": 2, "tokens": 5}


@pytest.mark.parametrize(
    "changes",
    [
        {"milestone": "no"},
        {"state": [["tokens", 1]]},
        {"files": []},
        {"files": {"../step-000000001/__0_0.distcp": {"bytes": 1, "sha256": ""}}},
        {"files": {"..": {"bytes": 1, "sha256": ""}}},
        {"files": {"a": {"bytes": True, "sha256": ""}}},
        {"files": {"a": {"bytes": -1, "sha256": ""}}},
    ],
)
def test_a_state_file_with_impossible_values_is_refused(folder: Path, changes: dict[str, object]) -> None:
    rewrite_state(folder / "step-000000002", **changes)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert re.search(r"step-000000002 .*\bstate\.json .*\(.+\)", skipped[0]), skipped


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "9" * 5000])
def test_a_state_file_that_is_nested_deeply_is_refused(folder: Path, content: str) -> None:
    (folder / "step-000000002/state.json").write_text(content)
    assert_loads(newest_good(folder, on_skip=lambda _: None), 1)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_read(folder: Path, file: str, kind: str) -> None:
    path = folder / "step-000000002" / file
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if file != "state.json":
        record = json.loads((folder / "step-000000002/state.json").read_text())["files"]
        rewrite_state(folder / "step-000000002", files=record | {file: {"bytes": 0, "sha256": ""}})
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert file in skipped[0]


def test_a_leftover_that_is_a_file_is_removed(folder: Path) -> None:
    (folder / ".step-000000003.tmp").write_text("not a folder")
    CheckpointWriter(folder, keep=2)
    assert not (folder / ".step-000000003.tmp").exists()


def test_a_leftover_that_cannot_be_removed_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = folder / ".step-000000003.tmp"
    leftover.mkdir()

    def refuse_to_remove(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse_to_remove)
    with pytest.raises(ValueError, match=rf"^{leftover}\b.*{os.strerror(errno.EACCES)}"):
        CheckpointWriter(folder, keep=2)


def replace_metadata(checkpoint: Path, content: bytes) -> None:
    """Replace a file like an attacker, with the right size and hash in state.json."""
    (checkpoint / ".metadata").write_bytes(content)
    record = read_record(checkpoint)
    files = {**record.files, ".metadata": stored_file(checkpoint / ".metadata")}
    write_record(checkpoint, checkpoint_record.Record(record.step, record.milestone, record.state, files))


class Malicious:
    def __init__(self, call: tuple[Callable[..., object], tuple[object, ...]]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("kind", ["system", "eval", "nested"])
def test_a_malicious_pickle_is_refused_and_not_executed(folder: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "executed"
    touch = f"open({str(victim)!r}, 'w')"
    call = {"system": (os.system, (f"touch {victim}",)), "eval": (eval, (touch,)), "nested": (eval, (touch,))}[kind]
    content: object = Malicious(call)
    if kind == "nested":
        with (folder / "step-000000002/.metadata").open("rb") as file:
            content = pickle.load(file)
        content.planner_data = Malicious(call)
    replace_metadata(folder / "step-000000002", pickle.dumps(content))
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    named = "posix.system" if kind == "system" else "builtins.eval"
    assert named in skipped[0]
    with pytest.raises(UserError, match=rf"\.metadata\b.*\b{re.escape(named)}\b"):
        load(folder / "step-000000002", state_of_step(2))
    assert not victim.exists()
    pickle.loads(pickle.dumps(Malicious(call)))
    assert victim.exists(), "the pickle would have done its work elsewhere"


def metadata_of(checkpoint: Path) -> dcp.Metadata:
    with (checkpoint / ".metadata").open("rb") as file:
        return pickle.load(file)


def bytes_entry(metadata: dcp.Metadata) -> None:
    metadata.state_dict_metadata["model.more"] = dcp.BytesStorageMetadata()


def file_elsewhere(metadata: dcp.Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../step-000000001/__0_0.distcp"


def beyond_the_end(metadata: dcp.Metadata) -> None:
    next(iter(metadata.storage_data.values())).length = 10**9


def transformed(metadata: dcp.Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def incomplete(metadata: dcp.Metadata) -> None:
    metadata.state_dict_metadata["model.w"].size = torch.Size([501])


def nowhere(metadata: dcp.Metadata) -> None:
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bytes_entry, "BytesStorageMetadata"),
        (file_elsewhere, r"'model\.\w+' .*'\.\./step-000000001/__0_0\.distcp'"),
        (beyond_the_end, r"'model\.\w+' .* __0_0\.distcp"),
        (transformed, r"'model\.\w+' .*\bform\b"),
        (incomplete, r"'model\.w' .*\bcomplete$"),
        (nowhere, "MetadataIndex"),
    ],
)
def test_wrong_metadata_is_refused(folder: Path, change: Callable[[dcp.Metadata], None], message: str) -> None:
    checkpoint = folder / "step-000000002"
    metadata = metadata_of(checkpoint)
    change(metadata)
    replace_metadata(checkpoint, pickle.dumps(metadata))
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert re.search(rf"step-000000002 .*\.metadata .*{message}", skipped[0]), skipped
    with pytest.raises(UserError, match=message):
        load(checkpoint, state_of_step(2))


@pytest.mark.parametrize("content", [pickle.dumps({"a": 1}), b"", b"\x80\x04garbage"])
def test_something_else_in_place_of_metadata_is_refused(folder: Path, content: bytes) -> None:
    replace_metadata(folder / "step-000000002", content)
    skipped: list[str] = []
    assert_loads(newest_good(folder, on_skip=skipped.append), 1)
    assert re.search(r"step-000000002 .*\.metadata ", skipped[0]), skipped


def test_metadata_names_no_path_of_the_machine(folder: Path) -> None:
    content = (folder / "step-000000002/.metadata").read_bytes()
    assert b"PosixPath" not in content
    assert b".tmp" not in content


def test_the_state_file_is_readable_for_people(folder: Path) -> None:
    content = json.loads((folder / "step-000000002/state.json").read_text())
    assert content["step"] == 2
    assert content["milestone"] is False
    assert content["state"] == {"tokens": 12345}
    assert content["files"].keys() == set(FILES) - {"state.json"}
