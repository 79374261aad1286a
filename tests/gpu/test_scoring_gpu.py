"""Scores of requests on a real GPU: float32 as on the CPU, bf16 close to it, and bf16 by default."""

import numpy as np
import pytest
import torch

from coupled_adam.evaluation.downstream.requests_file import Score, TokenRequest
from coupled_adam.evaluation.downstream.scoring import default_precision, score_requests
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
V, T = 5000, 128


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    model = build_model(ModelConfig(request.param, layers=3, heads=4, width=256, context=T, vocabulary_size=V))
    initialise(model, seed=1)
    with torch.no_grad():
        model.get_parameter(model.input_table_name).mul_(10)  # tokens that differ in likelihood
    return model


@pytest.fixture(scope="module")
def requests() -> list[TokenRequest]:
    """Requests of all lengths, some too long for the model, some with the same context."""
    generator = np.random.default_rng(0)
    requests = []
    for before, after in zip(generator.integers(1, 200, 60), generator.integers(1, 30, 60), strict=True):
        context = tuple(generator.integers(0, V, before).tolist())
        requests += [TokenRequest(context, tuple(generator.integers(0, V, n).tolist())) for n in (after, 1, 1)]
    return requests


def values(scores: list[Score]) -> list[float]:
    return [score.log_likelihood for score in scores]


def test_float32_agrees_with_the_cpu(model: LanguageModel, requests: list[TokenRequest]) -> None:
    expected = score_requests(model.cpu(), requests)
    found = score_requests(model.cuda(), requests, precision="float32", tokens_at_once=1000)
    assert values(found) == pytest.approx(values(expected), rel=1e-5)
    assert [score.is_greedy for score in found] == [score.is_greedy for score in expected]


def test_bf16_is_the_default_and_close_to_float32(model: LanguageModel, requests: list[TokenRequest]) -> None:
    model.cuda()
    assert default_precision(torch.device("cuda")) == "bf16"
    exact, rough, default = (
        np.array(values(score_requests(model, requests, precision=name))) for name in ("float32", "bf16", None)
    )
    assert np.array_equal(rough, default)
    assert not np.array_equal(rough, exact)
    tokens = np.array([len(request.continuation) for request in requests])
    assert np.abs(rough - exact).max() < 0.1 * tokens.max()
    assert np.abs((rough - exact) / tokens).mean() < 0.01


def test_bf16_does_not_depend_on_the_size_of_passes(model: LanguageModel, requests: list[TokenRequest]) -> None:
    model.cuda()
    small, large = (values(score_requests(model, requests, tokens_at_once=count)) for count in (T, 2**16))
    assert small == pytest.approx(large, rel=5e-3)


def test_memory_for_logits_is_bounded(model: LanguageModel) -> None:
    model.cuda()
    requests = [TokenRequest((number,), (1,) * T) for number in range(400)]  # all logits together would have 1 GB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score_requests(model, requests)
    assert torch.cuda.max_memory_allocated() - before < 2**30
