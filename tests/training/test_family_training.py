"""Runs with members of the family of second moments: updates, annealing, resuming, old checkpoints."""

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import VOCABULARY, assert_same_tensors, rows, saved_tensors, small_config, train
from torch import Tensor

from coupled_adam.config.run_config import load_config
from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.optimizer.reference import reference_init, reference_step
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.rank_batches import MicroBatch, RankBatches
from coupled_adam.training.train_step import TrainStep

PARTIAL = {"row_exponent": 0.25, "mean_free": True}
ANNEALED = {"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": 8, "mean_free": True}
FROM_ZERO = {"row_exponent": 0.5, "row_exponent_start": 0.0, "anneal": "50%"}
TABLE = "wte.weight"
V, H, REAL = 40, 8, 37


def stopped_and_resumed(
    corpus: Path, folder: Path, step: int, monkeypatch: pytest.MonkeyPatch, **sections: Any
) -> None:
    """A run that gets a signal before a step, and is resumed."""
    read = RankBatches.micro_batches

    def micro_batches(self: RankBatches, asked: int) -> list[MicroBatch]:
        if asked == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, asked)

    with monkeypatch.context() as patched:
        patched.setattr(RankBatches, "micro_batches", micro_batches)
        outcome, _ = train(small_config(corpus, **sections), folder)
        assert not outcome.is_finished
    outcome, _ = train(small_config(corpus, **sections), folder, resume=True)
    assert outcome.is_finished


