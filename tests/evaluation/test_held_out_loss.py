"""The loss over a whole split, compared with a plain float64 computation of one token after the other."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from coupled_adam.data.corpus import Corpus
from coupled_adam.data.manifest import Manifest, Shard, Split
from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.held_out_loss import loss_over, pick_split
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

V, T = 50, 8


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = build_model(ModelConfig("gpt2", layers=2, heads=2, width=16, context=T, vocabulary_size=V))
    initialise(model, seed=3)
    with torch.no_grad():
        model.get_parameter("wte.weight").mul_(20)  # losses that differ from token to token
    return model


def write_tokens(folder: Path, length: int) -> Tokens:
    """Random tokens in two shards."""
    tokens = np.random.default_rng(length).integers(0, V, length).astype("<u2")
    cut = max(1, length // 3)
    parts = [tokens[:cut], tokens[cut:]] if length > 1 else [tokens]
    paths = [folder / f"{number}.bin" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        part.tofile(path)
    return Tokens(paths, "uint16", V, "split test")


def token_losses(model: LanguageModel, tokens: Tokens) -> list[list[float]]:
    """The loss of every token except the first, by window; the context of a token starts with its window."""
    sequence = tokens.read(0, len(tokens))
    windows = []
    for start in range(0, len(sequence) - 1, T):
        losses = []
        for place in range(start + 1, min(start + T + 1, len(sequence))):
            with torch.no_grad():
                logits = model(torch.from_numpy(sequence[None, start:place]))[0, -1].double()
            losses.append(F.cross_entropy(logits, torch.tensor(sequence[place])).item())
        windows.append(losses)
    return windows


@pytest.mark.parametrize("length", [2, T, T + 1, T + 2, 5 * T + 1, 5 * T + 4])
def test_every_token_except_the_first_is_predicted_once(model: LanguageModel, tmp_path: Path, length: int) -> None:
    tokens = write_tokens(tmp_path, length)
    windows = token_losses(model, tokens)
    found = loss_over(model, tokens, windows_at_once=3)
    assert (found.targets, found.windows) == (length - 1, len(windows))
    assert found.loss == pytest.approx(np.mean([loss for window in windows for loss in window]), rel=1e-5)


def test_the_error_is_that_of_independent_windows(model: LanguageModel, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, 60 * T + 1)
    means = [np.mean(window) for window in token_losses(model, tokens)]
    found = loss_over(model, tokens)
    assert found.standard_error == pytest.approx(np.std(means, ddof=1) / np.sqrt(len(means)), rel=1e-4)


def test_one_window_has_no_error(model: LanguageModel, tmp_path: Path) -> None:
    assert loss_over(model, write_tokens(tmp_path, T)).standard_error is None


def test_the_loss_does_not_depend_on_the_size_of_batches(model: LanguageModel, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, 20 * T + 5)
    alone, together = (loss_over(model, tokens, windows_at_once=count) for count in (1, 64))
    assert alone.loss == pytest.approx(together.loss, rel=1e-6)
    assert alone.standard_error == pytest.approx(together.standard_error, rel=1e-4)


def test_bf16_changes_the_loss_a_little(model: LanguageModel, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, 20 * T)
    plain, bf16 = loss_over(model, tokens).loss, loss_over(model, tokens, bf16=True).loss
    assert 0 < abs(plain - bf16) < 0.05


def test_the_model_keeps_its_mode(model: LanguageModel, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, 20)
    for mode in (True, False):
        model.train(mode)
        loss_over(model, tokens)
        assert model.training is mode


def test_a_single_token_is_refused(model: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\btest\b.*\b1 token\b.*\b2\b"):
        loss_over(model, write_tokens(tmp_path, 1))


def corpus_of(*splits: str) -> Corpus:
    described = {name: Split(tokens=10, shards=[Shard(file=f"{name}.bin", tokens=10)]) for name in splits}
    return Corpus(Path("words"), Manifest(vocabulary_size=V, dtype="uint16", splits=described))


def test_the_test_split_is_used_and_validation_only_with_a_note() -> None:
    assert pick_split(corpus_of("train", "val", "test")) == ("test", None)
    split, note = pick_split(corpus_of("train", "val"))
    assert split == "val"
    assert note is not None
    assert re.search(r"^words .*\btest\b.*\bvalidation\b", note), note
    with pytest.raises(ValueError, match=r"^words .*--test 0\.005.*evaluation\.test_loss = false"):
        pick_split(corpus_of("train"))
