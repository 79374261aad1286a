"""`model.output_bias`: its initial value, its training, resuming, and several ranks."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import (
    VOCABULARY,
    assert_same_tensors,
    rows,
    run_on_two_ranks,
    saved_tensors,
    small_config,
    train,
    write_corpus,
)
from test_training_run import stop_at
from torch import Tensor

from coupled_adam.config.run_config import Config
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.weights import load_run
from coupled_adam.models.model_config import parameter_count
from coupled_adam.training.checkpoint.training_state import make_optimizer_state
from coupled_adam.training.estimates import memory
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.parallel import Ranks, build

ROWS = 64
BIAS = "model.lm_head.bias"
ONE_PROCESS = Ranks(0, 1, torch.device("cpu"), "none")
WORKER = Path(__file__).with_name("output_bias_worker.py")


def smoothed(corpus: Path) -> Tensor:
    """log((count + 1) / their sum), counted from the tokens; padding rows count as tokens that do not occur."""
    tokens = np.fromfile(corpus / "train.bin", np.uint16)
    counts = [int((tokens == token).sum()) for token in range(ROWS)]
    total = len(tokens) + ROWS
    return torch.tensor([np.log((count + 1) / total) for count in counts], dtype=torch.float64)


def biased(corpus: Path, kind: str, **sections: Any) -> Config:
    return small_config(corpus, **sections | {"model": {"output_bias": kind, **sections.get("model", {})}})


def test_a_fixed_bias_is_the_smoothed_log_unigram_from_start_to_end(corpus: Path, tmp_path: Path) -> None:
    train(biased(corpus, "unigram"), tmp_path / "run")
    for step in (8, 12):
        tensors = saved_tensors(tmp_path / "run", step)
        assert tensors[BIAS].dtype == torch.float32
        torch.testing.assert_close(tensors[BIAS].double(), smoothed(corpus), rtol=1e-6, atol=0)
        assert not any(name.startswith("optimizer.lm_head.bias") for name in tensors)
    assert tensors[BIAS][VOCABULARY:].unique().numel() == 1


@pytest.mark.parametrize("embeddings", ["coupled", "adamw", "sgd"])
def test_a_learned_bias_starts_there_and_is_trained_by_adamw(embeddings: str, corpus: Path, tmp_path: Path) -> None:
    optimizer = {"embeddings": embeddings} | ({"sgd_factor": 20.0} if embeddings == "sgd" else {})
    config = biased(corpus, "learned", optimizer=optimizer)
    train(config, tmp_path / "run")
    tensors = saved_tensors(tmp_path / "run")
    start = smoothed(corpus)
    moved = (tensors[BIAS].double() - start).abs()
    assert (moved > 0).all()
    # AdamW moves a number by at most about the learning rate in each of the first steps, which sum up to less than 0.1.
    assert moved.max() < 0.1
    assert tensors["optimizer.lm_head.bias.exp_avg_sq"].shape == (ROWS,)


@pytest.mark.parametrize("embeddings", ["coupled", "adamw", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_the_bias_is_in_a_group_without_decay_or_in_none(
    kind: str, architecture: str, tied: bool, embeddings: str, corpus: Path
) -> None:
    optimizer = {"embeddings": embeddings} | ({"sgd_factor": 20.0} if embeddings == "sgd" else {})
    config = biased(corpus, kind, optimizer=optimizer, model={"architecture": architecture, "tied": tied})
    counts = np.ones(VOCABULARY, np.int64)
    _, model = build(config.to_model_config(), 1, ONE_PROCESS, bf16=False, compile=False, unigram=counts)
    groups = [group for each in build_optimizers(model, config.optimizer).optimizers for group in each.param_groups]
    holding = [group for group in groups if any(p is model.lm_head.bias for p in group["params"])]
    assert [(group["weight_decay"], group.get("coupled", False)) for group in holding] == [(0.0, False)] * (
        kind == "learned"
    )
    trained = sum(p.numel() for group in groups for p in group["params"])
    assert parameter_count(config.to_model_config()) == trained
    without = small_config(corpus, model={"architecture": architecture, "tied": tied})
    assert trained == parameter_count(without.to_model_config()) + (ROWS if kind == "learned" else 0)


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_the_estimate_counts_the_bias_exactly(kind: str, corpus: Path) -> None:
    config = biased(corpus, kind, training={"precision": "float32"})
    counts = np.ones(VOCABULARY, np.int64)
    _, model = build(config.to_model_config(), 1, ONE_PROCESS, bf16=False, compile=False, unigram=counts)
    optimizers = build_optimizers(model, config.optimizer).optimizers
    make_optimizer_state(optimizers)
    states = [
        value for each in optimizers for state in each.state.values() for key, value in state.items() if key != "step"
    ]
    estimated = memory(config)
    assert estimated.weights == sum(p.nbytes for p in model.parameters())
    assert estimated.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert estimated.optimizer == sum(value.nbytes for value in states)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_the_other_tensors_have_the_same_initial_values_as_without_it(
    kind: str, architecture: str, corpus: Path
) -> None:
    shape = {"architecture": architecture, "tied": False}
    counts = np.arange(VOCABULARY)
    with_bias = biased(corpus, kind, model=shape).to_model_config()
    _, model = build(with_bias, 1, ONE_PROCESS, bf16=False, compile=False, unigram=counts)
    _, plain = build(small_config(corpus, model=shape).to_model_config(), 1, ONE_PROCESS, bf16=False, compile=False)
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() - theirs.keys() == {"lm_head.bias"}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_starts_at_the_entropy_of_the_unigram(corpus: Path, tmp_path: Path) -> None:
    """Initial embeddings are small, so the first loss depends almost only on the bias."""
    train(biased(corpus, "unigram"), tmp_path / "biased")
    train(small_config(corpus), tmp_path / "plain")
    tokens = torch.from_numpy(np.fromfile(corpus / "train.bin", np.uint16).astype(np.int64))
    unigram = float(F.nll_loss(smoothed(corpus).expand(len(tokens), -1), tokens))
    first = {name: rows(tmp_path / name)[0]["loss"] for name in ("biased", "plain")}
    assert first["biased"] == pytest.approx(unigram, abs=0.1)
    assert first["plain"] == pytest.approx(np.log(ROWS), abs=0.05)
    assert unigram < np.log(ROWS) - 0.1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_logits_and_losses_and_the_held_out_loss_include_it(
    architecture: str, tied: bool, corpus: Path, tmp_path: Path
) -> None:
    config = biased(corpus, "learned", model={"architecture": architecture, "tied": tied})
    train(config, tmp_path / "run")
    model, _, opened = load_run(tmp_path / "run")
    assert torch.equal(model.lm_head.bias, saved_tensors(tmp_path / "run")[BIAS])
    assert opened is not None
    tokens = opened.tokens("val")
    windows = torch.from_numpy(tokens.read(0, 513).astype(np.int64))
    inputs, targets = windows[:-1].view(32, 16), windows[1:].view(32, 16)
    with torch.no_grad():
        logits = F.linear(model.hidden_states(inputs), model.lm_head.weight) + model.lm_head.bias
        torch.testing.assert_close(model(inputs), logits)
        expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
        assert model(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-6)
    assert loss_over(model, tokens).loss == pytest.approx(expected.item(), abs=1e-6)
    validation = [row["loss"] for row in rows(tmp_path / "run") if row["kind"] == "val"][-1]
    assert validation == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_a_resumed_run_is_bitwise_equal(
    kind: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = biased(corpus, kind)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_at(9, patched)
        train(config, tmp_path / "resumed")
    _, said = train(config, tmp_path / "resumed", resume=True)
    assert "Resuming" in said
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert_same_tensors(saved_tensors(tmp_path / "resumed"), saved_tensors(tmp_path / "whole"))


def test_a_fixed_bias_is_loaded_from_the_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming checks the tokens but not unigram.npy: a changed file must not change the model halfway."""
    shutil.copytree(corpus, tmp_path / "corpus")
    config = biased(tmp_path / "corpus", "unigram")
    with monkeypatch.context() as patched:
        stop_at(6, patched)
        train(config, tmp_path / "run")
    np.save(tmp_path / "corpus" / "unigram.npy", np.arange(1, VOCABULARY + 1))
    train(config, tmp_path / "run", resume=True)
    torch.testing.assert_close(saved_tensors(tmp_path / "run", 12)[BIAS].double(), smoothed(corpus), rtol=1e-6, atol=0)


