"""Corners of the family of second moments, compared with other implementations and with their literal equations.

(x, y) are the column and the row exponent. (1, 1) is Adafactor's factored second moment. torch.optim.Adafactor adds its
own decay, clipping and step size; they are set here so that only the second moment matters.
"""

import math

import pytest
import torch
from torch import Tensor

from coupled_adam import CoupledAdamW

V, H, STEPS = 23, 7, 6
BETA2, LR = 0.95, 1e-3


def gradients() -> list[Tensor]:
    """Rows and columns of very different sizes, like those of frequent and rare tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.logspace(0, -3, V, dtype=torch.float64)[:, None]
    columns = torch.logspace(0, 1, H, dtype=torch.float64)[None]
    return [rows * columns * torch.randn(V, H, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def ours(*, x: float, y: float, beta1: float = 0.0, given: list[Tensor] | None = None) -> list[Tensor]:
    """Updates of a member of the family, step by step."""
    table = torch.nn.Parameter(torch.zeros(V, H, dtype=torch.float64))
    group = {"params": [table], "coupled": True, "column_exponent": x, "row_exponent": y}
    optimizer = CoupledAdamW([group], lr=LR, betas=(beta1, BETA2), eps=1e-300, weight_decay=0.0)
    updates = []
    for gradient in given or gradients():
        before = table.detach().clone()
        table.grad = gradient.clone()
        optimizer.step()
        updates.append(table.detach() - before)
    return updates


def torchs_adafactor() -> list[Tensor]:
    """The updates of torch.optim.Adafactor without its clipping (d), with the step size lr (eps2 above the RMS of the
    parameters) and with the decay beta2 at every step: its own is 1 - t^-0.8, so t is set to where that is beta2."""
    table = torch.nn.Parameter(torch.zeros(V, H, dtype=torch.float64))
    optimizer = torch.optim.Adafactor(
        [table], lr=LR, beta2_decay=-0.8, eps=(1e-150, 1.0), d=1e30, weight_decay=0.0, foreach=False
    )
    table.grad = torch.zeros_like(table)
    optimizer.step()  # creates the state; a zero gradient moves nothing
    step = (1 - BETA2) ** (-1 / 0.8)
    updates = []
    for gradient in gradients():
        before = table.detach().clone()
        table.grad = gradient.clone()
        optimizer.state[table]["step"] = torch.tensor(step - 1, dtype=torch.float64)
        optimizer.step()
        updates.append(table.detach() - before)
    return updates


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch before 2.5 has no Adafactor")
def test_factored_member_without_momentum_equals_torch_adafactor_up_to_bias_correction() -> None:
    for t, (own, theirs) in enumerate(zip(ours(x=1.0, y=1.0), torchs_adafactor(), strict=True), 1):
        # Adam divides the second moment by 1 - beta2^t; Adafactor with a fixed decay does not.
        torch.testing.assert_close(own, theirs * math.sqrt(1 - BETA2**t), rtol=1e-9, atol=0)


CORNERS = {
    # The second moment of row i and column j, from the mean squares r of rows, c of columns and m of the table.
    "coupled": (1.0, 0.0, lambda r, c, m: c.expand(V, H)),
    "factored": (1.0, 1.0, lambda r, c, m: r * c / m),
    "one number a row": (0.0, 1.0, lambda r, c, m: r.expand(V, H)),
    "one number a table": (0.0, 0.0, lambda r, c, m: m.expand(V, H)),
}


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize(("x", "y", "moment"), CORNERS.values(), ids=CORNERS)
def test_each_corner_of_the_family_follows_its_equation(x: float, y: float, moment, beta1: float) -> None:
    r = torch.zeros(V, 1, dtype=torch.float64)
    c = torch.zeros(1, H, dtype=torch.float64)
    m = torch.zeros(1, 1, dtype=torch.float64)
    first = torch.zeros(V, H, dtype=torch.float64)
    for t, (gradient, update) in enumerate(zip(gradients(), ours(x=x, y=y, beta1=beta1), strict=True), 1):
        square = gradient**2
        r = BETA2 * r + (1 - BETA2) * square.mean(1, keepdim=True)
        c = BETA2 * c + (1 - BETA2) * square.mean(0, keepdim=True)
        m = BETA2 * m + (1 - BETA2) * square.mean()
        first = beta1 * first + (1 - beta1) * gradient
        v = moment(r, c, m) / (1 - BETA2**t)
        expected = -LR * first / (1 - beta1**t) / v.sqrt()
        torch.testing.assert_close(update, expected, rtol=1e-9, atol=0)


def embers(gradients: list[Tensor]) -> list[Tensor]:
    """Updates of Ember from its literal equations: columns are averaged over the rows that have a gradient."""
    r = torch.zeros(V, 1, dtype=torch.float64)
    c = torch.zeros(1, H, dtype=torch.float64)
    updates = []
    for t, gradient in enumerate(gradients, 1):
        active = gradient.ne(0).any(dim=1).sum()
        r = BETA2 * r + (1 - BETA2) * gradient.square().mean(dim=1, keepdim=True)
        c = BETA2 * c + (1 - BETA2) * gradient.square().sum(dim=0, keepdim=True) / active
        correction = 1 - BETA2**t
        updates.append(-LR * gradient / torch.sqrt((r / correction) * (c / correction) / (r / correction).mean()))
    return updates


@pytest.mark.parametrize("absent", [0, 10])
def test_factored_member_without_momentum_equals_ember_up_to_the_share_of_active_rows(
    absent: int,
) -> None:
    whole = gradients()
    for gradient in whole:
        gradient[V - absent :] = 0
    for own, theirs in zip(ours(x=1.0, y=1.0, given=whole), embers(whole), strict=True):
        present = slice(V - absent)
        torch.testing.assert_close(own[present], theirs[present] * math.sqrt(V / (V - absent)), rtol=1e-9, atol=0)
        assert not own[V - absent :].any()
