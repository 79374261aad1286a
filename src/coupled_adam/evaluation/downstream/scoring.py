"""Log-likelihoods of continuations given their contexts, which all supported tasks are made of.

There is one row per distinct input, longest first, and as many per pass as a token budget allows. Rows are padded on
the right, which does not affect a causal model. The head, the largest matrix of a small model, is applied only to the
positions of the continuations. The windows are those of lm-evaluation-harness (`HFLM._loglikelihood_tokens`).

Letters: B rows of a pass, T positions of a pass, N scored positions, V vocabulary rows, H width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted
from coupled_adam.evaluation.downstream.requests_file import Score, TokenRequest
from coupled_adam.evaluation.held_out_loss import TOKENS_AT_ONCE
from coupled_adam.models.language_model import LOGIT_BYTES, LanguageModel
from coupled_adam.models.model_config import ModelConfig

Precision = Literal["float32", "bf16"]


@dataclass(frozen=True)
class Row:
    """One input of the model, and the requests it answers."""

    tokens: tuple[int, ...]
    """Input of the model, at most its context."""
    asked: list[int]
    """Indices of the requests; their continuations differ in the last token or in their start."""


def score_requests(
    model: LanguageModel,
    requests: Sequence[TokenRequest],
    *,
    precision: Precision | None = None,
    tokens_at_once: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Score every request, in order.

    If context and continuation together are too long for the model, the context is truncated on the left. The softmax
    is over all rows of the table, including padding, and in float32, as is the head: in bf16 the logits of the two best
    tokens could be equal, and the greedy token would be arbitrary.

    Args:
        model: on its device; its training mode is restored afterwards.
        requests: tokens of the model's vocabulary; a continuation must not be longer than the model's context.
        precision: of the layers below the head, "bf16" by autocast; None for bf16 on CUDA devices that support it.
        tokens_at_once: B * T of a pass; None for a default that keeps the device busy. A longer row is its own pass.
        on_progress: called after each pass with the number of finished requests and their total.

    Example:
        >>> from coupled_adam.models.model_config import build_model
        >>> model = build_model(ModelConfig("gpt2", layers=1, heads=1, width=8, context=16, vocabulary_size=50))
        >>> _ = torch.nn.init.zeros_(model.get_parameter("wte.weight"))  # all tokens equally likely
        >>> score, = score_requests(model, [TokenRequest(context=(3, 1), continuation=(4, 1))])
        >>> round(score.log_likelihood, 4)  # -2 log 50
        -7.824
    """
    if precision not in (None, "float32", "bf16"):
        raise UserError(f"Invalid precision: {precision!r}; expected 'float32' or 'bf16'")
    if tokens_at_once is not None and tokens_at_once < 1:
        raise UserError(f"Invalid tokens_at_once: {tokens_at_once}; expected at least 1")
    _check(requests, model.config)
    device = next(model.parameters()).device
    precision = precision or default_precision(device)
    budget = tokens_at_once or TOKENS_AT_ONCE.get(device.type, 2**12)
    log_likelihoods = np.empty(len(requests))
    is_greedy = np.empty(len(requests), dtype=bool)
    done = 0
    was_training = model.training
    model.eval()
    try:
        for rows in _passes(_rows(requests, model.config.context), budget):
            asked = [place for row in rows for place in row.asked]
            log_likelihoods[asked], is_greedy[asked] = _score_pass(model, rows, requests, device, precision)
            done += len(asked)
            if on_progress is not None:
                on_progress(done, len(requests))
    finally:
        model.train(was_training)
    _refuse_not_finite(log_likelihoods, model.config, precision)
    return [Score(float(value), bool(greedy)) for value, greedy in zip(log_likelihoods, is_greedy, strict=True)]