def test_a_bias_cannot_be_added_on_resumption(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus), tmp_path / "run")
    with pytest.raises(ValueError, match=r'model.output_bias = "none", now "learned"'):
        train(biased(corpus, "learned"), tmp_path / "run", resume=True)


def test_a_corpus_without_counts_is_counted(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (corpus / "unigram.npy").unlink()
    train(biased(corpus, "unigram"), tmp_path / "run")
    torch.testing.assert_close(saved_tensors(tmp_path / "run")[BIAS].double(), smoothed(corpus), rtol=1e-6, atol=0)


@pytest.mark.parametrize("counts", [b"no array", np.zeros(VOCABULARY, np.int64), np.ones(VOCABULARY + 1, np.int64)])
def test_impossible_counts_are_refused_before_the_run_starts(counts: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    if isinstance(counts, bytes):
        (corpus / "unigram.npy").write_bytes(counts)
    else:
        np.save(corpus / "unigram.npy", counts)
    with pytest.raises(ValueError, match=r"unigram\.npy"):
        train(biased(corpus, "unigram"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_an_unknown_kind_is_refused(corpus: Path) -> None:
    with pytest.raises(ValueError, match="output_bias"):
        biased(corpus, "bigram")


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_a_model_without_counts_or_with_too_many_is_refused(kind: str, corpus: Path) -> None:
    shape = biased(corpus, kind).to_model_config()
    for counts in (None, np.ones(ROWS + 1, np.int64)):
        with pytest.raises(ValueError, match="unigram"):
            build(shape, 1, ONE_PROCESS, bf16=False, compile=False, unigram=counts)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of output_bias_worker.py, on two ranks."""
    return run_on_two_ranks(WORKER, corpus, tmp_path_factory.mktemp("ranks"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["unigram", "learned"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_give_the_same_run_as_one_process(
    mode: str, kind: str, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    train(biased(corpus, kind), tmp_path / "one")
    ours, theirs = rows(runs / f"{mode}-{kind}"), rows(tmp_path / "one")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        if row["kind"] in ("train", "val"):
            assert row["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    tensors, expected = saved_tensors(runs / f"{mode}-{kind}"), saved_tensors(tmp_path / "one")
    for name in (name for name in expected if name.startswith("model.")):
        torch.testing.assert_close(tensors[name], expected[name], rtol=1e-3, atol=2e-5, msg=name)
    if kind == "unigram":
        assert torch.equal(tensors[BIAS], expected[BIAS])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["unigram", "learned"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_resume_bitwise_equally(mode: str, kind: str, runs: Path, tmp_path: Path) -> None:
    assert rows(runs / f"{mode}-{kind}-resumed") == rows(runs / f"{mode}-{kind}")
    assert_same_tensors(saved_tensors(runs / f"{mode}-{kind}-resumed"), saved_tensors(runs / f"{mode}-{kind}"))


@pytest.mark.timeout(400)
def test_a_run_of_two_ranks_can_be_read_by_one(runs: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp2-learned", tmp_path / "run")
    model, _, _ = load_run(tmp_path / "run")
    assert torch.equal(model.lm_head.bias, saved_tensors(runs / "fsdp2-learned")[BIAS])
