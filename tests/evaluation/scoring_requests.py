"""Requests of every kind, and their scores by a plain computation, for the scoring tests."""

import copy
import random

import torch
import torch.nn.functional as F

from coupled_adam.evaluation.downstream.requests_file import Score, TokenRequest
from coupled_adam.models.language_model import LanguageModel


def all_kinds_of_requests(context: int, highest: int, seed: int = 0) -> list[TokenRequest]:
    """Short and long requests, truncated ones, some with a common input, and some that differ only in the context."""
    generator = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(highest) for _ in range(length))

    lengths = [(1, 1), (1, 5), (7, 3), (context - 1, 1), (context, 1), (context - 3, 4), (context + 1, 1)]
    cut = [(context, 6), (3 * context, 2), (1, context), (5, context), (2 * context, context)]
    requests = [TokenRequest(tokens(before), tokens(after)) for before, after in lengths + cut]
    shared = tokens(9)
    requests += [TokenRequest(shared, tokens(1)) for _ in range(4)]  # one token each after the same context
    requests += [TokenRequest(shared[:k], shared[k:]) for k in (3, 6, 8)]  # the same input, split at other places
    requests += [TokenRequest(shared, tokens(count)) for count in (2, 3, 5)]
    generator.shuffle(requests)
    return requests


def scored_one_by_one(model: LanguageModel, request: TokenRequest) -> Score:
    """Scores in float64: each token of the continuation by its own pass over the preceding tokens in the window."""
    exact = copy.deepcopy(model).double().eval()
    window = list(request.context + request.continuation)[-(model.config.context + 1) :]
    total, greedy = 0.0, True
    for place in range(len(window) - len(request.continuation), len(window)):
        with torch.no_grad():
            logits = exact(torch.tensor([window[:place]]))[0, -1]
        total -= F.cross_entropy(logits, torch.tensor(window[place])).item()
        greedy = greedy and int(logits.argmax()) == window[place]
    return Score(total, greedy)


def greedy_continuation(model: LanguageModel, context: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The model's own greedy continuation."""
    tokens = list(context)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-model.config.context :]]))[0, -1].argmax()))
    return tuple(tokens[len(context) :])
