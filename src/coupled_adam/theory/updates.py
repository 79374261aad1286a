"""Updates of a table by SGD, Adam and Coupled Adam from the same state, and their sums over the rows; and those of the
run's own optimizer, if it is another member of the family of second moments.

The state is built from zero, from gradients in separate parts: "output" from the head, and "input" from the token
lookup; in a tied table they are one gradient. First moments and momentum are linear, so they have the same parts; the
second moment is that of the whole gradient. After k gradients, at a learning rate of one:

    sgd        u = -b                                          b = momentum * b + g
    adam       u = -mhat / (sqrt(vhat) + eps)                  mhat = m / (1 - beta1^k), vhat = v / (1 - beta2^k)
    coupled    u = -mhat / (sqrt(mean_i vhat_i) + eps)
    own        u = -mhat / d, d the denominator of the family in float64; mean-free: minus the mean over the vocabulary

Letters: V rows of the table, padding included, H width, k gradients so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coupled_adam.optimizer.reference import family_denominator
from coupled_adam.theory.record import Optimizer, UpdateSum
from coupled_adam.training.embedding_monitor import row_sums

Part = Literal["output", "input"]
LayerParts = Mapping[Part, Tensor]
"""Parts of a gradient or update, (V, H) each; an untied table has one part."""


@dataclass(frozen=True)
class Member:
    """A member of the family of second moments, at one step of its run."""

    scale_exponent: float
    column_exponent: float
    row_exponent: float
    mean_free: bool
    vocabulary_size: int
    """Later rows are padding and excluded from all means."""


class TableState:
    """State of the optimizers for one table."""

    def __init__(
        self, *, betas: tuple[float, float], eps: float, momentum: float, member: Member | None = None
    ) -> None:
        self.member = member
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.momentum = momentum
        self.k = 0
        self.first: dict[Part, Tensor] = {}  # m  (V, H) each
        self.second = torch.empty(0)  # v  (V, H)
        self.buffers: dict[Part, Tensor] = {}  # b  (V, H) each

    def add(self, gradient: LayerParts) -> None:
        """Add the clipped gradient of one batch."""
        if self.k == 0:
            self.first = {part: torch.zeros_like(g) for part, g in gradient.items()}
            self.buffers = {part: torch.zeros_like(g) for part, g in gradient.items()}
            self.second = torch.zeros_like(whole(gradient))
        self.k += 1
        for part, g in gradient.items():
            self.first[part].lerp_(g, 1 - self.beta1)
            self.buffers[part].mul_(self.momentum).add_(g)
        g = whole(gradient)
        self.second.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)

    def second_moment(self) -> Tensor:
        """vhat averaged over H, (V,): the paper's E[v_i]."""
        return self.second.mean(dim=1, dtype=torch.float64) / (1 - self.beta2**self.k)

    def update(self, optimizer: Optimizer) -> dict[Part, Tensor]:
        """Return u in its parts."""
        if optimizer == "sgd":
            return {part: -b for part, b in self.buffers.items()}
        if optimizer == "own":
            return self._own_update()
        # The mean commutes with the bias correction.
        v = self.second if optimizer == "adam" else self.second.mean(dim=0, keepdim=True)
        denominator = (v / (1 - self.beta2**self.k)).sqrt_().add_(self.eps)  # (V, H) or (1, H)
        return {part: (m / denominator).div_(-(1 - self.beta1**self.k)) for part, m in self.first.items()}

    def _own_update(self) -> dict[Part, Tensor]:
        """u of the member in float64, in its parts; the mean is linear, so it is subtracted from each part."""
        member = self.member
        assert member is not None
        denominator = family_denominator(
            self.second.double() / (1 - self.beta2**self.k),
            eps=self.eps,
            n=member.scale_exponent,
            x=member.column_exponent,
            y=member.row_exponent,
            vocabulary_size=member.vocabulary_size,
        )
        updates = {part: (m / denominator).div_(-(1 - self.beta1**self.k)) for part, m in self.first.items()}
        if member.mean_free:
            for u in updates.values():
                u -= u[: member.vocabulary_size].mean(dim=0)
        return {part: u[: member.vocabulary_size] for part, u in updates.items()}


def whole(parts: LayerParts) -> Tensor:
    """The sum of the parts, (V, H)."""
    first, *others = parts.values()
    return sum(others, start=first)


def update_sum(optimizer: Optimizer, update: LayerParts, mean_embedding: Tensor) -> UpdateSum:
    """Sum an update over the rows of its table.

    Args:
        optimizer: of the update.
        update: u in its parts.
        mean_embedding: mu, (H,) float64.

    Example:
        >>> u = torch.tensor([[3.0, 4.0], [-3.0, 0.0], [0.0, 2.0]])
        >>> update_sum("adam", {"output": u}, torch.tensor([0.0, 1.0], dtype=torch.float64))
        UpdateSum(optimizer='adam', total=0.6, output=0.6, input=0.0, total_norm=6.0, output_norm=6.0, input_norm=0.0,\
 cosine_with_mean=1.0)
    """
    vectors = {part: row_sums(u, len(u), "update")[:-1] for part, u in update.items()}  # (H,) each
    both = whole(update)
    sums = row_sums(both, len(both), "update")  # (H + 1,): sum_i u_i and sum_i |u_i|
    total, length = sums[:-1], float(sums[-1])
    nothing = torch.zeros_like(total)
    total_norm, output_norm, input_norm = (
        float(vector.norm()) for vector in (total, vectors.get("output", nothing), vectors.get("input", nothing))
    )
    norms = total_norm * float(mean_embedding.norm())
    scale = length or 1.0  # all sums are zero if nothing moves
    return UpdateSum(
        optimizer=optimizer,
        total=total_norm / scale,
        output=output_norm / scale,
        input=input_norm / scale,
        total_norm=total_norm,
        output_norm=output_norm,
        input_norm=input_norm,
        cosine_with_mean=float(total @ mean_embedding) / norms if norms else None,
    )


def gradient_sum(gradient: Tensor) -> tuple[float, float]:
    """|sum_i g_i| of a gradient (V, H), relative to sum_i |g_i| and to the Frobenius norm; 0 if all rows are zero.

    Example:
        >>> gradient_sum(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        (0.7142857142857143, 1.0)
    """
    sums = row_sums(gradient, len(gradient), "gradient")
    norm, length, frobenius = float(sums[:-1].norm()), float(sums[-1]), float(gradient.norm())
    return (norm / length, norm / frobenius) if length > 0 else (0.0, 0.0)
