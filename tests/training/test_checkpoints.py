"""Checkpoints of one process: round trips, when they are written, which are kept, and errors of wrong calls."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor

from coupled_adam.training.checkpoint import checkpoint_folder as checkpoint_record
from coupled_adam.training.checkpoint.checkpoint_folder import Record, StoredFile
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load, newest_good
from coupled_adam.training.checkpoint.training_state import Staging


def random_state(seed: int = 0) -> dict[str, Tensor]:
    """Every possible kind of tensor."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (50,), generator=generator).int()
    return {
        "model.wte.weight": torch.randn(13, 8, generator=generator),
        "model.strange_floats": bits.view(torch.float32),  # NaNs with all kinds of payloads
        "model.half": torch.randn(3, 5, 7, generator=generator).bfloat16(),
        "model.transposed": torch.randn(4, 6, generator=generator).t(),
        "model.part_of_more": torch.randn(100, generator=generator)[10:20],
        "model.empty": torch.empty(0, 3),
        "optimizer.wte.weight.step": torch.tensor(7.0),
        "rng.cpu": torch.randint(256, (100,), generator=generator, dtype=torch.uint8),
    }


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        a, b = (t.reshape(-1).contiguous().view(torch.uint8) for t in (actual[name], tensor))
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(a, b), name


def save_whole(folder: Path, step: int, **options: object) -> dict[str, Tensor]:
    writer = CheckpointWriter(folder, keep=100)
    tensors = without_generators(random_state(step))
    writer.save(step, tensors, {}, **options)
    writer.wait()
    return tensors


def without_generators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng")}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No file reaches the disk until the fixture is called."""
    released = threading.Event()
    fsync = os.fsync

    def wait_then_fsync(descriptor: int) -> None:
        assert released.wait(20)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_then_fsync)
    return released.set


def test_every_tensor_and_the_state_are_restored_bitwise(tmp_path: Path) -> None:
    tensors = without_generators(random_state())
    state = {"tokens": 10**12, "loss": 0.1 + 0.2, "config": "é", "list": [1, None, True]}
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(300, tensors, state)
    writer.wait()
    loaded = blank(tensors)
    assert load(tmp_path / "step-000000300", loaded) == {"step": 300, **state}
    assert_same(loaded, tensors)


def test_torchs_own_reader_gives_the_same_tensors(tmp_path: Path) -> None:
    tensors = save_whole(tmp_path, 1)
    loaded = blank(tensors)
    dcp.load(loaded, checkpoint_id=tmp_path / "step-000000001")
    assert_same(loaded, tensors)


def test_save_returns_before_the_files_are_written_and_later_changes_do_not_leak_into_them(
    tmp_path: Path, held_back: Callable[[], None]
) -> None:
    tensors = without_generators(random_state())
    original = {name: tensor.clone() for name, tensor in tensors.items()}
    state = {"tokens": 1, "seen": [1]}
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, tensors, state, tables=Tables("wte.weight", "wte.weight", 13))
    for tensor in tensors.values():
        tensor.zero_()
    state["seen"].append(2)
    assert newest_good(tmp_path, on_skip=pytest.fail) is None
    held_back()
    writer.wait()
    loaded = blank(original)
    assert load(newest_good(tmp_path, on_skip=pytest.fail), loaded) == {"step": 1, "tokens": 1, "seen": [1]}
    assert_same(loaded, original)


def test_a_second_save_waits_for_the_first_and_does_not_touch_its_copy(
    tmp_path: Path, held_back: Callable[[], None]
) -> None:
    first, second = {"model.w": torch.full((50,), 1.0)}, {"model.w": torch.full((50,), 2.0)}
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(1, first, {})
    saver = threading.Thread(target=writer.save, args=(2, second, {}))
    saver.start()
    saver.join(0.3)
    assert saver.is_alive()
    held_back()
    saver.join(20)
    writer.wait()
    for step, expected in ((1, first), (2, second)):
        loaded = blank(expected)
        load(tmp_path / f"step-00000000{step}", loaded)
        assert_same(loaded, expected)


def test_the_host_memory_is_one_copy_that_is_reused() -> None:
    tensors = {f"model.{i}": torch.full((1000 + i, 3), float(i)) for i in range(20)}
    staging = Staging()
    first = staging.stage(tensors, rank=0, ranks=1).data
    addresses = [copy.data_ptr() for copy in first.values()]
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert max(addresses) - min(addresses) < size + 64 * len(tensors)
    assert not set(addresses) & {tensor.data_ptr() for tensor in tensors.values()}
    second = staging.stage(tensors, rank=0, ranks=1).data  # while the first still exists
    assert [copy.data_ptr() for copy in second.values()] == addresses
    assert [copy.data_ptr() for copy in first.values()] == addresses


