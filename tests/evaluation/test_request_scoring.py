"""Scores of requests, compared with float64 one token at a time and with lm-evaluation-harness on the export."""

import json
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import ROWS, TOKENS, small_config, trained_model, write_tokenizer_json
from scoring_requests import all_kinds_of_requests, greedy_continuation, scored_one_by_one

from coupled_adam.evaluation.downstream import scoring
from coupled_adam.evaluation.downstream.requests_file import Score, TokenRequest
from coupled_adam.evaluation.downstream.scoring import score_requests
from coupled_adam.evaluation.export import export_model
from coupled_adam.evaluation.run_tokenizer import open_json_tokenizer
from coupled_adam.models.language_model import LanguageModel

T = 32
REQUESTS = all_kinds_of_requests(T, TOKENS)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return trained_model(small_config(request.param))


@pytest.fixture
def gpt2() -> LanguageModel:
    return trained_model(small_config())


def values(scores: list[Score]) -> list[float]:
    return [score.log_likelihood for score in scores]


def test_scores_match_one_token_at_a_time(model: LanguageModel) -> None:
    expected = [scored_one_by_one(model, request) for request in REQUESTS]
    found = score_requests(model, REQUESTS)
    assert values(found) == pytest.approx(values(expected), rel=1e-5)
    assert [score.is_greedy for score in found] == [score.is_greedy for score in expected]


@pytest.mark.parametrize("length", [1, 4, T])
def test_the_models_own_continuation_is_greedy_unless_one_token_differs(model: LanguageModel, length: int) -> None:
    context = (1, 2, 3, 40, 50, 60, 70)
    own = greedy_continuation(model, context, length)
    requests = [TokenRequest(context, own)]
    requests += [TokenRequest(context, (*own[:place], own[place] ^ 1, *own[place + 1 :])) for place in {0, length - 1}]
    expected = [scored_one_by_one(model, request) for request in requests]
    assert [score.is_greedy for score in score_requests(model, requests)] == [score.is_greedy for score in expected]
    assert not any(score.is_greedy for score in expected[1:])
    if len(context) + length <= T:
        assert expected[0].is_greedy


