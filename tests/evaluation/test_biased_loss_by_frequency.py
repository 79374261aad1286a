"""Loss and calibration by token frequency of models with an output bias, which bfloat16 handles separately."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

V, T = 400, 16
COUNTS = np.array([10**7 // rank**2 for rank in range(1, V + 1)], np.int64)


@pytest.fixture
def model() -> LanguageModel:
    config = ModelConfig("gpt2", layers=1, heads=2, width=16, context=T, vocabulary_size=V, output_bias="unigram")
    model = build_model(config)
    initialise(model, seed=3, unigram=COUNTS)
    return model


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    drawn = np.random.default_rng(0).choice(V, 20 * T + 1, p=COUNTS / COUNTS.sum())
    path = tmp_path / "test.bin"
    drawn.astype("<u2").tofile(path)
    return Tokens([path], "uint16", V, "split test")


@pytest.mark.parametrize("bf16", [False, True])
def test_loss_is_the_same_with_and_without_bins(model: LanguageModel, tokens: Tokens, bf16: bool) -> None:
    alone = loss_over(model, tokens, bf16=bf16)
    together = loss_over(model, tokens, training_counts=COUNTS, bf16=bf16)
    assert together.loss == pytest.approx(alone.loss, rel=1e-6)


def test_bins_match_plain_probabilities_with_the_bias(model: LanguageModel, tokens: Tokens) -> None:
    found = loss_over(model, tokens, training_counts=COUNTS).by_frequency
    assert found is not None
    sequence = torch.from_numpy(tokens.read(0, len(tokens)).astype(np.int64))
    inputs, targets = sequence[:-1].view(-1, T), sequence[1:]
    with torch.no_grad():
        hidden = model.hidden_states(inputs).flatten(0, 1).double()
    logits = hidden @ model.lm_head.weight.detach().double().T + model.lm_head.bias.detach().double()
    p = logits.softmax(dim=1)
    # By hand: the first token has more than half of the text, the second more than half of the rest.
    assert COUNTS[0] > COUNTS[1:].sum()
    assert (found[0].tokens, found[0].targets) == (1, int((targets == 0).sum()))
    assert found[0].loss == pytest.approx(float(-p[targets == 0, 0].log().mean()), rel=1e-5)
    share = float((targets == 0).double().mean())
    assert found[0].calibration == pytest.approx(math.log(float(p[:, 0].mean()) / share), abs=1e-5)


def test_logits_in_bfloat16_keep_the_bias_in_float32(model: LanguageModel, tokens: Tokens) -> None:
    inputs = torch.from_numpy(tokens.read(0, T).astype(np.int64))[None]
    with torch.no_grad():
        exact = model(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(inputs)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 5e-3
    assert exact.abs().max() > 8  # where bfloat16 resolves 0.06
