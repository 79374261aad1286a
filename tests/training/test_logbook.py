"""The record of a run: its file after writing, kills, resuming and a full disk; and the trackers."""

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.training.logbook import Logbook, Values, open_logbook, read_metrics

ROWS: list[tuple[str, int, dict[str, Any]]] = [
    ("val", 0, {"loss": 8.3175}),
    ("train", 10, {"loss": 7.1, "lr": 6e-4, "note": "é"}),
    ("train", 20, {"loss": 0.1 + 0.2, "grad_norm": None}),
    ("val", 20, {"loss": 6.5}),
    ("train", 30, {"loss": 5.5}),
    ("embeddings", 30, {"mu_norm_ratio": 0.25}),
    ("train", 40, {"loss": 5.25}),
]


def write_rows(folder: Path, rows: list[tuple[str, int, dict[str, Any]]], resume_step: int | None = None) -> bytes:
    with open_logbook(folder, resume_step=resume_step, say=pytest.fail) as logbook:
        for kind, step, values in rows:
            logbook.write(kind, step, values)
    return (folder / "metrics.jsonl").read_bytes()


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def test_rows_are_read_back_unchanged(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": k, "step": s, **values} for k, s, values in ROWS]
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl", "val")] == [8.3175, 6.5]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    content = write_rows(tmp_path, [("train", 1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1})])
    row = json.loads(content, parse_constant=refuse_constant)
    assert row == {"kind": "train", "step": 1, "a": None, "b": None, "c": None, "d": 1}


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with open_logbook(tmp_path) as logbook:
        for count, (kind, step, values) in enumerate(ROWS, 1):
            logbook.write(kind, step, values)
            assert len(read_metrics(tmp_path / "metrics.jsonl")) == count


def test_a_truncated_file_gives_its_complete_rows(tmp_path: Path) -> None:
    content = write_rows(tmp_path, ROWS)
    path = tmp_path / "metrics.jsonl"
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        # The last row is complete with its last brace, before the newline.
        whole = (content[:length] + b"\n").count(b"}\n")
        assert len(read_metrics(path)) == whole, f"cut after {length} bytes"


def test_a_resumed_run_has_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    content = write_rows(tmp_path, ROWS)
    path = tmp_path / "metrics.jsonl"
    saved_at = content.index(b'{"kind": "train", "step": 30')  # a checkpoint of step 20 was saved here
    for length in range(saved_at, len(content) + 1):
        path.write_bytes(content[:length])
        rest = [row for row in ROWS if row[1] > 20]
        assert write_rows(tmp_path, rest, resume_step=20) == content, f"killed after {length} bytes"


def test_an_early_row_after_a_late_one_is_kept(tmp_path: Path) -> None:
    write_rows(tmp_path, [("train", 10, {}), ("train", 30, {}), ("val", 20, {})])
    kept = [json.loads(line) for line in write_rows(tmp_path, [], resume_step=20).splitlines()]
    assert kept == [{"kind": "train", "step": 10}, {"kind": "val", "step": 20}]


def test_rows_are_removed_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_rows(tmp_path, ROWS)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_logbook(tmp_path, resume_step=20)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_keeps_no_old_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, ROWS)
    assert write_rows(tmp_path, ROWS[:1]).count(b"\n") == 1


def test_a_damaged_line_is_named_and_a_resumed_run_repairs_it(tmp_path: Path) -> None:
    content = write_rows(tmp_path, ROWS)
    path = tmp_path / "metrics.jsonl"
    lines = content.splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + b'{"loss": 1}\n' + b"".join(lines[1:]))
    with pytest.raises(ValueError, match=rf"^{path}, line 2: "):
        read_metrics(path)
    said: list[str] = []
    open_logbook(tmp_path, resume_step=99, say=said.append).close()
    assert path.read_bytes() == content
    assert [sentence.split(", ")[-2] for sentence in said] == ["line 2: damaged", "line 3: damaged"]


WRITER = """
import itertools, sys
from pathlib import Path
from coupled_adam.training.logbook import open_logbook
logbook = open_logbook(Path(sys.argv[1]))
for step in itertools.count():
    logbook.write("train", step, {"loss": 1 / (step + 1), "text": "x" * (step % 200)})
"""


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_a_killed_run_leaves_rows_without_a_gap(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) as process:
        while not path.exists() or path.stat().st_size == 0:
            assert process.poll() is None
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert steps


