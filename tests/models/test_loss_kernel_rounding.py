"""The loss kernel with a multiply-add that rounds once, as on a GPU and in the interpreter of Triton 3.9 and newer."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if torch.cuda.is_available():
    pytest.skip("the kernels run on the GPU, not in the interpreter", allow_module_level=True)
pytest.importorskip("triton")
from triton.runtime import interpreter

from coupled_adam.models import loss_kernels


def rounded_once(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z: the product of two float32 numbers is exact in float64."""
    total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def test_losses_at_large_logits_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", rounded_once)
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 40:] += torch.linspace(300.0, 1000.0, 8)[:, None]
    targets = torch.arange(40, 48)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = torch.empty(8)
    loss_kernels.cross_entropy(logits, targets, losses, None, 0.0, -100, True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=0, atol=3e-6)
    # The gradient is relative to the logsumexp, which float32 rounds by up to 3e-5 at 1000.
    torch.testing.assert_close(logits.double(), exact.grad, rtol=0, atol=3e-5)
