"""Cases in which CoupledAdamW must agree with torch.optim.AdamW: identical rows, and every standard group."""

import copy
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, run, table
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, param_groups

FLAGS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"maximize": True},
    {"lr": torch.tensor(0.01), "foreach": False},
    {"betas": (torch.tensor(0.8), torch.tensor(0.99)), "foreach": False},
    {"eps": 1e-3, "betas": (0.5, 0.7)},
]


class LanguageModel(nn.Module):
    """A small model with a tied table, a matrix, a bias and a norm."""

    def __init__(self, V: int = 23, H: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.hidden = nn.Linear(H, H)
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens) + self.hidden(self.embedding(tokens)).tanh()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5, clip: float | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 23, (4, 9), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"betas": (0.8, 0.9), "eps": 1e-4}], ids=str)
def test_identical_rows_are_updated_as_by_adamw(options: dict[str, Any]) -> None:
    options = {"weight_decay": 0.0, "lr": 0.1, **options}
    param = table((17, 5))
    other = copy.deepcopy(param)
    grads = [row[:1].expand(17, 5) * 1e3 for row in gradients((17, 5), 8)]
    run(coupled(param, **options), param, grads)
    run(torch.optim.AdamW([other], **options), other, grads)
    torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_standard_groups_are_bitwise_equal_to_adamw(flags: dict[str, Any]) -> None:
    """With the same gradients, a coupled table must not change a single bit of the other parameters."""
    names = ("hidden.weight", "hidden.bias", "norm.weight")
    mine = {name: nn.Parameter(torch.randn(6, 6)) for name in names}
    theirs = copy.deepcopy(mine)
    beside = table((23, 6))
    groups: list[dict[str, Any]] = [
        {"params": [mine["hidden.weight"]], "weight_decay": 0.1},
        {"params": [beside], "coupled": True},
        {"params": [mine["hidden.bias"], mine["norm.weight"]], "weight_decay": 0.0, "lr": flags.get("lr", 0.02)},
    ]
    optimizer = CoupledAdamW(groups, **flags)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["hidden.weight"]], "weight_decay": 0.1},
            {
                "params": [theirs["hidden.bias"], theirs["norm.weight"]],
                "weight_decay": 0.0,
                "lr": flags.get("lr", 0.02),
            },
        ],
        **flags,
    )
    for _ in range(6):
        beside.grad = torch.randn(23, 6)
        for name in names:
            mine[name].grad = torch.randn(6, 6)
            theirs[name].grad = mine[name].grad.clone()
        optimizer.step()
        reference.step()
    for name in names:
        assert torch.equal(mine[name], theirs[name])
        for key, value in reference.state[theirs[name]].items():
            assert torch.equal(optimizer.state[mine[name]][key], value)


def test_complex_parameters_in_standard_groups_are_left_to_torch() -> None:
    mine = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    theirs = copy.deepcopy(mine)
    beside = table((5, 2))
    optimizer = CoupledAdamW([{"params": [mine]}, {"params": [beside], "coupled": True}])
    reference = torch.optim.AdamW([theirs])
    for _ in range(3):
        mine.grad = torch.randn(4, dtype=torch.complex64)
        theirs.grad = mine.grad.clone()
        beside.grad = torch.randn(5, 2)
        optimizer.step()
        reference.step()
    assert torch.equal(mine, theirs)


def test_step_hooks_and_closures_run_once_after_an_adamw_was_built(model: LanguageModel) -> None:
    """torch patches AdamW.step with hooks when an AdamW is built; a subclass that called it would run them twice."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    optimizer = CoupledAdamW(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        calls.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2, 3]])).logsumexp(-1).mean()
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)
    assert calls == ["before", "closure", "after"]
    assert optimizer.state[model.embedding.weight]["step"].item() == 1


def test_it_is_an_adamw_with_torch_defaults(model: LanguageModel) -> None:
    optimizer = CoupledAdamW(model)
    assert isinstance(optimizer, torch.optim.AdamW)
    for key, value in torch.optim.AdamW(model.parameters()).defaults.items():
        assert optimizer.defaults[key] == value


def test_baseline_groups_differ_from_coupled_ones_only_in_the_table(model: LanguageModel) -> None:
    """After one step from the same state, every parameter except the table is bitwise equal."""
    other = copy.deepcopy(model)
    train(model, CoupledAdamW(model, weight_decay=0.1), steps=1)
    train(other, torch.optim.AdamW(param_groups(other, 0.1, couple="none")), steps=1)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs) == (name != "embedding.weight")
