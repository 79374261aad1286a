"""The runner: finished runs are kept, stopped runs resume, failures are reported, and the other runs continue.

Most tests replace the worker process by a quick stand-in; the last ones train small models and interrupt them.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study_fake_worker import result_of
from study_runs import (
    ADAMW,
    BROKEN,
    COUPLED,
    SLOW_COMMAND,
    UNTIED,
    children_of,
    comparable,
    kill_all,
    plan,
    run_here,
    start_command,
    wait_until,
    write_study,
)

from coupled_adam.base.errors import UserOSError
from coupled_adam.base.locks import locked
from coupled_adam.config.loading import parse_settings
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.study_config import load_study
from coupled_adam.config.study_sections import EvaluationSection
from coupled_adam.evaluation.weights import load_run
from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import build_model
from coupled_adam.study import cell as study_cell
from coupled_adam.study import launchers, measurement, runner
from coupled_adam.study.cell import Task, read_error, run_cell
from coupled_adam.study.energy import EnergyMeter, visible_gpus
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import CLAIM, StudyFolder, is_claimed, last_row
from coupled_adam.study.results import from_json, merge_results, read_results, to_json, write_evaluation
from coupled_adam.study.study_display import Running


def named(*names: str) -> str:
    """Optimizers with these names, each with its own learning rate."""
    return "".join(
        f'[[optimizers]]\nname = "{name}"\nembeddings = "adamw"\nset = {{ "optimizer.lr" = {number}e-3 }}\n'
        for number, name in enumerate(names, 1)
    )


def records(out: Path) -> dict[str, dict[str, Any]]:
    """The tasks of the stand-in, by run."""
    found = sorted(out.glob("runs/*/*/task.json"))
    return {"/".join(path.parts[-3:-1]): json.loads(path.read_text()) for path in found}


@pytest.mark.usefixtures("quick")
def test_all_runs_are_done_by_one_worker_in_the_order_of_the_study(tmp_path: Path) -> None:
    outcome, shown = run_here(write_study(tmp_path, named("b", "a")), tmp_path / "out")
    assert (outcome.finished, outcome.failed, outcome.left) == (4, {}, 0)
    assert len({record["pid"] for record in records(tmp_path / "out").values()}) == 1
    rows = [(result.optimizer, result.seed) for result in read_results(tmp_path / "out")]
    assert rows == [("b", 1), ("b", 2), ("a", 1), ("a", 2)]
    assert "finished  small-1.536k-a/seed-2" in shown
    assert "[4/4]" in shown


@pytest.mark.usefixtures("quick")
def test_a_finished_run_is_never_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = write_study(tmp_path, named("a", "fails"))
    outcome, _ = run_here(study, tmp_path / "out")
    assert outcome.finished == 2
    before = records(tmp_path / "out")
    outcome, _ = run_here(study, tmp_path / "out")
    assert (outcome.finished, outcome.failed) == (4, {})
    after = records(tmp_path / "out")
    assert [label for label in after if before[label] != after[label]] == [
        "small-1.536k-fails/seed-1",
        "small-1.536k-fails/seed-2",
    ]
    monkeypatch.setattr(runner, "LocalLauncher", lambda *_: pytest.fail("a worker was started"))
    assert run_here(study, tmp_path / "out")[0].finished == 4


@pytest.mark.usefixtures("quick")
def test_a_run_that_finishes_after_a_failure_has_no_error_file(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, named("a", "fails")), tmp_path / "out"
    run_here(study, out)
    assert len(list(out.glob("runs/*/*/error.txt"))) == 2
    run_here(study, out)
    assert list(out.glob("runs/*/*/error.txt")) == []
    # From a process that died after writing its result.
    (out / "runs" / "small-1.536k-a" / "seed-1" / "error.txt").write_text("its process was ended by SIGKILL\n")
    run_here(study, out)
    assert list(out.glob("runs/*/*/error.txt")) == []


@pytest.mark.usefixtures("quick")
def test_a_run_with_an_earlier_result_keeps_the_error_of_the_new_measurement(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, named("a")), tmp_path / "out"
    run_here(study, out)
    study.write_text(study.read_text() + '[evaluation]\nwordsim = "words"\n')
    error = out / "runs" / "small-1.536k-a" / "seed-1" / "error.txt"
    error.write_text("no words\n")
    loaded, cells = plan(study)
    StudyFolder(out).forget_errors(cells, loaded.evaluation)
    assert error.exists()


@pytest.mark.usefixtures("quick")
def test_a_lost_results_file_is_written_again(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    run_here(study, tmp_path / "out")
    before = (tmp_path / "out" / "results.jsonl").read_text()
    (tmp_path / "out" / "results.jsonl").write_text("half a ro")
    run_here(study, tmp_path / "out")
    assert (tmp_path / "out" / "results.jsonl").read_text() == before


@pytest.mark.usefixtures("quick")
def test_a_run_whose_result_is_damaged_or_of_other_settings_is_done_again(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    run_here(study, tmp_path / "out")
    first, second = sorted(tmp_path.glob("out/runs/*/*/evaluation.json"))
    first.write_text(first.read_text()[:50])
    second.write_text(json.dumps({**json.loads(second.read_text()), "config_hash": "0" * 12}))
    before = records(tmp_path / "out")
    assert run_here(study, tmp_path / "out")[0].finished == 2
    assert all(record != before[label] for label, record in records(tmp_path / "out").items())


@pytest.mark.usefixtures("quick")
def test_newly_requested_metrics_are_measured_afterwards(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    run_here(study, tmp_path / "out")
    study.write_text(study.read_text() + '[evaluation]\nwordsim = "words"\n')
    before = records(tmp_path / "out")
    run_here(study, tmp_path / "out")
    assert all(record["at"] > before[label]["at"] for label, record in records(tmp_path / "out").items())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dies", r".*\bSIGKILL\b.*"),
        ("exits", ".*exit code 3: no room left"),
        ("fails", "the loss is nan"),
        ("crashes", "RuntimeError: no"),
    ],
)
def test_a_run_that_fails_or_kills_its_process_is_reported_and_the_others_continue(
    tmp_path: Path, kind: str, reason: str
) -> None:
    study = write_study(tmp_path, named("a", kind, "b"))
    outcome, shown = run_here(study, tmp_path / "out")
    failed = [f"small-1.536k-{kind}/seed-{seed}" for seed in (1, 2)]
    assert outcome.finished == 4
    assert list(outcome.failed) == failed
    assert all(re.fullmatch(reason, each) for each in outcome.failed.values()), outcome.failed
    assert shown.count(f"failed    small-1.536k-{kind}") == 2
    folder, (loaded, cells) = StudyFolder(tmp_path / "out"), plan(study)
    statuses = {cell.label: folder.status(cell, loaded.evaluation) for cell in cells}
    assert [label for label, status in statuses.items() if status == "failed"] == failed
    assert read_error(tmp_path / "out" / "runs" / failed[0]) == outcome.failed[failed[0]]
    assert run_here(study, tmp_path / "out")[0].finished == 6


REAL_CRASH = """
from coupled_adam.study import worker
from coupled_adam.training import run

