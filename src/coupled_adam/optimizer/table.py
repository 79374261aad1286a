"""A coupled table during a step: its local tensors and the hyperparameters of its group.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.stochastic_rounding import Rounding


def sum_dtype(device: torch.device) -> torch.dtype:
    """Dtype for sums of squares: float64, because squares of finite float32 gradients overflow float32.

    Example:
        >>> sum_dtype(torch.device("cpu"))
        torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def needs_row_moments(group: dict[str, Any]) -> bool:
    """Whether the tables of a group need `row_avg_sq`. A tensor exponent may become nonzero at any time."""
    row_exponent = group["row_exponent"]
    return isinstance(row_exponent, Tensor) or row_exponent != 0


def needs_first_moment(group: dict[str, Any]) -> bool:
    """Whether the tables of a group need `exp_avg`. With beta1 = 0, m_t is the gradient itself.

    Example:
        >>> needs_first_moment({"betas": (0.9, 0.99)}), needs_first_moment({"betas": (0.0, 0.99)})
        (True, False)
    """
    beta1 = group["betas"][0]
    return isinstance(beta1, Tensor) or beta1 != 0  # a tensor may become nonzero at any time


@dataclass(slots=True)
class Hyperparameters:
    """The hyperparameters of a group in the coupled update."""

    lr: float | Tensor
    """Learning rate; a tensor stays on its device."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decoupled, as in AdamW."""
    second_moment_scale: float
    """2^-n of the scaled variant; 1 is the paper's method."""
    maximize: bool
    row_exponent: float | Tensor = 0.0
    """y: how much of its own second moment a row keeps; a tensor stays on its device."""
    column_exponent: float | Tensor = 1.0
    """x: how much of its own second moment a column keeps; a tensor stays on its device."""
    mean_free: bool = False
    """Whether to subtract the mean update over the vocabulary."""

    @classmethod
    def from_group(cls, group: dict[str, Any]) -> "Hyperparameters":
        """Read the hyperparameters from a torch parameter group.

        Example:
            >>> from torch import nn
            >>> from coupled_adam import CoupledAdamW
            >>> optimizer = CoupledAdamW(nn.Embedding(4, 2), lr=0.5, scale_exponent=1)
            >>> Hyperparameters.from_group(optimizer.param_groups[0]).second_moment_scale
            0.5
        """
        beta1, beta2 = group["betas"]
        return cls(
            lr=_number(group, "lr"),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            second_moment_scale=2.0 ** -group["scale_exponent"],
            maximize=group["maximize"],
            row_exponent=_number(group, "row_exponent"),
            column_exponent=_number(group, "column_exponent"),
            mean_free=group["mean_free"],
        )

    def on(self, device: torch.device) -> "Hyperparameters":
        """Return the same hyperparameters with tensors moved to the device of the table."""
        numbers = (self.lr, self.row_exponent, self.column_exponent)
        if all(number.device == device for number in numbers if isinstance(number, Tensor)):
            return self
        lr, row_exponent, column_exponent = (
            number.to(device) if isinstance(number, Tensor) else number for number in numbers
        )
        return replace(self, lr=lr, row_exponent=row_exponent, column_exponent=column_exponent)


def _number(group: dict[str, Any], option: str) -> float | Tensor:
    """Return an option that may change between steps: a number, or a tensor that kernels read on its device."""
    value = group[option]
    if isinstance(value, Tensor) and value.device.type == "cpu" and not torch.compiler.is_compiling():
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{option} is a tensor on the CPU, whose current value a CUDA graph would keep forever; "
                f"put it on the device of the table: {option}=torch.tensor(..., device='cuda')"
            )
        value = value.item()
    return value if isinstance(value, Tensor) else float(value)


@dataclass(slots=True)
class Table:
    """A coupled parameter during a step. All tensors are this rank's parts."""

    rows: int
    """Rows over which means are taken: V of the whole table, over all ranks, without padding."""
    param: Tensor  # (V, H)
    grad: Tensor  # (V, H)
    exp_avg: Tensor | None  # (V, H); None if beta1 = 0, where the gradient takes its place
    exp_avg_sq: Tensor  # (1, H) float32
    step: Tensor
    """t - 1 before the update, t after it; on the host, or on the device if fused or capturable."""
    hyper: Hyperparameters
    width: int
    """H of the whole table, over all ranks."""
    real_rows: int
    """Number of first rows of this rank's part that are not padding."""
    row_avg_sq: Tensor | None = None  # (V, 1) float32, present once row_exponent was not zero
    rounding: Rounding | None = None
    """Stochastic rounding of a bfloat16 `exp_avg`; None means rounding to nearest."""

    @property
    def is_coupled_adam(self) -> bool:
        """Whether this is the paper's method: no row moments, column exponent 1, no mean_free."""
        x = self.hyper.column_exponent
        return self.row_avg_sq is None and not self.hyper.mean_free and not isinstance(x, Tensor) and x == 1.0
