"""Loss and calibration by token frequency, compared with plain float64 loops over all logits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.held_out_loss import SplitLoss, loss_over
from coupled_adam.evaluation.loss_by_frequency import FrequencyBin, frequency_bins
from coupled_adam.models import language_model
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

V, ROWS, T = 50, 56, 8


def model_of(architecture: str = "gpt2", rows: int = ROWS) -> LanguageModel:
    """A model in float64 that gives different tokens very different probabilities."""
    model = build_model(ModelConfig(architecture, layers=2, heads=2, width=16, context=T, vocabulary_size=rows))
    initialise(model, seed=3)
    with torch.no_grad():
        model.get_parameter(model.output_table_name).mul_(20)
    return model.double()


def zipf_counts(size: int = V) -> np.ndarray:
    """Some tokens never occur, and several have the same count."""
    return np.random.default_rng(1).permutation(20_000 // np.arange(1, size + 1) ** 2)


def write_tokens(path: Path, values: np.ndarray, vocabulary_size: int = V) -> Tokens:
    values.astype("<u2").tofile(path)
    return Tokens([path], "uint16", vocabulary_size, "split test")


def some_tokens(folder: Path, length: int = 20 * T + 4, size: int = V) -> Tokens:
    return write_tokens(folder / "test.bin", np.random.default_rng(length).integers(0, size, length), size)


def by_frequency(found: SplitLoss) -> tuple[FrequencyBin, ...]:
    assert found.by_frequency is not None
    assert len(found.by_frequency) == 10
    return found.by_frequency


def plain_bin(counts: np.ndarray, token: int) -> int:
    """The bin of a token, from 1: halve the rest of the text until the token is in the upper half."""
    left = sum(int(count) for count in counts if count <= counts[token])
    number, text = 1, float(counts.sum())
    while number < 10 and left <= text / 2:
        number, text = number + 1, text / 2
    return number


@dataclass
class Plain:
    """A bin of the reference."""

    losses: list[float]
    probability: float = 0.0


def plain_bins(model: LanguageModel, tokens: Tokens, counts: np.ndarray) -> list[Plain]:
    """Compute one token after the other, from all logits of its context and a literal softmax."""
    sequence = tokens.read(0, len(tokens))
    bins = [plain_bin(counts, token) - 1 for token in range(len(counts))]
    found = [Plain([]) for _ in range(10)]
    for place in range(1, len(sequence)):
        start = (place - 1) // T * T
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence[None, start:place]))[0, -1].tolist()
        powers = [math.exp(logit - max(logits)) for logit in logits]
        for token, number in enumerate(bins):
            found[number].probability += powers[token] / sum(powers)
        target = sequence[place]
        found[bins[target]].losses.append(-math.log(powers[target] / sum(powers)))
    for each in found:
        each.probability /= len(sequence) - 1
    return found


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("windows_at_once", [3, 64])
def test_numbers_match_plain_loops_over_all_logits(architecture: str, windows_at_once: int, tmp_path: Path) -> None:
    model, tokens, counts = model_of(architecture), some_tokens(tmp_path), zipf_counts()
    found = by_frequency(loss_over(model, tokens, training_counts=counts, windows_at_once=windows_at_once))
    expected = plain_bins(model, tokens, counts)
    share = [len(plain.losses) / (len(tokens) - 1) for plain in expected]
    assert [each.targets for each in found] == [len(plain.losses) for plain in expected]
    assert sum(each.targets > 0 for each in found) > 5
    for each, plain, part in zip(found, expected, share, strict=True):
        assert each.probability == pytest.approx(plain.probability, rel=1e-6)
        if plain.losses:
            assert each.loss == pytest.approx(np.mean(plain.losses), rel=1e-6)
            assert each.calibration == pytest.approx(math.log(plain.probability / part), abs=1e-6)
        else:
            assert (each.loss, each.standard_error, each.calibration) == (None, None, None)


def test_the_weighted_mean_of_the_bins_is_the_loss(tmp_path: Path) -> None:
    model, tokens = model_of().float(), some_tokens(tmp_path)
    found = loss_over(model, tokens, training_counts=zipf_counts())
    bins = by_frequency(found)
    assert sum(each.targets for each in bins) == found.targets
    total = sum(each.targets * (each.loss or 0.0) for each in bins)
    assert total / found.targets == pytest.approx(found.loss, rel=1e-9)


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_is_the_same_with_and_without_bins(bf16: bool, tmp_path: Path) -> None:
    model, tokens = model_of().float(), some_tokens(tmp_path)
    alone = loss_over(model, tokens, bf16=bf16)
    together = loss_over(model, tokens, training_counts=zipf_counts(), bf16=bf16)
    assert alone.by_frequency is None
    assert together.loss == pytest.approx(alone.loss, rel=1e-7)
    assert together.standard_error == pytest.approx(alone.standard_error, rel=1e-6)


def test_the_error_of_a_bin_is_that_of_its_windows(tmp_path: Path) -> None:
    """For a bin with one target in every window, it is the usual error of a mean."""
    windows = 12
    values = np.random.default_rng(0).integers(0, 40, windows * T + 1)
    values[5::T] = 49
    counts = np.where(np.arange(V) == 49, 1, 1000)
    model, tokens = model_of(), write_tokens(tmp_path / "test.bin", values)
    rare = by_frequency(loss_over(model, tokens, training_counts=counts))[-1]
    losses = plain_bins(model, tokens, counts)[-1].losses
    assert (rare.tokens, rare.targets, len(losses)) == (1, windows, windows)
    assert rare.standard_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(windows), rel=1e-6)


class Unigram(nn.Module):
    """Predicts the same probabilities for any context."""

    def __init__(self, probabilities: np.ndarray) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.from_numpy(probabilities).double().log())
        self.config = SimpleNamespace(context=T)

    def logit_chunks(self, tokens: Tensor) -> Iterator[Tensor]:
        yield self.logits.expand(tokens.numel(), -1)


def text_of(counts: np.ndarray, path: Path) -> Tokens:
    """A text whose targets have these counts; the first token is only context."""
    targets = np.random.default_rng(2).permutation(np.repeat(np.arange(len(counts)), counts))
    return write_tokens(path, np.concatenate([[0], targets]), len(counts))


def bins_of(probabilities: np.ndarray, tokens: Tokens, counts: np.ndarray) -> tuple[FrequencyBin, ...]:
    model: Any = Unigram(probabilities)
    return by_frequency(loss_over(cast(LanguageModel, model), tokens, training_counts=counts))


COUNTS = np.array([512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1])


def test_calibrated_model_has_a_calibration_of_0_in_every_bin(tmp_path: Path) -> None:
    bins = bins_of(COUNTS / COUNTS.sum(), text_of(COUNTS, tmp_path / "test.bin"), COUNTS)
    assert [each.tokens for each in bins] == [1] * 9 + [2]
    assert [each.calibration for each in bins] == pytest.approx([0] * 10, abs=1e-12)
    assert [each.loss for each in bins] == pytest.approx([math.log(2) * number for number in (*range(1, 10), 10)])


def test_a_model_that_knows_only_frequent_tokens_underestimates_the_rare_ones(tmp_path: Path) -> None:
    frequent = np.where(np.arange(len(COUNTS)) < 2, 0.495, 0.01 / (len(COUNTS) - 2))
    bins = bins_of(frequent, text_of(COUNTS, tmp_path / "test.bin"), COUNTS)
    calibration = [each.calibration or 0.0 for each in bins]
    assert calibration[0] == pytest.approx(math.log(0.495 / 0.5))
    assert calibration[1] == pytest.approx(math.log(0.495 / 0.25))
    assert calibration[2] == pytest.approx(math.log(0.01 / 9 / 0.125))
    assert all(each < -1 for each in calibration[2:5])
    assert sum(each.probability for each in bins) == pytest.approx(1)


def test_padding_rows_of_the_head_are_in_no_bin(tmp_path: Path) -> None:
    padded = np.append(COUNTS / COUNTS.sum() / 2, [0.25, 0.25])
    bins = bins_of(padded, text_of(COUNTS, tmp_path / "test.bin"), COUNTS)
    assert sum(each.probability for each in bins) == pytest.approx(0.5)
    assert [each.calibration for each in bins] == pytest.approx([math.log(0.5)] * 10)
    assert sum(each.tokens for each in bins) == len(COUNTS)


def test_tiny_vocabularies_leave_bins_empty(tmp_path: Path) -> None:
    counts = np.array([90, 9, 1])
    bins = bins_of(counts / 100, text_of(counts, tmp_path / "test.bin"), counts)
    assert [each.tokens for each in bins] == [1, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    for each in bins:
        if each.tokens == 0:
            empty = FrequencyBin(0, None, None, 0, None, None, 0.0, None)
            assert each == empty
        else:
            assert each.lowest_count == each.highest_count == each.targets


def test_tokens_that_were_never_seen_are_in_the_rarest_bin(tmp_path: Path) -> None:
    counts = np.array([50, 50, 0, 0])
    assert frequency_bins(counts).tolist() == [0, 0, 9, 9]
    bins = bins_of(np.full(4, 0.25), text_of(np.array([3, 3, 2, 0]), tmp_path / "test.bin"), counts)
    assert [(each.tokens, each.targets) for each in bins] == [(2, 6), *[(0, 0)] * 8, (2, 2)]
    assert (bins[9].lowest_count, bins[9].highest_count) == (0, 0)
    assert bins[9].calibration == pytest.approx(math.log(0.5 / 0.25))


def test_a_bin_without_targets_has_no_loss_and_no_calibration(tmp_path: Path) -> None:
    bins = bins_of(COUNTS / COUNTS.sum(), text_of(COUNTS * (COUNTS > 2), tmp_path / "test.bin"), COUNTS)
    assert (bins[9].tokens, bins[9].targets, bins[9].loss, bins[9].calibration) == (2, 0, None, None)
    assert bins[9].probability == pytest.approx(2 / COUNTS.sum())


@pytest.mark.parametrize("seed", range(5))
def test_bins_follow_from_halving_the_text(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts = (generator.pareto(0.7, 300) * generator.integers(1, 50)).astype(np.int64)
    bins = frequency_bins(counts)
    assert bins.tolist() == [plain_bin(counts, token) - 1 for token in range(len(counts))]
    for count in set(counts.tolist()):
        assert len(set(bins[counts == count].tolist())) == 1
    in_order = bins[np.argsort(-counts, kind="stable")]
    assert (np.diff(in_order) >= 0).all()


def test_bins_of_counts_of_trillions_are_exact() -> None:
    counts = np.array([2**43, 2**42, 2**41, 2**41 - 1, 1])
    assert frequency_bins(counts).tolist() == [0, 1, 2, 3, 9]


def test_logits_come_in_chunks_of_at_most_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, counts = model_of(), some_tokens(tmp_path), zipf_counts()
    whole = loss_over(model, tokens, training_counts=counts)
    monkeypatch.setattr(language_model, "LOGIT_BYTES", {"cpu": 5 * 4 * ROWS})
    sizes = []
    compute = model.logits

    def noted(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "logits", noted)
    parts = loss_over(model, tokens, training_counts=counts)
    assert max(sizes) <= 5
    assert sum(sizes) == -(-(len(tokens) - 1) // T) * T
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    for part, all_at_once in zip(by_frequency(parts), by_frequency(whole), strict=True):
        assert part.probability == pytest.approx(all_at_once.probability, rel=1e-12)
        assert part.loss == pytest.approx(all_at_once.loss, rel=1e-12)