train = run.run_training

def run_training(config, folder, **options):
    if "raises" in str(folder):
        raise RuntimeError("CUDA out of memory")
    return train(config, folder, **options)

run.run_training = run_training
worker.main()
"""


def test_an_unexpected_error_fails_only_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "WORKER", (sys.executable, "-c", REAL_CRASH))
    study = write_study(tmp_path, named("raises", "a")).rename(tmp_path / "mine.toml")
    study.write_text(study.read_text().replace("seeds = [1, 2]", "seeds = 1"))
    outcome, _ = run_here(study, tmp_path / "out")
    assert outcome.failed == {"small-1.536k-raises/seed-1": "RuntimeError: CUDA out of memory"}
    assert outcome.finished == 1
    error = (tmp_path / "out" / "runs" / "small-1.536k-raises" / "seed-1" / "error.txt").read_text()
    assert "Traceback" in error


def test_a_worker_that_dies_before_creating_a_folder_fails_only_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "WORKER", (sys.executable, "-c", "input(); raise SystemExit('no room left')"))
    outcome, _ = run_here(write_study(tmp_path, named("a")), tmp_path / "out")
    assert len(outcome.failed) == 2
    assert all(reason.endswith("exit code 1: no room left") for reason in outcome.failed.values())


def test_a_worker_that_cannot_start_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "WORKER", (sys.executable, "-c", "raise SystemExit('no torch')"))
    launcher = launchers.LocalLauncher([dict(os.environ)])
    with pytest.raises(UserOSError, match="exit code 1: no torch"):
        launcher.wait(30.0)
    launcher.close()


FAMILY = """
import subprocess, sys
code = "import time; print('up', flush=True); time.sleep(100)"
rank = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
subprocess.run([sys.executable, "-c", rank, code], stdout=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the processes")
def test_a_killed_worker_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "WORKER", (sys.executable, "-c", FAMILY))
    worker = launchers.Worker(dict(os.environ))
    wait_until(lambda: os.fstat(worker.errors.fileno()).st_size > 0)
    below = launchers.processes_below(worker.process.pid)
    assert len(below) == 2
    worker.kill()
    worker.close()
    wait_until(lambda: not any(is_running(pid) for pid in below))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("quick")
