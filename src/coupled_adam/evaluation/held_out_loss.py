"""The loss of a model over a whole split: every token is predicted once, with the context in its window.

The split is cut into consecutive windows of T targets; the last may be shorter. So every token except the very first is
a target exactly once, and the mean is over tokens, not over batches.

Letters: B windows of a batch, T context, W windows of the split.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted
from coupled_adam.data.corpus import Corpus
from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.loss_by_frequency import (
    Counts,
    FrequencyBin,
    FrequencyTally,
    losses_and_probabilities,
    mean_over_windows,
)
from coupled_adam.models.language_model import LanguageModel

IGNORED = -100
# Enough to keep a device busy, but small enough for the activations of one pass.
TOKENS_AT_ONCE = {"cpu": 2**12, "cuda": 2**16}


@dataclass(frozen=True)
class SplitLoss:
    """The loss over a split."""

    loss: float
    """Mean over all targets, in nats."""
    standard_error: float | None
    """Of the mean, as an estimate for other text of this kind; None for a single window."""
    targets: int
    """Number of predicted tokens."""
    windows: int
    by_frequency: tuple[FrequencyBin, ...] | None = None
    """The same in ten bins of token frequency, most frequent first; None if not requested."""


def pick_split(corpus: Corpus) -> tuple[str, str | None]:
    """Choose the split to evaluate on, with a note if it is not the test split.

    Args:
        corpus: must have "test" or "val".
    """
    if "test" in corpus.splits:
        return "test", None
    if "val" in corpus.splits:
        return "val", f"{corpus.folder} has no test split; the loss is measured on its validation split"
    raise UserError(
        f"{corpus.folder} has no test split and no validation split to evaluate on; prepare it with --test 0.005, or "
        "set evaluation.test_loss = false"
    )


@torch.no_grad()
def loss_over(
    model: LanguageModel,
    tokens: Tokens,
    *,
    training_counts: Counts | None = None,
    bf16: bool | None = None,
    windows_at_once: int | None = None,
) -> SplitLoss:
    """Compute the loss of a model over all tokens of a split.

    Args:
        model: on its device.
        tokens: of the split, at least two.
        training_counts: (V,) token counts of the training split, to measure the loss by token frequency in the same
            pass.
        bf16: use bf16 autocast; None for CUDA only.
        windows_at_once: B; None for a default that keeps the device busy.

    Example:
        >>> import numpy as np, tempfile, pathlib
        >>> from coupled_adam.models.model_config import ModelConfig, build_model
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "test.bin"
        >>> (np.arange(100, dtype="<u2") % 50).tofile(path)
        >>> model = build_model(ModelConfig("gpt2", layers=1, heads=1, width=8, context=16, vocabulary_size=50))
        >>> found = loss_over(model, Tokens([path], "uint16", 50, "test"))
        >>> found.targets, found.windows
        (99, 7)
    """
    if len(tokens) < 2:
        found = counted(len(tokens), "token")
        raise UserError(f"{tokens.name}: {found}; expected at least 2, one as context and one to predict")
    device = next(model.parameters()).device
    T = model.config.context
    B = windows_at_once or max(1, TOKENS_AT_ONCE.get(device.type, 2**12) // T)
    use_bf16 = device.type == "cuda" if bf16 is None else bf16
    was_training = model.training
    model.eval()
    sums: list[Tensor] = []  # (B,) each: loss of a window, float64 on the device
    counts: list[int] = []  # targets of a window
    tally = None if training_counts is None else FrequencyTally(training_counts)
    for host_inputs, host_targets, lengths in batches(tokens, T, B):
        inputs, targets = host_inputs.to(device), host_targets.to(device)
        with torch.autocast(device.type, torch.bfloat16) if use_bf16 else nullcontext():
            if tally is None:
                losses = model(inputs, targets, reduction="none")  # (B, T)
            else:
                flat, probabilities = losses_and_probabilities(model.logit_chunks(inputs), targets.flatten(), IGNORED)
                losses = flat.view_as(targets)
                tally.add(losses, targets, probabilities, IGNORED)
        sums.append(losses.double().sum(dim=1))
        counts += lengths
    model.train(was_training)
    loss, error = mean_over_windows(torch.cat(sums).cpu(), torch.tensor(counts, dtype=torch.float64))
    assert loss is not None
    return SplitLoss(loss, error, sum(counts), len(counts), None if tally is None else tally.bins())


def batches(tokens: Tokens, T: int, B: int) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Yield inputs (B, T), targets (B, T) and the number of targets of each window; the last window is padded."""
    count = len(tokens) - 1
    for first in range(0, count, B * T):
        size = min(B * T, count - first)
        read = torch.from_numpy(tokens.read(first, size + 1))
        windows = math.ceil(size / T)
        inputs = torch.zeros(windows * T, dtype=torch.int64)
        targets = torch.full((windows * T,), IGNORED, dtype=torch.int64)
        inputs[:size], targets[:size] = read[:-1], read[1:]
        lengths = [T] * (windows - 1) + [size - T * (windows - 1)]
        yield inputs.view(windows, T), targets.view(windows, T), lengths
