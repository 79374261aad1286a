"""The expected models of the examples after training, and comparisons with them.

The reference is torch.optim.AdamW for all parameters except one table, and the float64 Algorithm 1 for that table; it
never uses CoupledAdamW.

Legend: V vocabulary rows, H hidden size.
"""

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coupled_adam.optimizer.reference import ReferenceState, reference_init, reference_step

H = 16  # of every model in the page
BETAS: dict[str, Any] = {"betas": (0.9, 0.95), "rest_betas": (0.9, 0.95)}
"""The paper's betas, for the table and for all other weights."""


class Trained(NamedTuple):
    """Results of a training besides the weights."""

    table: ReferenceState
    rest: torch.optim.AdamW


def fresh_model(**options: Any) -> nn.Module:
    """Build the same model as an example, which starts from seed 0."""
    from tiny import LanguageModel

    torch.manual_seed(0)
    return LanguageModel(**options)


def tokens_of(steps: int, seed: int = 0) -> list[Tensor]:
    from tiny import batches

    return list(batches(steps, seed))


def train_by_algorithm_1(
    model: nn.Module,
    tokens: Iterable[Tensor],
    *,
    table: str = "embedding.weight",
    loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
    rest_betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 1e-2,
    max_norm: float | None = None,
    learning_rates: Iterable[float] | None = None,
    adamw: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Trained:
    """Train one table by the literal Algorithm 1 and the rest by torch's AdamW, continuing from `adamw` if given.

    `options` are those of the table, as in `reference_step`; `rest_betas` are those of the other weights.
    """
    from tiny import loss_of as loss_of_tiny

    loss_of = loss_of or loss_of_tiny
    weight = model.get_parameter(table)
    others = {name: p for name, p in model.named_parameters() if p is not weight}
    decayed = [p for name, p in others.items() if p.ndim == 2 and "embed" not in name]
    undecayed = [p for name, p in others.items() if p.ndim != 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed}]
    rest = torch.optim.AdamW(groups, betas=rest_betas, weight_decay=0)
    state = reference_init(weight)
    if adamw is not None:
        rest.state.update({p: copy.deepcopy(adamw.state[p]) for p in others.values()})
        old = adamw.state[weight]
        state = ReferenceState(
            weight.detach().double(), old["exp_avg"].double(), old["exp_avg_sq"].double(), int(old["step"])
        )
    tokens = list(tokens)
    for batch, lr in zip(tokens, learning_rates or [1e-3] * len(tokens), strict=True):
        model.zero_grad()
        loss_of(model, batch).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in rest.param_groups:
            group["lr"] = lr
        rest.step()
        state = reference_step(state, weight.grad, lr=lr, **options)
        weight.data.copy_(state.embeddings)
    return Trained(state, rest)


def assert_same_weights(model: nn.Module, expected: nn.Module, atol: float = 2e-6) -> None:
    for (name, actual), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        difference = (local(actual) - part_of(wanted, actual)).abs().max().item()
        assert difference < atol, f"{name} differs by {difference}"


def assert_coupled(optimizer: torch.optim.Optimizer, table: Tensor, steps: int) -> None:
    state = optimizer.state[table]
    assert state["exp_avg"].shape == table.shape
    assert tuple(state["exp_avg_sq"].shape) == (1, H)
    assert state["exp_avg_sq"].dtype == torch.float32
    assert state["step"].item() == steps
    coupled = {p for group in optimizer.param_groups if group.get("coupled") for p in group["params"]}
    assert table in coupled


def assert_second_moment(optimizer: torch.optim.Optimizer, table: Tensor, expected: Trained) -> None:
    average = expected.table.second_moment.mean(dim=0, keepdim=True).float()  # (1, H)
    torch.testing.assert_close(local(optimizer.state[table]["exp_avg_sq"]), average, rtol=1e-4, atol=1e-12)


def local(tensor: Tensor) -> Tensor:
    """This rank's part; nothing is gathered, because the process group may already be destroyed."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().cpu()


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor that corresponds to this rank's part of `like`, sharded by rows or not at all."""
    if not hasattr(like, "placements") or like.placements[0].is_replicate():
        return whole.detach()
    assert like.placements[0].is_shard(0), like.placements
    return whole.detach().chunk(int(os.environ["WORLD_SIZE"]))[int(os.environ["RANK"])]