def test_the_folder_gets_its_name_after_every_file_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    unsynced_at_rename: dict[str, list[str]] = {}
    fsync, rename = os.fsync, Path.rename

    def remember(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def look(path: Path, target: Path) -> Path:
        if path.is_dir():
            assert "state.json" in names_in(path)
            entries = [path, *path.iterdir()]
            unsynced_at_rename[target.name] = [e.name for e in entries if e.stat().st_ino not in synced]
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(Path, "rename", look)
    save_whole(tmp_path, 1, tables=Tables("wte.weight", "wte.weight", 13))
    assert unsynced_at_rename == {"step-000000001": []}
    assert tmp_path.stat().st_ino in synced, "the new name itself"


def test_the_last_ones_and_all_milestones_are_kept(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in range(1, 8):
        writer.save(step, {"model.w": torch.ones(3)}, {}, milestone=step in (2, 3))
    writer.wait()
    assert names_in(tmp_path) == [f"step-00000000{step}" for step in (2, 3, 6, 7)]


def test_the_old_one_is_deleted_after_the_new_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present: list[list[str]] = []
    rename = Path.rename

    def look(path: Path, target: Path) -> Path:
        present.append(names_in(tmp_path))
        return rename(path, target)

    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, {"model.w": torch.ones(3)}, {})
    writer.wait()
    monkeypatch.setattr(Path, "rename", look)
    writer.save(2, {"model.w": torch.ones(3)}, {})
    writer.wait()
    whole = [[name for name in names if name.startswith("step")] for names in present]
    assert ["step-000000001"] in whole, "before it got its name"
    assert all(whole), whole
    assert names_in(tmp_path) == ["step-000000002"]


def test_damaged_ones_neither_count_nor_are_deleted(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (1, 2, 3):
        if step == 3:
            (tmp_path / "step-000000002/__0_0.distcp").write_bytes(b"")
        writer.save(step, {"model.w": torch.ones(3)}, {})
        writer.wait()
    assert names_in(tmp_path) == [f"step-00000000{step}" for step in (1, 2, 3)]


def test_a_new_writer_deletes_leftovers_of_a_killed_one(tmp_path: Path) -> None:
    save_whole(tmp_path, 1)
    (tmp_path / ".step-000000002.tmp").mkdir()
    (tmp_path / ".step-000000002.tmp/__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step-000000001.replaced").mkdir()
    CheckpointWriter(tmp_path, keep=1)
    assert names_in(tmp_path) == ["step-000000001"]


def test_a_checkpoint_is_recovered_if_its_replacement_was_interrupted(tmp_path: Path) -> None:
    tensors = save_whole(tmp_path, 1)
    (tmp_path / "step-000000001").rename(tmp_path / ".step-000000001.replaced")
    CheckpointWriter(tmp_path, keep=1)
    loaded = blank(tensors)
    load(newest_good(tmp_path, on_skip=pytest.fail), loaded)
    assert_same(loaded, tensors)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for value in (1.0, 2.0):
        writer.save(5, {"model.w": torch.full((3,), value)}, {"value": value})
        writer.wait()
    loaded = {"model.w": torch.zeros(3)}
    assert load(tmp_path / "step-000000005", loaded) == {"step": 5, "value": 2.0}
    assert loaded["model.w"].eq(2).all()
    assert names_in(tmp_path) == ["step-000000005"]


@pytest.mark.parametrize("output", ["wte.weight", "lm_head.weight"])
def test_tables_are_bitwise_equal_to_the_checkpoint(tmp_path: Path, output: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.{name}": torch.randn(64, 8, generator=generator) for name in {"wte.weight", output}}
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, {**tensors, "model.other": torch.ones(3)}, {}, tables=Tables("wte.weight", output, 61))
    writer.wait()
    with safe_open(tmp_path / "step-000000001/tables.safetensors", "pt") as file:
        assert_same({f"model.{name}": file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118
        assert file.metadata() == {
            "input": "wte.weight",
            "output": output,
            "tied": str(output == "wte.weight").lower(),
            "vocabulary_size": "61",
        }


def test_without_checkpoints_there_is_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "missing", on_skip=pytest.fail) is None
    (tmp_path / "step-of-mine").mkdir()
    assert newest_good(tmp_path, on_skip=pytest.fail) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    found = [tmp_path / name for name in ("step-000000002", "step-999999999", "step-1000000000")]
    for path in reversed(found):
        path.mkdir()
    assert checkpoint_record.checkpoints_in(tmp_path) == found


def test_only_the_weights_can_be_loaded(tmp_path: Path) -> None:
    tensors = save_whole(tmp_path, 1)
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    loaded = blank(weights)
    load(tmp_path / "step-000000001", loaded)
    assert_same(loaded, weights)


def test_generators_are_restored_if_both_sides_have_them(tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved = {"model.w": torch.ones(3), "rng.cpu": torch.get_rng_state(), "rng.cuda": torch.zeros(16, dtype=torch.uint8)}
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(1, saved, {})
    writer.wait()
    expected = torch.rand(4)
    torch.rand(100)
    load(tmp_path / "step-000000001", {"model.w": torch.ones(3), "rng.cpu": torch.get_rng_state()})
    assert torch.equal(torch.rand(4), expected)
    load(tmp_path / "step-000000001", {"model.w": torch.ones(3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.half"), r": has model\.half\b"),
        (lambda t: t.update({"model.more": torch.ones(2)}), r": has no model\.more\b"),
        (lambda t: t.update({"model.half": torch.ones(3, 5, 6).bfloat16()}), r"model.half is \(3, 5, 7\) torch.bf"),
        (
            lambda t: t.update({"model.half": torch.ones(3, 5, 7)}),
            r"model\.half .*torch\.bfloat16.*\(3, 5, 7\) torch\.float32",
        ),
        (lambda t: t.update({"model.half": t["model.half"].to("meta")}), r"model\.half\b.*\bto_empty\b"),
        (lambda t: t.update({f"optimizer.{i}": torch.ones(2) for i in range(9)}), "optimizer.2 and 6 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    tensors = save_whole(tmp_path, 1)
    loaded = blank(tensors)
    change(loaded)
    before = {name: tensor.clone() for name, tensor in loaded.items() if not tensor.is_meta}
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "step-000000001", loaded)
    assert str(tmp_path / "step-000000001") in str(caught.value)
    assert_same({name: loaded[name] for name in before}, before)


@pytest.mark.parametrize(("key", "width"), [("exp_avg", 3), ("row_avg_sq", 1)])
@pytest.mark.parametrize("is_in", ["checkpoint", "run"])
def test_a_moment_may_be_missing_only_for_coupled_tables(tmp_path: Path, is_in: str, key: str, width: int) -> None:
    def tensors(name: str, rows: int, is_complete: bool) -> dict[str, Tensor]:
        moments = {"exp_avg_sq": torch.ones(rows, 3)} | ({key: torch.ones(4, width)} if is_complete else {})
        return {f"optimizer.{name}.{suffix}": moment for suffix, moment in moments.items()}

    def complete_if(side: str) -> dict[str, Tensor]:
        return {"model.table": torch.ones(4, 3), **tensors("table", 1, is_in == side)}

    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(1, complete_if("checkpoint"), {})
    writer.save(2, complete_if("checkpoint") | tensors("matrix", 4, is_in == "checkpoint"), {})
    writer.wait()
    load(tmp_path / "step-000000001", complete_if("run"))
    with pytest.raises(ValueError, match=rf"optimizer\.matrix\.{key}\b"):
        load(tmp_path / "step-000000002", complete_if("run") | tensors("matrix", 4, is_in == "run"))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, {}, {}), {}, "step is -1"),
        ((1, {}, {"loss": torch.ones(1)}), {}, "JSON.*Tensor"),
        ((1, {}, {}), {"tables": Tables("wte", "wte", 3)}, "no tensor 'model.wte'"),
        ((1, {"model.wte": torch.ones(3)}, {}), {"tables": Tables("wte", "wte", 3)}, r"shape \(3,\)"),
        ((1, {"model.wte": torch.ones(3, 2)}, {}), {"tables": Tables("wte", "wte", 4)}, r"vocabulary_size=4"),
    ],
)
def test_unsupported_values_are_reported_at_once(
    tmp_path: Path, arguments: tuple[object, ...], options: dict[str, object], message: str
) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    with pytest.raises(ValueError, match=message):
        writer.save(*arguments, **options)
    writer.wait()
    assert names_in(tmp_path) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\bkeep .*\b0\b.*\b1\b"):
        CheckpointWriter(tmp_path, keep=0)


def test_the_fingerprint_equals_that_of_version_0_1_0() -> None:
    """Evaluation results contain it; with another fingerprint they would be discarded."""
    files = {"tables.safetensors": StoredFile(2, "22"), "a.distcp": StoredFile(1, "11")}
    # printf "%s" "[('a.distcp', '11'), ('tables.safetensors', '22')]" | sha256sum
    expected = "418e95ec495f478607dcfb5fe40a4d2d5ab9cc4effe6d966a945514d8fb3d4f9"
    assert Record(3, False, {}, files).fingerprint == expected