def default_precision(device: torch.device) -> Precision:
    """Default precision of a device.

    Example:
        >>> default_precision(torch.device("cpu"))
        'float32'
    """
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def _check(requests: Sequence[TokenRequest], config: ModelConfig) -> None:
    for request in requests:
        highest = max(max(request.context), max(request.continuation))
        if highest >= config.vocabulary_size:
            raise UserError(
                f"a request has token {highest}, but the model's vocabulary has {config.vocabulary_size} rows: the "
                "model was trained with another tokenizer; write the requests with the model's tokenizer"
            )
        request.require_room(config.context)


def _rows(requests: Sequence[TokenRequest], context: int) -> list[Row]:
    """The distinct inputs of the requests, longest first, so that the pass with the most memory comes first."""
    rows: dict[tuple[int, ...], Row] = {}
    for place, request in enumerate(requests):
        # The last token is only predicted, so one token more than the context fits.
        tokens = (request.context + request.continuation)[-(context + 1) :][:-1]
        rows.setdefault(tokens, Row(tokens, [])).asked.append(place)
    return sorted(rows.values(), key=lambda row: -len(row.tokens))


def _passes(rows: Sequence[Row], budget: int) -> Iterator[Sequence[Row]]:
    """Split rows, longest first, into passes of at most `budget` tokens, including padding."""
    first = 0
    while first < len(rows):
        count = max(1, budget // len(rows[first].tokens))
        yield rows[first : first + count]
        first += count


@torch.no_grad()
def _score_pass(
    model: LanguageModel, rows: Sequence[Row], requests: Sequence[TokenRequest], device: torch.device, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihoods (float64) of all requests of some rows, and whether they are the greedy continuations."""
    T = len(rows[0].tokens)
    inputs = torch.zeros(len(rows), T, dtype=torch.int64)
    positions: list[int] = []  # (N,) into the flattened inputs
    targets: list[int] = []  # (N,)
    starts: list[int] = []  # start of each request in these
    for number, row in enumerate(rows):
        inputs[number, : len(row.tokens)] = torch.tensor(row.tokens)
        end = number * T + len(row.tokens)
        for place in row.asked:
            continuation = requests[place].continuation
            starts.append(len(targets))
            positions += range(end - len(continuation), end)
            targets += continuation
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        hidden = model.hidden_states(inputs.to(device))  # (B, T, H)
    scored = hidden.flatten(0, 1)[torch.tensor(positions, device=device)]  # (N, H)
    log_p, best = _log_probabilities(scored, model, torch.tensor(targets, device=device))
    log_likelihoods = np.add.reduceat(log_p.double().cpu().numpy(), starts)
    is_greedy = np.logical_and.reduceat(best.cpu().numpy(), starts)
    return log_likelihoods, is_greedy


def _log_probabilities(hidden: Tensor, model: LanguageModel, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (N,) of each target, and whether it is the most likely token (N,).

    Args:
        hidden: (N, H).
        model: whose head (V, H) is applied, with its bias and cap, if any.
        targets: (N,) int64.
    """
    weight = model.lm_head.weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    chunk = max(1, LOGIT_BYTES.get(hidden.device.type, 2**24) // (weight.shape[0] * dtype.itemsize))
    log_p, best = [], []
    for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        log_softmax = F.log_softmax(model.logits(part.to(weight.dtype)), dim=-1, dtype=dtype)  # (chunk, V)
        log_p.append(log_softmax.gather(1, wanted[:, None]).squeeze(1))
        best.append(log_softmax.argmax(dim=-1) == wanted)
    return torch.cat(log_p), torch.cat(best)


def _refuse_not_finite(log_likelihoods: np.ndarray, config: ModelConfig, precision: str) -> None:
    bad = int((~np.isfinite(log_likelihoods)).sum())
    if bad:
        raise UserError(
            f"the model ({config.architecture}, {counted(config.layers, 'layer')} of width {config.width}) in "
            f"{precision}: the scores of {bad} of {len(log_likelihoods)} requests are not finite; its weights may "
            "have diverged: evaluate an earlier checkpoint" + (", or try float32" if precision == "bf16" else "")
        )
