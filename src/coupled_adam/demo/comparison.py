"""Train the same model twice, from the same start and on the same batches: the optimizer is all that differs.

Letters: V vocabulary rows, H hidden size, B batch, T time.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from coupled_adam.demo.model import SmallGPT
from coupled_adam.demo.text import Corpus
from coupled_adam.optimizer import CoupledAdamW, param_groups

RECORD_EVERY = 10
VALIDATION_BATCH = 64


@dataclass(frozen=True)
class Settings:
    """What both trainings share."""

    steps: int = 300
    seed: int = 0
    """Decides the initial weights and the batches."""
    vocabulary_size: int = 4096
    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 16
    learning_rate: float = 3e-3
    """At its peak: after a linear warm-up over the first tenth of the steps, before a cosine to a tenth of it."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Record:
    """The state of a training after `step` updates."""

    step: int
    loss: float
    """Mean training loss over the updates since the record before; at step 0, that of the first batch."""
    ratio: float
    """Mean-embedding ratio."""


@dataclass(frozen=True)
class Outcome:
    """One training, seen from its end."""

    name: str
    records: list[Record]
    validation_loss: float
    state_bytes: int

    @property
    def train_loss(self) -> float:
        return self.records[-1].loss

    @property
    def ratio(self) -> float:
        return self.records[-1].ratio


def compare(corpus: Corpus, settings: Settings, on_step: Callable[[str, int, float], None]) -> tuple[Outcome, Outcome]:
    """Train with torch.optim.AdamW, then with CoupledAdamW.

    Args:
        corpus: the text of both.
        settings: the model, the length and the hyperparameters of both.
        on_step: called after every update with the name of the optimizer, the number of updates and the loss.
    """
    train_windows = random_windows(corpus.train, settings)
    validation_windows = consecutive_windows(corpus.validation, settings.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        initial = SmallGPT(len(corpus.vocabulary), settings.context, settings.width, settings.layers, settings.heads)
    outcomes = []
    for build_optimizer in (adamw, coupled_adamw):
        model = copy.deepcopy(initial)
        optimizer = build_optimizer(model, settings)
        records = train(model, optimizer, train_windows, settings, on_step)
        outcomes.append(
            Outcome(
                type(optimizer).__name__, records, validation_loss(model, validation_windows), state_bytes(optimizer)
            )
        )
    return outcomes[0], outcomes[1]


def adamw(model: SmallGPT, settings: Settings) -> torch.optim.Optimizer:
    groups = param_groups(model, settings.weight_decay, couple="none")
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
    # CoupledAdamW clips inside its step; with this hook so does AdamW, and one loop serves both.
    optimizer.register_step_pre_hook(lambda *_: clip_gradients(model, settings.max_grad_norm))
    return optimizer


def clip_gradients(model: SmallGPT, max_grad_norm: float) -> None:
    clip_grad_norm_(model.parameters(), max_grad_norm)


def coupled_adamw(model: SmallGPT, settings: Settings) -> torch.optim.Optimizer:
    return CoupledAdamW(
        model,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def train(
    model: SmallGPT,
    optimizer: torch.optim.Optimizer,
    windows: Tensor,  # (steps, B, T + 1)
    settings: Settings,
    on_step: Callable[[str, int, float], None],
) -> list[Record]:
    """Take one step for each batch of windows; a record at the start, every 10 steps and at the end."""
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))
    initial_ratio = mean_embedding_ratio(model.wte.weight)
    records: list[Record] = []
    losses: list[float] = []
    for step, batch in enumerate(windows, start=1):
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 1:
            records.append(Record(0, losses[0], initial_ratio))
        if step % RECORD_EVERY == 0 or step == settings.steps:
            records.append(Record(step, fmean(losses), mean_embedding_ratio(model.wte.weight)))
            losses.clear()
        on_step(type(optimizer).__name__, step, loss.item())
    return records


def learning_rate_factor(step: int, steps: int) -> float:
    """The part of the peak learning rate used for the update after `step` updates."""
    warmup = math.ceil(steps / 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def random_windows(tokens: Tensor, settings: Settings) -> Tensor:  # (N,) -> (steps, B, T + 1)
    generator = torch.Generator().manual_seed(settings.seed)
    places = len(tokens) - settings.context
    starts = torch.randint(places, (settings.steps, settings.batch, 1), generator=generator)
    return tokens[starts + torch.arange(settings.context + 1)]


def consecutive_windows(tokens: Tensor, context: int) -> Tensor:  # (M,) -> (windows, T + 1)
    """Windows in which each token but the first is predicted once; what is left at the end is dropped."""
    return tokens.unfold(0, context + 1, context)


@torch.no_grad()
def validation_loss(model: SmallGPT, windows: Tensor) -> float:
    total = sum(model.loss(batch).item() * len(batch) for batch in windows.split(VALIDATION_BATCH))
    return total / len(windows)


def mean_embedding_ratio(table: Tensor) -> float:  # (V, H)
    """Norm of the mean embedding over the mean norm of the embeddings: 0 when they are centred, at most 1."""
    embeddings = table.detach().double()
    return float(embeddings.mean(dim=0).norm() / embeddings.norm(dim=1).mean())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.itemsize
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
