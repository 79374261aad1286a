"""A literal Muon in float64, one matrix at a time: the reference for BatchedMuon."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(G: Tensor, coefficients: Sequence[float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7) -> Tensor:
    a, b, c = coefficients
    identity = torch.eye(min(G.shape), dtype=G.dtype)
    X = G if G.shape[0] <= G.shape[1] else G.T
    X = X / max(X.pow(2).sum().sqrt().item(), eps)
    for _ in range(steps):
        A = X @ X.T
        X = (a * identity + b * A + c * A @ A) @ X
    return X if G.shape[0] <= G.shape[1] else G.new_tensor(X.T.tolist())


def muon_reference(
    start: Tensor,
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ratio: float = 1.0,
    coefficients: Sequence[float] = COEFFICIENTS,
    steps: int = 5,
) -> tuple[Tensor, Tensor]:
    """Parameter and momentum after the gradients; `ratio` multiplies the learning rate of the update alone."""
    theta, B = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for gradient in gradients:
        g = gradient.double()
        B = momentum * B + (1 - momentum) * g
        update = momentum * B + (1 - momentum) * g if nesterov else B
        theta = theta - lr * weight_decay * theta - lr * ratio * newton_schulz(update, coefficients, steps)
    return theta, B


def matrices(*shapes: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients_like(params: Sequence[Tensor], steps: int, seed: int = 100) -> list[list[Tensor]]:
    """The gradient of each parameter, for each step."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in params] for _ in range(steps)]


def run(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], gradients: Sequence[Sequence[Tensor]]
) -> None:
    for step in gradients:
        for p, gradient in zip(params, step, strict=True):
            p.grad = gradient.to(p.device).clone()
        optimizer.step()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation, relative to the largest element."""
    deviation = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    return (deviation / expected.detach().abs().max().cpu().double()).item()


def assert_follows_reference(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    starts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    *,
    lr: float,
    nesterov: bool,
    adjust: str | None,
    momentum_error: float,
) -> None:
    """Assert that parameters agree with `muon_reference` to 1e-5, and momenta to `momentum_error`, from `starts`."""
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        A, B = p.shape
        ratio = 0.2 * math.sqrt(max(A, B)) if adjust == "match_rms_adamw" else math.sqrt(max(1, A / B))
        own = [step[i] for step in gradients]
        expected, momentum = muon_reference(start, own, lr=lr, nesterov=nesterov, ratio=ratio)
        assert relative_error(p, expected) < 1e-5
        assert relative_error(optimizer.state[p]["momentum_buffer"], momentum) < momentum_error