def test_jobs_run_at_the_same_time_and_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_processes", lambda: 6)
    study = write_study(tmp_path, named("late"))
    started = time.monotonic()
    outcome, _ = run_here(study, tmp_path / "out", jobs=2)
    assert outcome.finished == 2
    found = list(records(tmp_path / "out").values())
    assert len({record["pid"] for record in found}) == 2
    assert abs(found[0]["at"] - found[1]["at"]) < 0.6, f"one after the other, in {time.monotonic() - started} s"
    assert [record["config"]["training"]["threads"] for record in found] == [3, 3]


@pytest.mark.usefixtures("quick")
def test_a_started_run_keeps_its_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_processes", lambda: 6)
    study = write_study(tmp_path, named("a"))
    begun = tmp_path / "out" / "runs" / "small-1.536k-a" / "seed-1"
    begun.mkdir(parents=True)
    (tmp_path / "out" / "study.toml").write_text(study.read_text())
    (tmp_path / "out" / "base.toml").write_text((tmp_path / "base.toml").read_text())
    (begun / "config.toml").write_text(
        (tmp_path / "base.toml")
        .read_text()
        .replace('threads = "none"', "threads = 5")
        .replace("lr = 0.01", "lr = 1e-3")
        .replace('embeddings = "coupled"', 'embeddings = "adamw"')
    )
    run_here(study, tmp_path / "out", jobs=2)
    threads = {
        label[-1]: record["config"]["training"]["threads"] for label, record in records(tmp_path / "out").items()
    }
    assert threads == {"1": 5, "2": 3}


@pytest.mark.usefixtures("quick")
def test_every_worker_has_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["4", "7"])
    run_here(write_study(tmp_path, named("late")), tmp_path / "out", jobs=None)
    found = list(records(tmp_path / "out").values())
    assert {record["gpus"] for record in found} == {"4", "7"}
    assert all(record["measure_energy"] for record in found)
    assert all(record["config"]["training"]["threads"] is None for record in found)


@pytest.mark.usefixtures("quick")
def test_a_single_worker_has_one_gpu_and_only_its_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["4", "7"])
    run_here(write_study(tmp_path, named("a")), tmp_path / "out", jobs=1)
    found = list(records(tmp_path / "out").values())
    assert [(record["gpus"], record["measure_energy"]) for record in found] == [("4", True)] * 2