def the_harness(model: LanguageModel, folder: Path) -> Any:
    """lm-evaluation-harness on the exported model."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs the extra eval")
    write_tokenizer_json(folder / "tokenizer.json")
    tokenizer = open_json_tokenizer(str(folder / "tokenizer.json"))
    export_model(model.config, dict(model.named_parameters()), tokenizer, folder / "model")
    harness = huggingface.HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=4)
    assert harness.max_length == T
    return harness


def test_scores_match_the_harness_on_the_exported_model(model: LanguageModel, tmp_path: Path) -> None:
    harness = the_harness(model, tmp_path)
    context = (5, 6, 7)
    requests = [*REQUESTS, TokenRequest(context, greedy_continuation(model, context, 3))]
    found = score_requests(model, requests)
    asked = [(("", ""), list(request.context), list(request.continuation)) for request in requests]
    # By default the harness also batches requests with the same input, and uses wrong positions if their
    # continuations start at different ones. No task does that. Both modes are compared, the default without those.
    begins: dict[tuple[int, ...], set[int]] = {}
    for request in requests:
        begins.setdefault((request.context + request.continuation)[:-1], set()).add(len(request.context))
    plain = [len(begins[(request.context + request.continuation)[:-1]]) == 1 for request in requests]
    assert sum(plain) == len(requests) - 3
    for logits_cache, kept in ((True, plain), (False, [True] * len(requests))):
        harness.logits_cache = logits_cache
        answers = harness._loglikelihood_tokens(list(compress(asked, kept)), disable_tqdm=True)
        compared = list(compress(found, kept))
        assert values(compared) == pytest.approx([value for value, _ in answers], rel=1e-5)
        assert [score.is_greedy for score in compared] == [greedy for _, greedy in answers]
    assert found[-1].is_greedy


@pytest.mark.parametrize("tokens_at_once", [1, T, 3 * T + 1, 10**6])
@pytest.mark.parametrize("logit_bytes", [1, 7 * 4 * ROWS, 2**24])
def test_scores_do_not_depend_on_the_size_of_passes_and_chunks(
    gpt2: LanguageModel, tokens_at_once: int, logit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = values(score_requests(gpt2, REQUESTS))
    monkeypatch.setattr(scoring, "LOGIT_BYTES", {"cpu": logit_bytes})
    found = score_requests(gpt2, REQUESTS, tokens_at_once=tokens_at_once)
    assert values(found) == pytest.approx(expected, rel=1e-5)


def test_passes_stay_within_the_budget_and_inputs_are_read_once(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    below = gpt2.hidden_states
    monkeypatch.setattr(gpt2, "hidden_states", lambda tokens: (seen.append(tokens), below(tokens))[1])
    score_requests(gpt2, REQUESTS, tokens_at_once=3 * T)
    assert max(tokens.numel() for tokens in seen) <= 3 * T
    assert len(seen) < len(REQUESTS) / 2
    inputs = {(request.context + request.continuation)[-T - 1 : -1] for request in REQUESTS}
    assert sum(len(tokens) for tokens in seen) == len(inputs) < len(REQUESTS)
    assert [tokens.shape[1] for tokens in seen] == sorted((tokens.shape[1] for tokens in seen), reverse=True)


def test_logits_are_computed_only_for_continuations(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    take = torch.nn.functional.log_softmax
    monkeypatch.setattr(
        scoring.F, "log_softmax", lambda logits, **options: (rows.append(len(logits)), take(logits, **options))[1]
    )
    monkeypatch.setattr(scoring, "LOGIT_BYTES", {"cpu": 8 * 4 * ROWS})
    score_requests(gpt2, REQUESTS)
    assert sum(rows) == sum(len(request.continuation) for request in REQUESTS)
    assert max(rows) == 8


def test_padding_rows_of_the_table_are_part_of_the_softmax(gpt2: LanguageModel) -> None:
    request = TokenRequest((1, 2), (3,))
    before = score_requests(gpt2, [request])[0].log_likelihood
    with torch.no_grad():
        hidden = gpt2.hidden_states(torch.tensor([[1, 2]]))[0, -1]
        gpt2.lm_head.weight[ROWS - 1] = hidden  # make a row beyond the tokenizer likely
    assert score_requests(gpt2, [request])[0].log_likelihood < before - 1


def test_bf16_is_close_to_float32_but_not_equal(gpt2: LanguageModel) -> None:
    exact, rough = (values(score_requests(gpt2, REQUESTS, precision=name)) for name in ("float32", "bf16"))
    assert rough == pytest.approx(exact, rel=0.05)
    assert rough != exact


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_and_gradients_are_unchanged(gpt2: LanguageModel, training: bool) -> None:
    gpt2.train(training)
    modes: list[bool] = []
    score_requests(gpt2, REQUESTS, on_progress=lambda done, total: modes.append(gpt2.training))
    assert gpt2.training == training
    assert not any(modes)
    assert all(parameter.grad is None for parameter in gpt2.parameters())
    with pytest.raises(KeyboardInterrupt):
        score_requests(gpt2, REQUESTS, on_progress=interrupt)
    assert gpt2.training == training


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_progress_counts_requests_up_to_all_of_them(gpt2: LanguageModel) -> None:
    seen: list[tuple[int, int]] = []
    score_requests(gpt2, REQUESTS, tokens_at_once=2 * T, on_progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (len(REQUESTS), len(REQUESTS))
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_no_requests_have_no_scores(gpt2: LanguageModel) -> None:
    assert score_requests(gpt2, []) == []


def test_tokens_beyond_the_table_are_refused(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match=f"token {ROWS}, .*{ROWS} rows.*tokenizer"):
        score_requests(gpt2, [TokenRequest((1,), (2,)), TokenRequest((ROWS,), (2,))])


def test_continuations_longer_than_the_context_are_refused(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match=rf"continuation of {T + 1} tokens.*context is {T}\b"):
        score_requests(gpt2, [TokenRequest((1,), (2,) * (T + 1))])


def test_scores_that_are_not_finite_are_refused_and_the_model_is_named(gpt2: LanguageModel) -> None:
    with torch.no_grad():
        gpt2.get_parameter("wte.weight")[7] = float("nan")
    with pytest.raises(ValueError, match=r"gpt2, 2 layers.* 16.*\b1 of 1 requests.*\bfinite\b"):
        score_requests(gpt2, [TokenRequest((7,), (2,))])


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"tokens_at_once": 0}], ids=json.dumps)
def test_invalid_options_are_refused(gpt2: LanguageModel, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(options))}"):
        score_requests(gpt2, REQUESTS, **options)
