"""A complete run in one process: its files, stopping and resuming."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import fill_disk
from small_runs import VOCABULARY, assert_same_tensors, rows, saved_tensors, small_config, train, write_corpus
from torch import Tensor

from coupled_adam.config.run_config import load_config
from coupled_adam.embeddings import measure
from coupled_adam.metrics import METRICS, TABLE_METRICS
from coupled_adam.tables_file import TABLES_FILE
from coupled_adam.training import trainer
from coupled_adam.training.rank_batches import MicroBatch, RankBatches
from coupled_adam.training.trackers import numbers
from coupled_adam.training.trainer import TrainingStopped


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Send this process a signal while it takes a step."""
    read = RankBatches.micro_batches

    def micro_batches(self: RankBatches, asked: int) -> list[MicroBatch]:
        if asked == step:
            os.kill(os.getpid(), number)
        return read(self, asked)

    monkeypatch.setattr(RankBatches, "micro_batches", micro_batches)


def test_a_run_writes_its_config_its_metrics_and_checkpoints(whole_run: Path, corpus: Path) -> None:
    assert load_config(str(whole_run)) == small_config(corpus)
    kept = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert kept == ["step-000000008", "step-000000012"]
    state = json.loads((whole_run / "run.json").read_text())
    assert (state["status"], state["step"], state["total_steps"]) == ("finished", 12, 12)
    kinds = [(row["kind"], row["step"]) for row in rows(whole_run)]
    assert [step for kind, step in kinds if kind == "train"] == list(range(1, 13))
    assert [step for kind, step in kinds if kind == "embeddings"] == [3, 6, 9, 12]
    assert [step for kind, step in kinds if kind == "val"] == [12]


