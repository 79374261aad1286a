"""Pseudo-training: the next gradients of a run at a learning rate of zero, separately for both uses of a tied table.

A tied table gets a gradient from the head and one from the token lookup, and autograd adds them. Here the head uses a
second leaf that shares the table's memory, so that each use has its own gradient.

Letters: V rows of a table, H width, B samples of a batch, T context, b samples at once.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.loss import linear_cross_entropy
from coupled_adam.optimizer.clipping import clip_factor, square_norm

# Enough to keep a device busy, but small enough for the activations and gradients of a pass.
TOKENS_AT_ONCE = {"cpu": 2**12, "cuda": 2**15}


@dataclass(frozen=True, eq=False)
class BatchGradients:
    """The clipped gradients of the mean loss of one batch."""

    output: Tensor  # (V, H), from the head
    input: Tensor  # (V, H), from the token lookup
    loss: float
    clip_factor: float


class PseudoTraining:
    """Computes gradients of a model without changing it.

    Args:
        model: on its device.
        max_grad_norm: as in training, over all gradients, with those of a tied table added; 0 for no clipping.
        z_loss: as in training.
        autocast: the context of the forward pass.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_grad_norm: float,
        z_loss: float = 0.0,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model = model
        self.max_grad_norm = max_grad_norm or math.inf
        self.z_loss = z_loss
        self.autocast = autocast
        self.input_table = model.get_parameter(model.input_table_name)
        self.output_table = model.get_parameter(model.output_table_name).detach().requires_grad_()
        tables = {model.input_table_name, model.output_table_name}
        self.others = [parameter for name, parameter in model.named_parameters() if name not in tables]

    def gradients(self, windows: Tensor, on_hidden: Callable[[Tensor, Tensor], None]) -> BatchGradients:
        """Compute the gradients of one batch, in pieces that fit into memory.

        Args:
            windows: (B, T + 1) int64.
            on_hidden: called for each piece with the input of the head (b T, H) and the targets (b T,).
        """
        device = self.input_table.device
        at_once = max(1, TOKENS_AT_ONCE.get(device.type, TOKENS_AT_ONCE["cuda"]) // (windows.shape[1] - 1))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for piece in windows.to(device).split(at_once):
            targets = piece[:, 1:].flatten()
            with self.autocast():
                hidden = self.model.hidden_states(piece[:, :-1]).flatten(0, 1)
                mean = linear_cross_entropy(
                    hidden, self.output_table, targets, bias=self.model.lm_head.bias, z_loss=self.z_loss
                )
            share = mean * (len(piece) / len(windows))
            share.backward()
            loss += share.detach()
            on_hidden(hidden.detach(), targets)
        return self._clipped(loss)

    def _clipped(self, loss: Tensor) -> BatchGradients:
        output, input = self.output_table.grad, self.input_table.grad
        assert output is not None
        assert input is not None
        tables = [output + input] if self.model.config.tied else [output, input]
        grads = [parameter.grad for parameter in self.others if parameter.grad is not None]
        _, factor = clip_factor(square_norm(tables + grads), None, self.max_grad_norm)
        for parameter in (self.output_table, *self.model.parameters()):
            parameter.grad = None
        return BatchGradients(output.mul_(factor), input.mul_(factor), float(loss), float(factor))
