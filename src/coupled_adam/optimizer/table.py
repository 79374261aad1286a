"""One coupled table as a step sees it: the local tensors and the numbers of its group.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums of squares are kept in: float64, since those of finite float32 gradients overflow float32.

    Example:
        >>> sum_dtype(torch.device("cpu"))
        torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


@dataclass(slots=True)
class Hyperparameters:
    """The numbers of one param group that enter the coupled update."""

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

    @classmethod
    def from_group(cls, group: dict[str, Any]) -> "Hyperparameters":
        """Read a torch param group.

        Example:
            >>> from torch import nn
            >>> from coupled_adam import CoupledAdamW
            >>> optimizer = CoupledAdamW(nn.Embedding(4, 2), lr=0.5, scale_exponent=1)
            >>> Hyperparameters.from_group(optimizer.param_groups[0]).second_moment_scale
            0.5
        """
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device.type == "cpu" and not torch.compiler.is_compiling():
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "lr is a tensor on the CPU, whose value a CUDA graph would keep for ever; "
                    "put it on the device of the table: lr=torch.tensor(..., device='cuda')"
                )
            lr = lr.item()
        if not isinstance(lr, Tensor):
            lr = float(lr)
        beta1, beta2 = group["betas"]
        return cls(
            lr=lr,
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            second_moment_scale=2.0 ** -group["scale_exponent"],
            maximize=group["maximize"],
        )

    def on(self, device: torch.device) -> "Hyperparameters":
        """The same with a learning rate in a tensor brought to the device of the table."""
        if isinstance(self.lr, Tensor) and self.lr.device != device:
            return replace(self, lr=self.lr.to(device))
        return self


@dataclass(slots=True)
class Table:
    """A coupled parameter during one step. All tensors are this rank's part of it."""

    rows: int
    """V of the whole table, over all ranks."""
    param: Tensor  # (V, H)
    grad: Tensor  # (V, H)
    exp_avg: Tensor  # (V, H)
    exp_avg_sq: Tensor  # (1, H) float32
    step: Tensor
    """t - 1 before the update, t after it; on the host, or on the device when fused or capturable."""
    hyper: Hyperparameters