@pytest.fixture
def reads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read values from the CPU a step later, as from a GPU."""
    monkeypatch.setattr(trainer, "READ_LATER", frozenset({"cpu"}))


@pytest.mark.usefixtures("reads_later")
def test_values_read_a_step_later_are_logged_in_the_same_order(whole_run: Path, corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus), tmp_path / "run")
    assert rows(tmp_path / "run") == rows(whole_run)


@pytest.mark.usefixtures("reads_later")
def test_values_read_a_step_later_are_shown_with_their_own_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {}
    update = trainer.TrainingDisplay.update

    def remember(self: trainer.TrainingDisplay, step: int, values: Any = None) -> None:
        if values is not None and "loss" in values:
            shown[step] = values["loss"]
        update(self, step, values)

    monkeypatch.setattr(trainer.TrainingDisplay, "update", remember)
    train(small_config(corpus, log={"every": 2, "monitor_every": 100}), tmp_path / "run")
    assert shown == {row["step"]: row["loss"] for row in rows(tmp_path / "run") if row["kind"] == "train"}


@pytest.mark.usefixtures("reads_later")
def test_a_stopped_run_logs_values_that_were_not_read_yet(
    whole_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(6, monkeypatch)
    train(small_config(corpus), tmp_path / "run")
    assert rows(tmp_path / "run") == [row for row in rows(whole_run) if row["step"] <= 7]


def test_the_model_learns(whole_run: Path) -> None:
    losses = [row["loss"] for row in rows(whole_run) if row["kind"] == "train"]
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 0.15


def test_the_logged_learning_rate_follows_the_schedule(whole_run: Path, corpus: Path) -> None:
    config = small_config(corpus)
    logged = [row["lr"] for row in rows(whole_run) if row["kind"] == "train"]
    assert logged == [config.learning_rate(step) for step in range(12)]


def test_the_monitor_agrees_with_inspect(whole_run: Path) -> None:
    from safetensors.torch import load_file

    table = load_file(whole_run / "checkpoints" / "step-000000012" / TABLES_FILE)["wte.weight"]
    measured = measure(table[:VOCABULARY])
    last = [row for row in rows(whole_run) if row["kind"] == "embeddings"][-1]
    assert last["mu_norm_ratio"] == pytest.approx(measured.mu_norm_ratio, rel=1e-6)
    assert last["iso"] == pytest.approx(measured.iso, rel=1e-6)


def test_a_metric_has_one_key_in_rows_trackers_and_the_outcome(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model={"tied": False})
    outcome, _ = train(config, tmp_path / "run")
    of_tables = {prefix + metric.key for metric in TABLE_METRICS for prefix in ("", "input_")}
    last = [row for row in rows(tmp_path / "run") if row["kind"] == "embeddings"][-1]
    counts = {f"{prefix}{name}" for name in ("zero_rows", "unseen_rows") for prefix in ("", "input_")}
    assert last.keys() - {"kind", "step"} == of_tables | counts
    assert {tag.removeprefix("embeddings/") for tag in numbers("embeddings", last)} <= of_tables | counts | {"step"}
    assert outcome.values.keys() - counts <= METRICS.keys()
    logged = {row["kind"]: row for row in rows(tmp_path / "run")}
    for kind in ("train", "val"):
        assert outcome.values[f"{kind}_loss"] == logged[kind]["loss"]
    assert outcome.values["input_mu_norm_ratio"] == last["input_mu_norm_ratio"]


def test_the_same_config_gives_a_bitwise_equal_run(whole_run: Path, corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus), tmp_path / "again")
    assert rows(tmp_path / "again") == rows(whole_run)
    assert_same_tensors(saved_tensors(tmp_path / "again"), saved_tensors(whole_run))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run_and_the_resumed_run_is_bitwise_equal(
    number: int, whole_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(5, patch, number)
        outcome, _ = train(small_config(corpus), folder)
    assert (outcome.step, outcome.is_finished) == (6, False)
    assert outcome.signal == signal.Signals(number).name
    assert json.loads((folder / "run.json").read_text())["status"] == "stopped"

    outcome, shown = train(small_config(corpus), folder, resume=True)
    assert outcome.is_finished
    assert "step-000000006" in shown
    assert rows(folder) == rows(whole_run)
    assert_same_tensors(saved_tensors(folder), saved_tensors(whole_run))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"embeddings": "adamw"},
        {"embeddings": "sgd", "sgd_factor": 20.0},
        {"embeddings": "coupled", "scale_exponent": 2.0},
        {"embeddings": "adamw", "centre": True},
    ],
    ids=lambda optimizer: "-".join(map(str, optimizer.values())),
)
def test_every_optimizer_resumes_bitwise_equally(
    optimizer: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(corpus, optimizer=optimizer)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert_same_tensors(saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole"))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("couple", ["output", "input", "all"])
def test_untied_models_train_with_either_table_coupled(
    architecture: str, couple: str, corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model={"architecture": architecture, "tied": False}, optimizer={"couple": couple})
    train(config, tmp_path / "run")
    name = "wte" if architecture == "gpt2" else "embed_tokens"
    tensors = saved_tensors(tmp_path / "run")
    coupled = {
        "output": tensors["optimizer.lm_head.weight.exp_avg_sq"].shape[0] == 1,
        "input": tensors[f"optimizer.{name}.weight.exp_avg_sq"].shape[0] == 1,
    }
    assert coupled == {"output": couple in ("output", "all"), "input": couple in ("input", "all")}
    last = rows(tmp_path / "run")[-2]
    assert {"mu_norm_ratio", "input_mu_norm_ratio"} <= last.keys()


def test_accumulated_gradients_give_the_same_run_up_to_rounding(whole_run: Path, corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, training={"micro_batch_size": 2}), tmp_path / "run")
    for ours, reference in zip(rows(tmp_path / "run"), rows(whole_run), strict=True):
        if ours["kind"] == "train":
            assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4)


def test_milestones_are_never_deleted(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, checkpoints={"every": 1, "keep": 1, "milestones": 4})
    train(config, tmp_path / "run")
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [3, 6, 9, 12]


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    whole_run: Path, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-000000012"
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    outcome, shown = train(small_config(corpus), tmp_path / "run", resume=True)
    assert outcome.is_finished
    assert re.search(rf"step-000000012 .*{largest.name}.*\n(.*\n)*.*step-000000008", shown), shown
    assert_same_tensors(saved_tensors(tmp_path / "run"), saved_tensors(whole_run))


def test_resuming_a_finished_run_changes_nothing(whole_run: Path, corpus: Path) -> None:
    before = rows(whole_run), saved_tensors(whole_run)
    outcome, _ = train(small_config(corpus), whole_run, resume=True)
    assert outcome.is_finished
    assert rows(whole_run) == before[0]
    assert_same_tensors(saved_tensors(whole_run), before[1])


def test_resuming_without_a_checkpoint_starts_from_step_0_with_a_note(corpus: Path, tmp_path: Path) -> None:
    outcome, shown = train(small_config(corpus), tmp_path / "run", resume=True)
    assert outcome.is_finished
    assert str(tmp_path / "run" / "checkpoints") in shown


@pytest.mark.parametrize("read_later", [{"cuda"}, {"cpu"}])
def test_a_loss_that_is_not_finite_stops_the_run_with_step_checkpoint_and_advice(
    read_later: set[str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "READ_LATER", read_later)
    from coupled_adam.training.train_step import TrainStep

    call = TrainStep.__call__
    steps = iter(range(1, 100))

    def spoiled(self: TrainStep, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, norm = call(self, *arguments)
        return (loss * float("nan") if next(steps) == 7 else loss), norm

    monkeypatch.setattr(TrainStep, "__call__", spoiled)
    config = small_config(corpus, log={"every": 5})
    with pytest.raises(TrainingStopped, match=r"^step 7: .*\bloss .*\bnan\b.*step-000000004\. .*optimizer\.lr"):
        train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-000000004"]  # the state after the bad step is not saved


def test_a_real_divergence_is_detected(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, optimizer={"lr": 1e30, "max_grad_norm": 0.0})
    with pytest.raises(TrainingStopped, match=r"^step \d+: .*(loss|norm) .*\b(nan|inf)\b"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize("every", [1, 100], ids=["seen_when_logging", "seen_when_saving_again"])
def test_a_full_disk_is_reported_and_does_not_end_the_run(
    every: int, whole_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coupled_adam.training.train_step import TrainStep

    is_full = threading.Event()
    call, steps = TrainStep.__call__, iter(range(1, 100))

    def full_at_4(path: Path) -> bool:
        if "step-000000004" in str(path):
            is_full.set()
            return True
        return False

    def wait_for_the_failure(self: TrainStep, *arguments: Any) -> tuple[Tensor, Tensor]:
        if next(steps) == 5:
            assert is_full.wait(20)
            time.sleep(0.2)  # until the writing thread has ended
        return call(self, *arguments)

    monkeypatch.setattr(TrainStep, "__call__", wait_for_the_failure)
    fill_disk(monkeypatch, full_at_4)
    outcome, shown = train(small_config(corpus, log={"every": every}), tmp_path / "run")
    assert outcome.is_finished
    (said,) = (line for line in shown.splitlines() if os.strerror(errno.ENOSPC) in line)
    assert "step 4" in said
    assert not (tmp_path / "run" / "checkpoints" / "step-000000004").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-000000008").is_dir()
    assert_same_tensors(saved_tensors(tmp_path / "run"), saved_tensors(whole_run))


def test_a_run_waits_for_a_full_disk_at_the_end(
    whole_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = iter((True, True))
    fill_disk(monkeypatch, lambda path: "step-000000012" in str(path) and next(attempts, False))
    monkeypatch.setattr(trainer, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
    outcome, shown = train(small_config(corpus), tmp_path / "run")
    assert outcome.is_finished
    said = [line for line in shown.splitlines() if os.strerror(errno.ENOSPC) in line]
    assert len(said) == 2
    assert all("step 12" in line for line in said)
    assert_same_tensors(saved_tensors(tmp_path / "run"), saved_tensors(whole_run))


def test_a_run_is_resumed_only_with_its_own_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus", seed=1)
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        train(small_config(corpus), tmp_path / "run")
    write_corpus(corpus, seed=2)  # as many tokens as before, and a manifest without hashes
    with pytest.raises(ValueError, match=r"step-000000006 .*\bdata\.folder\b"):
        train(small_config(corpus), tmp_path / "run", resume=True)
    write_corpus(corpus, seed=1)
    outcome, _ = train(small_config(corpus), tmp_path / "run", resume=True)
    assert outcome.is_finished


def test_inspect_finds_the_token_counts_of_a_run(whole_run: Path, corpus: Path) -> None:
    from coupled_adam.inspection.model_inspection import Request, inspect_models, json_object

    models = inspect_models([str(whole_run)], Request(), lambda *_: None)
    measured = json.dumps(json_object(models))
    last = [row for row in rows(whole_run) if row["kind"] == "embeddings"][-1]
    assert f"{last['rho_log']:.6f}"[:8] in measured