@pytest.mark.usefixtures("quick")
def test_only_runs_that_match_the_pattern_are_run(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a", "b"))
    outcome, _ = run_here(study, tmp_path / "out", only=("*-b/seed-2",))
    assert (outcome.finished, list(records(tmp_path / "out"))) == (1, ["small-1.536k-b/seed-2"])


@pytest.mark.usefixtures("quick")
def test_a_signal_stops_the_runs_and_starts_no_more(tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_until(lambda: "small-1.536k-slow/seed-1" in records(tmp_path / "out"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started = time.monotonic()
    outcome, shown = run_here(write_study(tmp_path, named("a", "slow", "b")), tmp_path / "out")
    thread.join()
    assert time.monotonic() - started < 30
    assert (outcome.signal, outcome.finished, outcome.left) == ("SIGINT", 2, 4)
    assert "SIGINT: " in shown
    assert list(records(tmp_path / "out")) == [
        "small-1.536k-a/seed-1",
        "small-1.536k-a/seed-2",
        "small-1.536k-slow/seed-1",
    ]


@pytest.mark.usefixtures("quick")
def test_new_cells_are_added_and_changed_ones_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    run_here(study, tmp_path / "out")
    for path in tmp_path.glob("out/runs/*/*"):  # as written by a real worker
        cell = next(cell for cell in plan(study)[1] if cell.run == path.relative_to(tmp_path / "out"))
        write_config(path, cell)
    write_study(tmp_path, named("a", "b"))
    assert run_here(study, tmp_path / "out")[0].finished == 4
    study.write_text(study.read_text().replace('"optimizer.lr" = 1e-3', '"optimizer.lr" = 5e-3'))
    with pytest.raises(ValueError, match=r"(?s)out .*--out.*\nsmall-1\.536k-a/seed-1: optimizer\.lr") as caught:
        run_here(study, tmp_path / "out")
    assert "small-1.536k-b" not in str(caught.value)
    assert f"{tmp_path / 'out'}/runs/" in str(caught.value)


def write_config(run_folder: Path, cell: Any) -> None:
    from coupled_adam.config.run_config import to_toml

    (run_folder / "config.toml").write_text(to_toml(cell.config))


@pytest.mark.usefixtures("quick")
def test_a_folder_with_other_contents_is_refused(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    with pytest.raises(ValueError, match=f"^{tmp_path / 'full'} .*--out"):
        run_here(study, tmp_path / "full")
    run_here(study, tmp_path / "out")
    study.write_text(study.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(ValueError, match=f"^{tmp_path / 'out'} .*'small'.*'other'.*--out"):
        run_here(study, tmp_path / "out")


@pytest.mark.usefixtures("quick")
def test_a_study_killed_while_writing_its_file_starts_again(tmp_path: Path) -> None:
    study, out = write_study(tmp_path, named("a")), tmp_path / "out"
    out.mkdir()
    old, young = out / ".study.toml.1.tmp", out / ".results.jsonl.2.tmp"
    for path in (old, young, out / "base-1.toml"):
        path.write_text("na")
    os.utime(old, (0, 0))
    assert run_here(study, out)[0].finished == 2
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.usefixtures("quick")
def test_runs_removed_from_the_study_are_removed_from_its_results(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a", "b"))
    run_here(study, tmp_path / "out")
    study.write_text(study.read_text().replace("seeds = [1, 2]", "seeds = [2, 3]"))
    run_here(study, tmp_path / "out")
    found = [(result.optimizer, result.seed) for result in read_results(tmp_path / "out")]
    assert found == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    left = StudyFolder(tmp_path / "out").outside(plan(study)[1])
    assert left == ["small-1.536k-a/seed-1", "small-1.536k-b/seed-1"]


@pytest.mark.usefixtures("quick")
def test_a_killed_run_resumes_from_its_checkpoint_and_not_from_its_last_row(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    (cell, _), folder = plan(study)[1], tmp_path / "out" / "runs" / "small-1.536k-a" / "seed-1"
    (folder / "checkpoints" / "step-000000004").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 9, "loss": 3.0}\n')
    run = Running.begin(cell, folder, 0.0)
    run.look()
    assert (run.start_step, run.step, run.loss) == (4, 4, None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "loss": 2.5}\n')
    run.look()
    assert (run.start_step, run.step, run.loss) == (4, 5, 2.5)


def test_old_rows_belong_to_the_test_split(tmp_path: Path) -> None:
    study, (cell, _) = plan(write_study(tmp_path, named("a")))
    result = result_of(Task(tmp_path, study.name, cell, study.evaluation))
    assert from_json(to_json(replace(result, loss_split="val")), tmp_path, "row").loss_split == "val"
    values = json.loads(to_json(result))
    assert values.pop("loss_split") == "test"
    assert from_json(json.dumps(values), tmp_path, "row").loss_split == "test"


@pytest.mark.usefixtures("quick")
def test_the_folder_contains_everything_needed_to_repeat_the_study(tmp_path: Path) -> None:
    study = write_study(tmp_path, named("a"))
    run_here(study, tmp_path / "out")
    before = [(cell.label, cell.config_hash) for cell in plan(study)[1]]
    study.unlink()
    (tmp_path / "base.toml").unlink()
    assert [(cell.label, cell.config_hash) for cell in plan(tmp_path / "out")[1]] == before
    outcome, _ = run_here(tmp_path / "out", tmp_path / "out")
    assert outcome.finished == 2


def test_the_corpus_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    study = load_study(str(write_study(tmp_path, named("a"))))
    corpora = runner.prepare_data(cells_of(study, parse_settings(["data.folder=~/corpus"], Config)), print)
    assert {name: corpus.folder for name, corpus in corpora.items()} == {"~/corpus": tmp_path / "corpus"}


def test_a_run_that_another_process_works_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_cell, "SECONDS_FOR_ANOTHER", 0.0)
    study, cells = plan(write_study(tmp_path, named("a")))
    task = Task(tmp_path / "out", study.name, cells[0], study.evaluation)
    task.folder.mkdir(parents=True)
    assert not is_claimed(task.folder)
    with locked(task.folder / CLAIM):
        assert is_claimed(task.folder)
        assert run_cell(task)[0] == "busy"
    assert not (task.folder / "metrics.jsonl").exists()
    assert not is_claimed(task.folder)


def test_a_job_does_not_repeat_a_finished_run(tmp_path: Path) -> None:
    study, cells = plan(write_study(tmp_path, named("a")))
    task = Task(tmp_path / "out", study.name, cells[0], study.evaluation)
    task.folder.mkdir(parents=True)
    write_evaluation(result_of(task))
    assert run_cell(task) == ("finished", "")
    assert not (task.folder / "checkpoints").exists()


def test_energy_is_the_power_of_the_used_gpus_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        "if '--query-gpu=index' in sys.argv: print('0\\n1'); sys.exit()\n"
        "assert '--id=0,1' in sys.argv\n"
        "while True: print('0, 100.0\\n1, 50.0\\n2, [N/A]', flush=True); time.sleep(0.05)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    with EnergyMeter(visible_gpus()) as meter:
        wait_until(lambda: meter.joules is not None)
        before, started = meter.joules, time.monotonic()
        time.sleep(1.0)
        used, seconds = meter.joules - before, time.monotonic() - started
    assert used / seconds == pytest.approx(150, rel=0.3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-12")
    assert visible_gpus() == ["3", "GPU-12"]
    with EnergyMeter([]) as meter:
        assert meter.joules is None


def test_without_nvidia_smi_there_are_no_gpus_and_no_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == []
    with EnergyMeter(["0"]) as meter:
        assert meter.joules is None


def test_a_worker_without_its_runner_saves_and_ends(tmp_path: Path) -> None:
    study, cells = plan(
        write_study(tmp_path, ADAMW, steps=10**6, training={"threads": 1}, checkpoints={"every": 10**6})
    )
    task = Task(tmp_path / "out", study.name, cells[0], study.evaluation)
    worker = launchers.Worker(dict(os.environ))
    worker.begin(task)
    wait_until(lambda: last_row(task.folder) is not None)
    worker.close()  # its standard input is closed, as when the runner is killed
    assert worker.process.returncode == 0
    (checkpoint,) = task.folder.glob("checkpoints/step-*")
    assert int(checkpoint.name.removeprefix("step-")) > 0
    assert not (task.folder / "evaluation.json").exists()


OPTIMIZERS = ADAMW + COUPLED + UNTIED + BROKEN
STEPS = 80


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A study with real runs, two at a time, one of which fails: its file, its folder and its output."""
    folder = tmp_path_factory.mktemp("study")
    study = write_study(
        folder, OPTIMIZERS, steps=STEPS, training={"threads": 1}, checkpoints={"every": 10}, log={"every": 5}
    )
    study.write_text(study.read_text().replace("seeds = [1, 2]", "seeds = 1"))
    process = start_command("run", str(study), "--out", "out", "--jobs", "2", cwd=folder)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 1, printed
    return study, folder / "out", printed


def test_real_runs_are_trained_and_measured_and_the_broken_one_is_reported(undisturbed: tuple[Path, Path, str]) -> None:
    study, out, printed = undisturbed
    assert re.search(r"small-10\.24k-broken/seed-1: step \d+: .*(nan|inf)", printed)
    assert re.search(rf"1 run .*: coupled-adam study run {study} --out out --jobs 2", printed), printed
    assert "Report: out/report.html" in printed
    assert [result.optimizer for result in read_results(out)] == ["standard", "coupled", "untied"]
    folder, (loaded, cells) = StudyFolder(out), plan(study)
    assert [folder.status(cell, loaded.evaluation) for cell in cells] == ["finished"] * 3 + ["failed"]
    assert re.search(r"^step \d+: .*(nan|inf).*optimizer\.lr", read_error(folder.run(cells[3])))
    for result in read_results(out):
        assert result.run_folder == out / result.run
        assert 0 < result.metrics["loss"] < np.log(64)
        assert result.metrics["loss"] == pytest.approx(result.metrics["val_loss"], abs=0.5)
        assert {"iso", "mu_norm_ratio", "rho_log", "kappa", "iso_score", "loss_standard_error"} <= result.metrics.keys()
        assert ("input_iso" in result.metrics) == (result.optimizer == "untied")
        assert result.settings["tied"] == (result.optimizer != "untied")
        assert "r_cos" not in result.metrics
        assert result.tokens == STEPS * 8 * 16
        assert result.energy_joules is None
        assert result.loss_split == "test"
        assert result.torch == torch.__version__


def test_a_loss_of_the_validation_split_is_labelled(
    undisturbed: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = read_results(undisturbed[1])[0]
    monkeypatch.setattr(measurement, "pick_split", lambda corpus: ("val", "no test split"))
    measured = measurement.measure_run(result.run_folder, EvaluationSection(measures=False))
    assert (measured.loss_split, measured.notes) == ("val", ["no test split"])
    assert measured.metrics["loss"] != result.metrics["loss"]


def test_the_last_metrics_of_the_training_equal_the_result(undisturbed: tuple[Path, Path, str]) -> None:
    for result in read_results(undisturbed[1]):
        row = last_row(result.run_folder, "embeddings")
        assert row is not None
        for name in ("iso", "mu_norm_ratio", "kappa", "rho_log"):
            assert result.metrics[name] == pytest.approx(row[name], rel=1e-6)


def test_arrays_show_the_same_rows_before_and_after(undisturbed: tuple[Path, Path, str]) -> None:
    for result in read_results(undisturbed[1]):
        arrays = np.load(result.run_folder / "embeddings.npz")
        model, config, corpus = load_run(result.run_folder)
        assert corpus is not None
        start = build_model(config.to_model_config())
        initialise(start, config.seed)
        for prefix, name in (("", model.output_table_name), ("input_", model.input_table_name)):
            if prefix and result.optimizer != "untied":
                assert not any(key.startswith("input_") for key in arrays)
                continue
            V = corpus.vocabulary_size
            final, initial = (each.get_parameter(name).detach()[:V].double().numpy() for each in (model, start))
            mean = final.mean(0)
            np.testing.assert_allclose(arrays[f"{prefix}mean_final"], [np.linalg.norm(mean), 0, 0], atol=1e-5)
            direction = mean / np.linalg.norm(mean)
            for cloud, table in (("cloud_final", final), ("cloud_initial", initial)):
                places = arrays[f"{prefix}{cloud}"]
                assert places.shape == (V, 3)
                np.testing.assert_allclose(places[:, 0], table @ direction, atol=1e-5)
                assert (np.linalg.norm(places, axis=1) <= np.linalg.norm(table, axis=1) + 1e-5).all()
            np.testing.assert_allclose(
                arrays[f"{prefix}singular_values"], np.linalg.svd(final, compute_uv=False), rtol=1e-4
            )
            counts = corpus.unigram()
            seen = counts > 0
            np.testing.assert_allclose(arrays[f"{prefix}norm"], np.linalg.norm(final[seen], axis=1), rtol=1e-5)
            np.testing.assert_allclose(
                arrays[f"{prefix}log10_frequency"], np.log10(counts[seen] / counts.sum()), rtol=1e-5
            )
            assert arrays[f"{prefix}token_count"] == counts.sum()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the workers")
def test_a_study_killed_repeatedly_ends_with_the_same_results(undisturbed: tuple[Path, Path, str]) -> None:
    study, out, _ = undisturbed
    again = out.with_name("disturbed")
    command = ("run", str(study), "--out", "disturbed", "--only", "*-coupled", "--only", "*-untied", "--jobs", "1")
    moments = np.random.default_rng(0)

    def wait_for_a_step() -> None:
        before = {path: path.stat().st_mtime for path in again.glob("runs/*/*/metrics.jsonl")}
        wait_until(lambda: {path: path.stat().st_mtime for path in again.glob("runs/*/*/metrics.jsonl")} != before)
        time.sleep(moments.uniform(0, 0.5))

    process = start_command(*command, cwd=out.parent, program=SLOW_COMMAND)
    wait_for_a_step()
    kill_all(process)

    process = start_command(*command, cwd=out.parent, program=SLOW_COMMAND)
    wait_for_a_step()
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    if process.returncode != 0:  # otherwise it finished first
        assert process.returncode == 130, printed
        assert re.search(r"SIGINT: \d runs .*: coupled-adam study run ", printed), printed

    process = start_command(*command, cwd=out.parent, program=SLOW_COMMAND)
    wait_until(lambda: children_of(process) or process.poll() is not None)
    time.sleep(moments.uniform(0, 3))
    process.kill()  # only the runner: its worker saves and ends by itself, while the next one starts
    process.communicate()

    process = start_command(*command, cwd=out.parent)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode == 0, printed
    expected = [result for result in read_results(out) if result.optimizer in ("coupled", "untied")]
    assert comparable(read_results(again)) == comparable(expected)
    for result, other in zip(read_results(again), expected, strict=True):
        for name, array in np.load(result.run_folder / "embeddings.npz").items():
            np.testing.assert_array_equal(array, np.load(other.run_folder / "embeddings.npz")[name])
    merged = merge_results([out, again])
    assert [result.optimizer for result in merged] == ["standard", "coupled", "untied"]
    assert all(result.folder == out for result in merged)


def test_submitit_starts_runs_without_a_cluster(undisturbed: tuple[Path, Path, str]) -> None:
    pytest.importorskip("submitit")
    study, out, _ = undisturbed
    outcome, shown = run_here(study, out.with_name("jobs"), only=("*-coupled", "*-broken"), launcher="slurm", jobs=None)
    assert outcome.finished == 1
    assert list(outcome.failed) == ["small-10.24k-broken/seed-1"]
    (expected,) = (result for result in read_results(out) if result.optimizer == "coupled")
    assert comparable(read_results(out.with_name("jobs"))) == comparable([expected])
    assert "finished  small-10.24k-coupled/seed-1" in shown
    files = list(out.with_name("jobs").glob("jobs/**/*"))
    assert len([path for path in files if path.name.endswith("_submitted.pkl")]) == 2
    assert not [path for path in files if "%" in path.name]


def test_torchrun_trains_on_two_ranks(undisturbed: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    study, out, _ = undisturbed
    monkeypatch.setattr(runner, "visible_gpus", list)
    monkeypatch.setattr(runner, "available_processes", lambda: 2)
    outcome, _ = run_here(study, out.with_name("ranks"), only=("*-standard",), launcher="torchrun")
    assert outcome.finished == 1, outcome
    (result,) = read_results(out.with_name("ranks"))
    assert json.loads((result.run_folder / "run.json").read_text())["ranks"] == 2
    assert load_config(str(result.run_folder)).training.threads == 1
    (expected,) = (result for result in read_results(out) if result.optimizer == "standard")
    assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.02)
