"""Checks that run after each example of docs/with-muon.md, by its heading.

The reference is torch.optim.Muon for the matrices, listed by hand, the float64 Algorithm 1 for the output table,
torch.optim.AdamW for the rest, and clip_grad_norm_ before all steps.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from check_registry import Checks, Names
from page_reference import BETAS, assert_coupled, assert_same_weights, fresh_model, tokens_of
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step

CHECKS = Checks()
after = CHECKS.after
MATRIX = "block.1.weight"  # from tiny.py
# Muon multiplies in bfloat16, so the last bit of a gradient can matter; a step is about 5e-3 long.
ATOL = 5e-4


def train_by_muon_and_algorithm_1(
    model: nn.Module,
    tokens: Iterable[Tensor],
    *,
    max_norm: float,
    table: str = "embedding.weight",
    is_matrix: Callable[[str], bool] = lambda name: name == MATRIX,
    loss_of: Callable[[nn.Module, Tensor], Tensor] | None = None,
    lr: float = 1e-3,
    table_lr: float = 1e-3,
    muon_lr: float = 0.02,
    muon_decay: float = 0.1,
    adjust_lr_fn: str | None = None,
    rest_betas: tuple[float, float] = (0.9, 0.999),
    factors: Iterable[float] | None = None,
    **member: Any,
) -> torch.optim.Muon:
    """Train a model as the page does.

    Args:
        member: the member of the family of second moments, for `reference_step`; Coupled Adam by default.
    """
    from tiny import loss_of as loss_of_tiny

    loss_of = loss_of or loss_of_tiny
    weight = model.get_parameter(table)
    matrices = [p for name, p in model.named_parameters() if is_matrix(name)]
    muon = torch.optim.Muon(matrices, weight_decay=muon_decay, adjust_lr_fn=adjust_lr_fn)
    others = [p for name, p in model.named_parameters() if not is_matrix(name) and p is not weight]
    rest = torch.optim.AdamW(others, betas=rest_betas, weight_decay=0.0)
    state = reference_init(weight)
    tokens = list(tokens)
    for batch, factor in zip(tokens, factors or [1.0] * len(tokens), strict=True):
        model.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for optimizer, rate in ((muon, muon_lr), (rest, lr)):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        state = reference_step(state, weight.grad, lr=table_lr * factor, **member)
        weight.data.copy_(state.embeddings)
    return muon


def expected_model(steps: int, max_norm: float = 1.0, **options: Any) -> nn.Module:
    model = fresh_model()
    train_by_muon_and_algorithm_1(model, tokens_of(steps), max_norm=max_norm, **options)
    return model


def assert_trained(model: nn.Module, expected: nn.Module) -> None:
    """Assert the expected matrix, which differs from the initial one by more than the tolerance."""
    assert_same_weights(model, expected, atol=ATOL)
    moved = (expected.get_parameter(MATRIX) - fresh_model().get_parameter(MATRIX)).abs().max()
    assert moved > 10 * ATOL


@after("The whole loop")
def _(names: Names) -> None:
    assert_trained(names["model"], expected_model(5, **BETAS))
    assert_coupled(names["coupled"], names["model"].head.weight, steps=5)
    assert names["muon"].param_groups[0]["param_names"] == [MATRIX]
    # The momentum shows how much gradients were clipped; Muon's step hides it.
    model = fresh_model()
    reference = train_by_muon_and_algorithm_1(model, tokens_of(5), max_norm=1.0, **BETAS)
    mine = names["muon"].state[names["model"].get_parameter(MATRIX)]["momentum_buffer"]
    theirs = reference.state[model.get_parameter(MATRIX)]["momentum_buffer"]
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=1e-5)


@after("Print the matrices")
def _(names: Names) -> None:
    """Nothing to check: the output is already compared with the page."""


@after("Check which matrices Muon has")
def _(names: Names) -> None:
    taken = {p for group in names["muon"].param_groups for p in group["params"]}
    assert {names["model"].embedding.weight, names["model"].head.weight} < taken


@after("Check both optimizers")
def _(names: Names) -> None:
    assert names["muon"].param_groups[0]["param_names"] == [MATRIX]


@after("Recommended settings")
def _(names: Names) -> None:
    member = {"betas": (0.0, 0.99), "row_exponent": 1.0, "mean_free": True}
    expected = expected_model(5, muon_lr=1e-3, table_lr=3e-3, adjust_lr_fn="match_rms_adamw", **member)
    table, before = "embedding.weight", fresh_model().get_parameter("embedding.weight")
    found = names["model"].get_parameter(table)
    torch.testing.assert_close(found, expected.get_parameter(table), rtol=0.0, atol=ATOL)
    assert (found - before).abs().max() > 10 * ATOL
    torch.testing.assert_close(found.mean(0), before.mean(0))
    assert names["muon"].param_groups[0]["param_names"] == [MATRIX]


@after("One schedule for both")
def _(names: Names) -> None:
    factors = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [names["warm_up_and_decay"](step) for step in range(6)] == factors
    assert_trained(names["model"], expected_model(6, max_norm=float("inf"), table_lr=3e-3, factors=factors))


@after("Clip by hand")
def _(names: Names) -> None:
    assert_trained(names["model"], expected_model(3))


@after("Save and resume")
def _(names: Names) -> None:
    """Compare with an uninterrupted run from the weights of the first model."""
    expected = fresh_model()
    tokens = tokens_of(3, seed=0) + tokens_of(3, seed=1)
    train_by_muon_and_algorithm_1(expected, tokens, max_norm=1.0)
    assert_trained(names["resumed"]["model"], expected)
    assert_coupled(names["resumed"]["coupled"], names["resumed"]["model"].head.weight, steps=6)


@after("DDP")
def _(names: Names) -> None:
    of_both_ranks = [torch.cat(pair) for pair in zip(tokens_of(3, seed=0), tokens_of(3, seed=1), strict=True)]
    expected = fresh_model()
    train_by_muon_and_algorithm_1(expected, of_both_ranks, max_norm=1.0)
    assert_trained(names["model"].module, expected)
    assert names["muon"].param_groups[0]["param_names"] == [MATRIX]


@after("FSDP2")
def _(names: Names) -> None:
    expected = expected_model(3)
    for model, optimizers in ((names["model"], "optimizers"), (names["resumed"], "resumed_optimizers")):
        assert_same_weights(model, expected, atol=ATOL)
        coupled, muon = names[optimizers]
        assert_coupled(coupled, model.head.weight, steps=3)
        assert muon.state[model.get_parameter(MATRIX)]["momentum_buffer"].placements[0].is_shard(0)
    # Both optimizers loaded what they had saved.
    for mine, theirs in zip(names["optimizers"], names["resumed_optimizers"], strict=True):
        for group, other in zip(mine.param_groups, theirs.param_groups, strict=True):
            for param, loaded in zip(group["params"], other["params"], strict=True):
                assert torch.equal(param.to_local(), loaded.to_local())
                for key, value in mine.state[param].items():
                    found = theirs.state[loaded][key]
                    assert torch.equal(
                        getattr(value, "to_local", lambda v=value: v)(), getattr(found, "to_local", lambda v=found: v)()
                    )


@after("Hugging Face Trainer")
def _(names: Names) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for trainer, steps in ((names["trainer"], 3), (names["resumed"], 6)):
        torch.manual_seed(0)
        torch.randint(0, 101, (8, 9))
        expected = LlamaForCausalLM(LlamaConfig(**names["size"]))
        train_by_muon_and_algorithm_1(
            expected,
            [names["tokens"]] * steps,
            table="lm_head.weight",
            is_matrix=lambda name: ".layers." in name and name.endswith("_proj.weight"),
            loss_of=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
            max_norm=1.0,
        )
        # More matrices and steps than in the other examples, so more rounding with steps of the same length.
        assert_same_weights(trainer.model, expected, atol=4 * ATOL)
        coupled, muon = trainer.optimizer.optimizer.optimizers
        assert_coupled(coupled, trainer.model.lm_head.weight, steps=steps)
        assert len(muon.param_groups[0]["params"]) == 7
        # One schedule for both optimizers: it has a learning rate for every group.
        assert len(trainer.lr_scheduler.get_last_lr()) == len(coupled.param_groups) + len(muon.param_groups)


@after("Lightning")
def _(names: Names) -> None:
    assert_trained(names["task"].model, expected_model(3))
    (both,) = names["trainer"].optimizers
    assert names["trainer"].global_step == 3
    assert_coupled(both.optimizers[0], names["task"].model.head.weight, steps=3)


@after("accelerate")
def _(names: Names) -> None:
    assert_trained(names["model"], expected_model(3))
    assert isinstance(names["coupled"].optimizer, CoupledAdamW)
    assert_coupled(names["coupled"].optimizer, names["model"].head.weight, steps=3)


@after("BatchedMuon")
def _(names: Names) -> None:
    model, optimizers = names["model"], (names["muon"], names["coupled"])
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert set(held) == set(model.parameters())
    assert len(held) == len(set(held))
    assert names["muon"].param_groups[0]["param_names"] == [MATRIX]
    # The same steps with torch's Muon, which iterates in bfloat16 too.
    expected = expected_model(5, muon_lr=1e-3, adjust_lr_fn="match_rms_adamw")
    moved = (expected.get_parameter(MATRIX) - fresh_model().get_parameter(MATRIX)).norm()
    assert (model.get_parameter(MATRIX) - expected.get_parameter(MATRIX)).norm() < 0.05 * moved
    assert_coupled(names["coupled"], model.head.weight, steps=5)