def test_a_full_disk_is_reported_once_and_later_rows_are_complete(tmp_path: Path) -> None:
    said: list[str] = []
    logbook = open_logbook(tmp_path, say=said.append)
    logbook.write("train", 10, {"loss": 7.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # space for less than a row: write() is cut short
    try:
        for step in (20, 30, 40):
            logbook.write("train", step, {"loss": 6.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1
    assert re.search(r"^metrics\.jsonl .*\(.*\b20 of 43 bytes\b.*\)", said[0]), said
    logbook.write("train", 50, {"loss": 5.0})
    logbook.close()
    (again,) = said[1:]
    assert re.search(r"^metrics\.jsonl .*\b3 rows\b", again), again
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [10, 50]


def test_sync_writes_the_rows_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with open_logbook(tmp_path) as logbook:
        logbook.write("train", 1, {"loss": 1.0})
        assert synced == []  # waiting for the disk at each row would slow down the training
        logbook.sync()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_ino]


class FailingSink:
    """A tracker that has lost its connection."""

    name = "tracker"

    def __init__(self) -> None:
        self.ended: bool | None = None

    def write(self, kind: str, step: int, values: Values) -> None:
        raise RuntimeError("connection lost")

    def sync(self) -> None:
        raise RuntimeError("connection lost")

    def close(self, failed: bool) -> None:
        self.ended = failed
        raise RuntimeError("connection lost")


def test_a_failing_tracker_does_not_end_the_training() -> None:
    said: list[str] = []
    with Logbook([FailingSink()], said.append) as logbook:
        for step in range(5):
            logbook.write("train", step, {"loss": 1.0})
        (once,) = said
        assert re.search(r"^tracker .*\(connection lost\)", once), once
        logbook.sync()


@pytest.mark.parametrize("fails", [False, True])
def test_sinks_are_told_whether_the_training_failed(fails: bool) -> None:
    sink = FailingSink()
    try:
        with Logbook([sink], lambda sentence: None):
            assert not fails, "the training fails"
    except AssertionError:
        pass
    assert sink.ended is fails


def test_a_logbook_without_sinks_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Logbook() as logbook:
        logbook.write("train", 1, {"loss": 1.0})
        logbook.sync()
    assert list(tmp_path.iterdir()) == []


def tensorboard_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_numbers_and_after_resuming_only_the_new_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_logbook(tmp_path, tensorboard=True) as logbook:
        for step in (0, 10, 20, 30):
            logbook.write("train", step, {"loss": 1.0, "note": "text", "grad_norm": None})
    with open_logbook(tmp_path, tensorboard=True, resume_step=10) as logbook:
        for step in (20, 30, 40):
            logbook.write("train", step, {"loss": 2.0})
            logbook.write("val", step, {"loss": 3.0})
    train = [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    assert tensorboard_points(tmp_path) == {"train/loss": train, "val/loss": [(20, 3.0), (30, 3.0), (40, 3.0)]}


def test_sync_waits_until_tensorboard_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    flushed: list[SummaryWriter] = []
    monkeypatch.setattr(SummaryWriter, "flush", lambda writer: flushed.append(writer))
    with open_logbook(tmp_path, tensorboard=True) as logbook:
        logbook.sync()
        assert len(flushed) == 1


@pytest.mark.parametrize(
    ("package", "asked"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "embeddings"})]
)
def test_a_missing_tracker_is_named_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, asked: dict[str, Any]
) -> None:
    content = write_rows(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^{package} .*\blog\.{package}\b.*pip install .*\[track\]'"):
        open_logbook(tmp_path, resume_step=20, **asked)
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


# In a separate process: wandb starts a service that lives as long as the process.
TRACKED_RUN = """
import os, sys
from pathlib import Path
from coupled_adam.training.logbook import open_logbook
def train(name, resume_step=None):
    with open_logbook(Path(name), wandb_project="embeddings", config={"model": {"width": 64}}, run_name="tiny",
                      resume_step=resume_step) as logbook:
        for step in (10, 20):
            logbook.write("train", step, {"loss": 1.5, "note": "text", "grad_norm": None})
try:
    train("no_login")
except ValueError as error:
    print(error)
sys.modules["wandb"].teardown()  # it reads its environment once
os.environ["WANDB_MODE"] = "offline"
train("offline")
train("offline", resume_step=10)
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the tracked runs, and their output lines."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("needs the package wandb")
    folder = tmp_path_factory.mktemp("tracked")
    without = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    result = subprocess.run(
        [sys.executable, "-c", TRACKED_RUN],
        cwd=folder,
        env=without | {"HOME": str(folder), "NETRC": str(folder / "netrc")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return folder, result.stdout.splitlines()


def test_weights_and_biases_resumes_the_same_run(tracked: tuple[Path, list[str]]) -> None:
    folder, lines = tracked
    assert all(re.search(r"^Weights & Biases: offline\b.*\boffline/wandb$", line) for line in lines[-2:]), lines
    run_id = (folder / "offline" / "wandb_id").read_text()
    files = list(folder.glob(f"offline/wandb/offline-run-*/run-{run_id}.wandb"))
    assert len(files) == len(list(folder.glob("offline/wandb/offline-run-*"))) == 2
    for file in files:
        content = file.read_bytes()
        assert content.count(b"train/loss") >= 2
        assert b"embeddings" in content
        assert b"width" in content
        assert b"train/note" not in content


def test_weights_and_biases_without_a_login_gives_a_remedy(tracked: tuple[Path, list[str]]) -> None:
    assert re.search(r"^log\.wandb = 'embeddings': .*`wandb login`.*WANDB_MODE=offline", tracked[1][0]), tracked


def test_logbook_and_display_do_not_import_torch() -> None:
    names = ("logbook", "trackers", "display", "throughput")
    script = "import sys, " + ", ".join(f"coupled_adam.training.{name}" for name in names)
    subprocess.run([sys.executable, "-c", f"{script}; assert 'torch' not in sys.modules"], check=True)
