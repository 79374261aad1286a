"""Every setting of a run reaches the component that uses it."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import VOCABULARY, rows, saved_tensors, small_config, train
from torch import Tensor

from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import open_corpus
from coupled_adam.models.model_config import build_model
from coupled_adam.training.optimizers import build_optimizers, centre
from coupled_adam.training.parallel import Ranks
from coupled_adam.training.train_step import TrainStep
from coupled_adam.training.trainer import TrainingStopped
from coupled_adam.training.validation import validation_batches


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if row["kind"] == "train"]


def test_z_loss_is_part_of_the_training_loss(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus), tmp_path / "without")
    train(small_config(corpus, optimizer={"z_loss": 0.1}), tmp_path / "with")
    # All initial logits are near zero: the logsumexp is log 64.
    expected = 0.1 * torch.tensor(64.0).log().square().item()
    assert losses(tmp_path / "with")[0] - losses(tmp_path / "without")[0] == pytest.approx(expected, rel=0.01)


def test_every_optimizer_follows_the_schedule(corpus: Path) -> None:
    config = small_config(corpus, optimizer={"embeddings": "sgd", "sgd_factor": 20.0})
    optimizers = build_optimizers(build_model(config.to_model_config()), config.optimizer)
    optimizers.set_lr(0.25)
    sgd, adamw = optimizers.optimizers
    assert {group["lr"] for group in sgd.param_groups} == {5.0}
    assert {group["lr"] for group in adamw.param_groups} == {0.25}


def test_a_gradient_norm_that_is_not_finite_stops_the_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = TrainStep.__call__

    def spoiled(self: TrainStep, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, norm = call(self, *arguments)
        return loss, norm * float("inf")

    monkeypatch.setattr(TrainStep, "__call__", spoiled)
    with pytest.raises(TrainingStopped, match=r"^step 1: .*\bnorm .*\binf\b"):
        train(small_config(corpus), tmp_path / "run")


def test_seed_and_order_determine_the_batches(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = Batches.__init__

    def remember(self: Batches, tokens: Any, context: int, batch_size: int, seed: int, order: Any = "random") -> None:
        made.append((len(tokens), seed, order))
        make(self, tokens, context, batch_size, seed, order)

    monkeypatch.setattr(Batches, "__init__", remember)
    config = small_config(corpus, data={"order": "epochs"}).model_copy(update={"seed": 5})
    train(config, tmp_path / "run")
    assert (4000, 5, "epochs") in made
    assert (513, 0, "epochs") in made  # validation: the same windows for every seed


@pytest.mark.parametrize("batch_size", [8, 128])  # of 32 windows: four batches, or one that is too large
def test_the_validation_loss_covers_the_whole_validation_text(batch_size: int, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, training={"batch_size": batch_size, "tokens": 4 * batch_size * 16})
    train(config, tmp_path / "run")
    model = build_model(config.to_model_config())
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in saved_tensors(tmp_path / "run").items()
        if name.startswith("model.")
    }
    model.load_state_dict(weights, strict=False)  # the tied head counts once
    tokens = torch.from_numpy(open_corpus(corpus).tokens("val").read(0, 513))
    with torch.no_grad():
        logits = model(tokens[:-1].view(32, 16))
        expected = F.cross_entropy(logits.flatten(0, 1).double(), tokens[1:])
    (validated,) = [row for row in rows(tmp_path / "run") if row["kind"] == "val"]
    assert validated["loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "ranks", "on_each_rank"),
    [
        (128, 4, 1, [4] * 8),  # all 32 windows, in batches no larger than in training
        (128, 128, 1, [32]),
        (96, 4, 3, [4, 4]),  # 24 windows: the same number for every rank
        (90, 5, 2, [5, 5, 5]),
        (64, 1, 64, []),  # fewer windows than ranks
    ],
)
def test_validation_batches_are_no_larger_than_training_batches(
    batch_size: int, micro_batch_size: int, ranks: int, on_each_rank: list[int], corpus: Path
) -> None:
    sizes = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "tokens": 4 * batch_size * 16}
    config = small_config(corpus, training=sizes)
    opened, seen = open_corpus(corpus), []
    for rank in range(ranks):
        batches, _ = validation_batches(config, opened, Ranks(rank, ranks, torch.device("cpu"), "ddp"))
        found = [] if batches is None else batches.micro_batches(0)
        assert [len(tokens) for tokens, _ in found] == on_each_rank
        seen += [tuple(window) for tokens, _ in found for window in tokens.tolist()]
    assert len(set(seen)) == ranks * sum(on_each_rank)


def test_checkpoints_can_be_saved_every_few_minutes(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, checkpoints={"every": None, "minutes": 1e-9, "keep": 50}), tmp_path / "run")
    saved = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == list(range(1, 13))


def test_bf16_is_used_and_stays_close_to_float32(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus), tmp_path / "float32")
    train(small_config(corpus, training={"precision": "bf16"}), tmp_path / "bf16")
    assert losses(tmp_path / "bf16") != losses(tmp_path / "float32")
    assert losses(tmp_path / "bf16") == pytest.approx(losses(tmp_path / "float32"), abs=0.02)
    assert saved_tensors(tmp_path / "bf16")["model.wte.weight"].dtype == torch.float32


def test_threads_and_determinism_are_set(corpus: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        training = {"threads": before[0] + 1, "deterministic": True}
        train(small_config(corpus, training=training), tmp_path / "run")
        assert torch.get_num_threads() == before[0] + 1
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def test_padding_does_not_count_in_the_mean_removed_by_centring() -> None:
    table = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) + 1
    table[VOCABULARY:] = 100.0
    centre(table, VOCABULARY)
    assert table[:VOCABULARY].mean(dim=0).abs().max() < 1e-6


def test_resuming_in_another_precision_is_reported(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_training_run import stop_at

    config = small_config(corpus)
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        train(config, tmp_path / "run")
    # As written by a machine whose "auto" is bf16.
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    record = json.loads((checkpoint / "state.json").read_text())
    del record["sha256"]
    assert record["state"]["precision"] == "float32"
    record["state"]["precision"] = "bf16"
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(record | {"sha256": checksum}))
    _, shown = train(config, tmp_path / "run", resume=True)
    assert re.search(r"\bbf16\b.*\bfloat32\b", shown), shown


def test_a_run_refused_before_its_first_step_can_be_corrected(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="context"):
        train(small_config(corpus, model={"context": 4096}, training={"tokens": 10 * 8 * 4096}), tmp_path / "run")
    outcome, _ = train(small_config(corpus), tmp_path / "run")
    assert outcome.is_finished


def test_a_kill_during_the_first_write_leaves_a_usable_folder(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.123.tmp").write_text("half a con")
    outcome, _ = train(small_config(corpus), tmp_path / "run")
    assert outcome.is_finished
    assert list((tmp_path / "run").glob(".*.tmp")) == []


def test_damaged_checkpoints_are_not_deleted_even_if_all_are_damaged(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus)
    train(config, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "state.json").write_text("{}")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=rf"state\.json.* remove {tmp_path / 'run' / 'checkpoints'} "):
        train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