def assert_resumes_bitwise(
    optimizer: dict[str, Any], corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Compare an interrupted and resumed run with an undisturbed one, and return the saved tensors of both."""
    train(small_config(corpus, optimizer=optimizer), folder / "whole")
    stopped_and_resumed(corpus, folder / "resumed", 5, monkeypatch, optimizer=optimizer)
    assert rows(folder / "resumed") == rows(folder / "whole")
    saved = saved_tensors(folder / "whole")
    assert_same_tensors(saved_tensors(folder / "resumed"), saved)
    return saved


@pytest.mark.parametrize(
    "optimizer",
    [
        PARTIAL,
        ANNEALED,
        FROM_ZERO,
        {"column_exponent": 0.0},
        {"mean_free": True},
        {**PARTIAL, "tables": {"beta1": 0.0, "beta2": 0.99}},
    ],
)
def test_resumed_run_is_bitwise_equal(
    optimizer: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumes_bitwise(optimizer, corpus, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, False),
        ({"mean_free": True}, False),
        (PARTIAL, True),
        (FROM_ZERO, True),
        ({"row_exponent": 0.0, "row_exponent_start": 0.5, "anneal": 5}, True),
    ],
)
def test_rows_have_their_own_state_only_if_they_need_it(
    optimizer: dict[str, Any], expected: bool, corpus: Path, tmp_path: Path
) -> None:
    train(small_config(corpus, optimizer=optimizer), tmp_path / "run")
    for step in (8, 12):
        found = {name for name in saved_tensors(tmp_path / "run", step) if "row_avg_sq" in name}
        assert found == ({f"optimizer.{TABLE}.row_avg_sq"} if expected else set())


def test_annealed_exponent_is_logged_and_a_constant_one_is_not(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, optimizer=ANNEALED), tmp_path / "annealed")
    logged = [row["row_exponent"] for row in rows(tmp_path / "annealed") if row["kind"] == "train"]
    assert logged == pytest.approx([max(1.0 - 0.75 * step / 8, 0.25) for step in range(12)])
    train(small_config(corpus, optimizer=PARTIAL), tmp_path / "constant")
    assert not any("row_exponent" in row for row in rows(tmp_path / "constant"))


def test_annealing_in_one_step_equals_the_constant_exponent_from_the_second_step(corpus: Path, tmp_path: Path) -> None:
    """Two runs with the same first step: later they could only differ in the exponent."""
    one = {**ANNEALED, "row_exponent_start": 0.5, "anneal": 1}
    train(small_config(corpus, optimizer=one, schedule={"warmup": 2}), tmp_path / "one")
    train(small_config(corpus, optimizer=PARTIAL, schedule={"warmup": 2}), tmp_path / "constant")
    # The first step has a learning rate of zero, so both runs are equal.
    losses = [[row["loss"] for row in rows(tmp_path / name) if row["kind"] == "train"] for name in ("one", "constant")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_mean_free_updates_do_not_move_the_mean_of_the_real_rows(corpus: Path, tmp_path: Path) -> None:
    for name, mean_free in (("free", True), ("plain", False)):
        train(small_config(corpus, optimizer={"row_exponent": 0.25, "mean_free": mean_free}), tmp_path / name)
    means = {
        (name, step): saved_tensors(tmp_path / name, step)[f"model.{TABLE}"][:VOCABULARY].double().mean(dim=0)
        for name in ("free", "plain")
        for step in (8, 12)
    }
    assert (means["free", 12] - means["free", 8]).abs().max() < 1e-7
    assert (means["plain", 12] - means["plain", 8]).abs().max() > 1e-5


def section(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"lr": 1e-2, "eps": 1e-8, "max_grad_norm": 0.0, **values})


@pytest.mark.parametrize(
    "settings",
    [
        {"row_exponent": 0.25, "mean_free": True},
        {"row_exponent": 1.0},
        {"row_exponent": 1.0, "column_exponent": 0.0, "mean_free": True},
        {"column_exponent": 0.0, "scale_exponent": 1.0},
        {"mean_free": True},
    ],
)
def test_a_training_step_equals_the_literal_step_over_the_real_rows(settings: dict[str, Any]) -> None:
    model = build_model(ModelConfig("gpt2", layers=1, heads=2, width=H, context=16, vocabulary_size=V, tied=True))
    initialise(model, seed=3)
    optimizers = build_optimizers(model, section(**settings), vocabulary_size=REAL)
    table = model.get_parameter(TABLE)
    state = reference_init(table.detach().double())
    for step in range(4):
        tokens = torch.randint(0, REAL, (4, 17), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        assert table.grad is not None
        state = reference_step(
            state,
            table.grad.double(),
            lr=1e-2,
            betas=(0.9, 0.95),
            eps=1e-8,
            vocabulary_size=REAL,
            **settings,
        )
        optimizers.step()
    torch.testing.assert_close(table.detach().double(), state.embeddings, rtol=1e-4, atol=1e-6)


def test_padding_counts_for_coupled_adam_as_in_version_0_1_0() -> None:
    model = build_model(ModelConfig("gpt2", layers=1, heads=2, width=H, context=16, vocabulary_size=V, tied=True))
    sizes = {
        name: {
            group["vocabulary_size"]
            for group in build_optimizers(model, section(**settings), vocabulary_size=REAL).optimizers[0].param_groups
            if group["coupled"]
        }
        for name, settings in (("coupled", {}), ("scaled", {"scale_exponent": 2.0}), ("partial", PARTIAL))
    }
    assert sizes == {"coupled": {None}, "scaled": {None}, "partial": {REAL}}


def test_train_step_sets_the_exponent_in_place_like_the_learning_rate() -> None:
    model = build_model(ModelConfig("gpt2", layers=1, heads=2, width=H, context=16, vocabulary_size=V, tied=True))
    initialise(model, seed=3)
    optimizers = build_optimizers(model, section(**ANNEALED), vocabulary_size=REAL)
    [exponent] = [group["row_exponent"] for group in optimizers.optimizers[0].param_groups if group["coupled"]]
    assert isinstance(exponent, Tensor)
    step = TrainStep(model, optimizers, precision=nullcontext)
    tokens = torch.randint(0, REAL, (4, 17), generator=torch.Generator().manual_seed(0))
    for value in (1.0, 0.625, 0.25):
        step([(tokens[:, :-1], tokens[:, 1:])], 1e-3, value)
        assert float(exponent) == value
        [now] = [group["row_exponent"] for group in optimizers.optimizers[0].param_groups if group["coupled"]]
        assert now is exponent


def change_config(run: Path, **values: object) -> None:
    """Edit keys of [optimizer] in the config of a run folder, as a user would."""
    lines = (run / "config.toml").read_text().splitlines()
    for key, value in values.items():
        [number] = [n for n, line in enumerate(lines) if line.startswith(f"{key} = ")]
        lines[number] = f"{key} = {value}"
    (run / "config.toml").write_text("\n".join(lines) + "\n")


def test_a_checkpoint_without_row_moments_resumes_with_a_row_exponent(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(small_config(corpus, checkpoints={"every": 8, "keep": 2}), run)
    (last,) = (path for path in (run / "checkpoints").iterdir() if path.name.endswith("12"))
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink()
    last.rmdir()
    before = saved_tensors(run, 8)
    assert not any("row_avg_sq" in name for name in before)
    change_config(run, row_exponent=0.25)
    started: dict[str, Tensor] = {}
    take = TrainStep.__call__

    def first_step(self: TrainStep, *arguments: Any) -> tuple[Tensor, Tensor]:
        if not started:
            for group in self.optimizers.optimizers[0].param_groups:
                for p in group["params"] if group["coupled"] else []:
                    started.update({k: v.clone() for k, v in self.optimizers.optimizers[0].state[p].items()})
        return take(self, *arguments)

    monkeypatch.setattr(TrainStep, "__call__", first_step)
    outcome, shown = train(load_config(str(run)), run, resume=True)
    assert outcome.is_finished
    assert "row_avg_sq" in shown
    column = before[f"optimizer.{TABLE}.exp_avg_sq"]  # (1, H)
    assert torch.equal(started["exp_avg_sq"], column)
    expected = column.double().mean().float().expand(started["row_avg_sq"].shape)
    assert column.abs().max() > 0
    torch.testing.assert_close(started["row_avg_sq"], expected, rtol=1e-6, atol=0)
    assert any("row_avg_sq" in name for name in saved_tensors(run, 12))


def test_a_checkpoint_with_row_moments_resumes_as_coupled_adam(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_config(corpus, optimizer=PARTIAL, checkpoints={"every": 8, "keep": 2}), run)
    (last,) = (path for path in (run / "checkpoints").iterdir() if path.name.endswith("12"))
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink()
    last.rmdir()
    change_config(run, row_exponent=0.0, mean_free="false")
    outcome, _ = train(load_config(str(run)), run, resume=True)
    assert outcome.is_finished
    assert not any("row_avg_sq" in name for name in saved_tensors(run, 12))


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_beta1_of_the_table_may_change_on_resume(corpus: Path, tmp_path: Path, first: float) -> None:
    """A first moment that the run does not need is not read; one that the checkpoint lacks starts at 0."""
    run, moment = tmp_path / "run", f"optimizer.{TABLE}.exp_avg"
    tables = {"tables": {"beta1": first, "beta2": 0.99}}
    train(small_config(corpus, optimizer={**PARTIAL, **tables}, checkpoints={"every": 8, "keep": 2}), run)
    assert (moment in saved_tensors(run, 8)) == (first != 0)
    remove_checkpoint(run, 12)
    config = (run / "config.toml").read_text()
    own = config.index("[optimizer.tables]")
    changed = config[own:].replace(f"beta1 = {first}", f"beta1 = {0.9 - first}", 1)
    (run / "config.toml").write_text(config[:own] + changed)
    outcome, shown = train(load_config(str(run)), run, resume=True)
    assert outcome.is_finished
    assert (moment in saved_tensors(run, 12)) == (first == 0)
    assert ("first moments start at 0" in " ".join(shown.split())) == (first == 0)


def remove_checkpoint(run: Path, step: int) -> None:
    (last,) = (path for path in (run / "checkpoints").iterdir() if path.name.endswith(str(step)))
    shutil.rmtree(last)


def test_other_exponents_are_refused_on_resume(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, optimizer=PARTIAL), tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizer\.row_exponent = 0\.25, now 0\.5"):
        train(small_config(corpus, optimizer={**PARTIAL, "row_exponent": 0.5}), tmp_path / "run", resume=True)
