"""Loss and calibration by token frequency on a real GPU: float32 as on the CPU, bf16 close to it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.held_out_loss import SplitLoss, loss_over
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
V, ROWS, T = 5000, 5056, 128
COUNTS = 1_000_000 // np.arange(1, V + 1)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    model = build_model(ModelConfig("gpt2", layers=3, heads=4, width=256, context=T, vocabulary_size=ROWS))
    initialise(model, seed=1)
    with torch.no_grad():
        model.get_parameter(model.input_table_name).mul_(3)  # tokens that differ in likelihood
    return model


def losses(model: LanguageModel, folder: Path, device: str, *, bf16: bool = False) -> SplitLoss:
    """Bins of a text in which tokens are about as frequent as in training."""
    generator = np.random.default_rng(0)
    generator.choice(V, 40 * T + 17, p=COUNTS / COUNTS.sum()).astype("<u2").tofile(folder / "test.bin")
    tokens = Tokens([folder / "test.bin"], "uint16", V, "split test")
    return loss_over(model.to(device), tokens, training_counts=COUNTS, bf16=bf16)


@pytest.mark.parametrize(("bf16", "accuracy"), [(False, 1e-4), (True, 5e-2)])
def test_bins_agree_with_the_cpu(model: LanguageModel, tmp_path: Path, bf16: bool, accuracy: float) -> None:
    there, here = (losses(model, tmp_path, "cuda", bf16=bf16), losses(model, tmp_path, "cpu"))
    assert there.by_frequency is not None
    assert here.by_frequency is not None
    assert there.loss == pytest.approx(here.loss, rel=accuracy)
    for one, other in zip(there.by_frequency, here.by_frequency, strict=True):
        assert (one.tokens, one.targets) == (other.tokens, other.targets)
        assert one.loss == pytest.approx(other.loss, rel=accuracy)
        assert one.calibration == pytest.approx(other.calibration, abs=accuracy)


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_is_the_same_without_bins(model: LanguageModel, tmp_path: Path, bf16: bool) -> None:
    """Without bins the loss is computed by our kernel, with bins by torch."""
    together = losses(model, tmp_path, "cuda", bf16=bf16)
    tokens = Tokens([tmp_path / "test.bin"], "uint16", V, "split test")
    assert together.loss == pytest.approx(loss_over(model, tokens, bf16=bf16).loss, rel=1e-5)
