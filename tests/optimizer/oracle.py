"""Compare an optimizer with the literal Algorithm 1 in float64."""

from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import ReferenceState, reference_init, reference_step

# Rounding error of a chain of float32 operations over ten steps; narrower dtypes also round the parameter itself.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(
    shape: tuple[int, int], steps: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Gradients whose rows differ by orders of magnitude, like those of frequent and rare tokens."""
    generator = torch.Generator().manual_seed(sum(shape))
    scale = torch.logspace(-4, 0, shape[0]).unsqueeze(1)
    return [(torch.randn(shape, generator=generator) * scale).to(device, dtype) for _ in range(steps)]


def table(shape: tuple[int, int], dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))


def coupled(param: nn.Parameter, **options: Any) -> CoupledAdamW:
    """CoupledAdamW on one table."""
    return CoupledAdamW([{"params": [param], "coupled": True}], **{"weight_decay": 0.0, **options})


def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


def oracle(param: Tensor, grads: list[Tensor], **options: Any) -> ReferenceState:
    state = reference_init(param)
    for grad in grads:
        state = reference_step(state, grad, **options)
    return state


def relative_error(value: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double().cpu()
    difference = value.detach().double().cpu() - expected
    return float(difference.norm() / expected.norm())


def assert_first_moment(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, expected: ReferenceState, tolerance: float
) -> None:
    """Assert that the first moment agrees with the oracle, or that there is none with beta1 = 0."""
    state, group = optimizer.state[param], next(g for g in optimizer.param_groups if param in set(g["params"]))
    assert ("exp_avg" in state) == (group["betas"][0] != 0)
    if "exp_avg" in state:
        assert relative_error(state["exp_avg"], expected.first_moment) < tolerance


def assert_matches(optimizer: torch.optim.Optimizer, param: nn.Parameter, expected: ReferenceState) -> None:
    """Assert that embeddings, any first moment, row-averaged second moment and step count agree with the oracle."""
    tolerance = TOLERANCE[param.dtype]
    state = optimizer.state[param]
    assert relative_error(param, expected.embeddings) < tolerance
    assert_first_moment(optimizer, param, expected, max(tolerance, 1e-6 if param.dtype != torch.float64 else 0))
    second_moment_tolerance = 1e-13 if param.dtype == torch.float64 else 1e-6
    assert relative_error(state["exp_avg_sq"], expected.second_moment.mean(0, keepdim=True)) < second_moment_tolerance
    assert state["step"].item() == expected.step
