"""Tables in the middle of training, one step of the family of second moments, and comparisons up to rounding."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.family_blockwise import FirstPass
from coupled_adam.optimizer.table import Hyperparameters, Table

HYPER: dict[str, Any] = {
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "second_moment_scale": 1.0,
    "maximize": False,
    "row_exponent": 0.25,
    "column_exponent": 1.0,
    "mean_free": True,
}


def make_table(
    shape: tuple[int, int],
    *,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
    size: float = 1.0,
    padding: int = 0,
    row_moment: bool = True,
    momentum: bool = True,
    step: int = 3,
    **hyper: Any,
) -> Table:
    """A table in the middle of training, whose rows differ by orders of magnitude. Without momentum, beta1 is 0."""
    generator = torch.Generator().manual_seed(sum(shape))
    V, H = shape
    scale = torch.logspace(-4, 0, V).unsqueeze(1)

    def random() -> Tensor:
        return torch.randn(V, H, generator=generator) * scale

    param, grad, moment = random(), random() * size, random() * 0.1
    if not momentum:
        hyper["beta1"] = 0.0
    return Table(
        rows=max(V - padding, 1),
        param=param.to(dtypes[0]),
        grad=grad.to(dtypes[1]),
        exp_avg=moment.to(dtypes[2]) if momentum else None,
        exp_avg_sq=torch.rand(1, H, generator=generator) * 0.1,
        step=torch.tensor(float(step)),
        hyper=Hyperparameters(**{**HYPER, **hyper}),
        width=H,
        real_rows=V - padding,
        row_avg_sq=torch.rand(V, 1, generator=generator) * scale.square() if row_moment else None,
    )


def close(value: Tensor | None, expected: Tensor | None, rtol: float = 2e-6) -> None:
    """Assert that tensors are equal up to rounding."""
    if value is None or expected is None:
        assert value is expected
        return
    assert value.shape == expected.shape
    assert value.dtype == expected.dtype
    value, expected = value.double(), expected.double()
    finite = expected[expected.isfinite()].abs()
    # The rounding error of sums and differences is proportional to the size of their terms.
    largest = float(finite.max()) if finite.numel() else 0.0
    torch.testing.assert_close(value, expected, rtol=rtol, atol=rtol * 0.1 * largest, equal_nan=True)


def close_state(value: Table, expected: Table) -> None:
    for name in ("param", "exp_avg", "exp_avg_sq", "row_avg_sq", "step"):
        close(getattr(value, name), getattr(expected, name))


def moment_of(table: Table, factor: float) -> Tensor:
    """m_t of a table after its update."""
    return table.grad * factor if table.exp_avg is None else table.exp_avg


def total(sums: Tensor) -> Tensor:
    return sums.sum(dim=0, keepdim=True)


def close_sums(value: Tensor, expected: Tensor, terms: Tensor) -> None:
    """Compare sums of terms of both signs; their rounding error is proportional to the size of the terms."""
    assert value.dtype == expected.dtype == torch.float64
    bound = 1e-6 * terms.double().abs().sum(dim=0, keepdim=True) + 1e-300
    assert bool(((total(value) - total(expected)).abs() <= bound).all())


def step_without_clipping(kernels: ModuleType, table: Table, factor: Tensor | None = None, **options: Any) -> FirstPass:
    sums: FirstPass = kernels.first_pass(table, factor, **options)
    kernels.advance_column_moment(table, sums.column_sums, factor, **options)
    coefficient, offset = kernels.coefficients(table, sums.weighted_sums if table.hyper.mean_free else None, None)
    kernels.move_rows(table, coefficient, sums.row_factor, offset, factor, **options)
    return sums


def step_with_clipping(kernels: ModuleType, table: Table, factor: Tensor | None = None, **options: Any) -> None:
    column_sums, row_sums = kernels.square_sums(table)
    row_factor = None if row_sums is None else kernels.advance_row_moment(table, row_sums, factor, **options)
    kernels.advance_column_moment(table, column_sums, factor, **options)
    if table.hyper.mean_free:
        weighted_sums = kernels.advance_first_moment(table, row_factor, factor, **options)
        coefficient, offset = kernels.coefficients(table, weighted_sums, None)
        kernels.move_rows(table, coefficient, row_factor, offset, factor, **options)
    else:
        coefficient, _ = kernels.coefficients(table, None, None)
        kernels.apply_update(table, coefficient, row_factor, factor, **options)
