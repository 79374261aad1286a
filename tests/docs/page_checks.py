"""Checks that run after each example of docs/using-coupledadamw.md and its reference, by its heading.

`tiny` is the module that the page tells its readers to save; it exists only while an example is tested.

Legend: V vocabulary rows, H hidden size.
"""

import copy

import torch
from check_registry import Checks, Names
from page_reference import (
    BETAS,
    H,
    assert_coupled,
    assert_same_weights,
    assert_second_moment,
    fresh_model,
    local,
    tokens_of,
    train_by_algorithm_1,
)
from torch import Tensor, nn

from coupled_adam import CoupledAdamW

CHECKS = Checks()
after = CHECKS.after


@after("The whole loop")
def _(names: Names) -> None:
    expected = fresh_model()
    trained = train_by_algorithm_1(expected, tokens_of(5), weight_decay=0.1, **BETAS)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=5)
    assert_second_moment(names["optimizer"], names["model"].head.weight, trained)


@after("Print the groups")
def _(names: Names) -> None:
    """Nothing to check: the output is already compared with the page."""


@after("Couple other tables")
def _(names: Names) -> None:
    model = names["model"]
    tables = {model.head.weight, model.embedding.weight}
    for optimizer in (names["both"], names["by_name"]):
        coupled = {p for group in optimizer.param_groups if group["coupled"] for p in group["params"]}
        assert coupled == tables


@after("Pass your own groups")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    assert_coupled(optimizer, model.head.weight, steps=3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert optimizer.state[model.block[1].weight]["exp_avg_sq"].shape == (H, H)


@after("Set options per group")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "output_embeddings": 3e-3,
        "input_embeddings": 1e-3,
        "decay": 1e-3,
        "no_decay": 5e-4,
    }
    assert groups["output_embeddings"]["betas"] == (0.9, 0.99)
    assert optimizer.state[model.head.weight]["row_avg_sq"].shape == (101, 1)


@after("Partial coupling")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    V = model.head.weight.shape[0]
    assert optimizer.state[model.head.weight]["row_avg_sq"].shape == (V, 1)
    moved = (names["after"] - names["before"]).abs().max()
    assert moved < 1e-6 < (model.head.weight - fresh_model().head.weight).abs().max()


@after("Anneal the exponent")
def _(names: Names) -> None:
    optimizer = names["optimizer"]
    exponents = {group["coupled"]: group["row_exponent"] for group in optimizer.param_groups}
    assert exponents == {True: 0.25, False: 0.0}


@after("Padded tables")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    (group,) = (group for group in optimizer.param_groups if group["coupled"])
    assert group["vocabulary_size"] == 101 < model.head.weight.shape[0]


@after("State in fewer bytes")
def _(names: Names) -> None:
    model, expected = names["model"], fresh_model()
    trained = train_by_algorithm_1(expected, tokens_of(3), state_seed=0)
    assert_same_weights(model, expected)
    moment = names["optimizer"].state[model.embedding.weight]["exp_avg"]
    assert moment.dtype == torch.bfloat16
    assert float((moment.double() != trained.table.first_moment).double().mean()) < 0.01


@after("No first moments")
def _(names: Names) -> None:
    model, expected = names["model"], fresh_model()
    train_by_algorithm_1(expected, tokens_of(3), **names["without_momentum"])
    assert_same_weights(model, expected)
    state = names["optimizer"].state[model.embedding.weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "exp_avg_sq": (1, model.embedding.weight.shape[1]),
        "row_avg_sq": (model.embedding.weight.shape[0], 1),
    }


@after("Clipping")
def _(names: Names) -> None:
    from tiny import loss_of

    model, optimizer = names["model"], names["optimizer"]
    expected = fresh_model()
    train_by_algorithm_1(expected, tokens_of(5), max_norm=1.0)
    assert_same_weights(model, expected)
    # The page's table of the contents of p.grad after a step.
    for options in ({}, {"fused": True}):
        model, untouched = fresh_model(), fresh_model()
        optimizer = CoupledAdamW(model, max_grad_norm=0.1, **options)
        for chosen in (model, untouched):
            loss_of(chosen, tokens_of(1)[0]).backward()
        optimizer.step()
        norm = nn.utils.get_total_norm([p.grad for p in untouched.parameters()])
        assert norm > 1.0
        torch.testing.assert_close(optimizer.grad_norm, norm)
        for (name, p), other in zip(model.named_parameters(), untouched.parameters(), strict=True):
            factor = 1.0 if name == "embedding.weight" else 0.1 / norm
            torch.testing.assert_close(p.grad, other.grad * factor, rtol=1e-5, atol=0)


@after("bfloat16 autocast")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    assert_coupled(optimizer, model.head.weight, steps=3)
    assert model.head.weight.dtype == optimizer.state[model.head.weight]["exp_avg"].dtype == torch.float32
    narrow = fresh_model().bfloat16()
    optimizer = CoupledAdamW(narrow)
    narrow(tokens_of(1)[0]).sum().backward()
    optimizer.step()
    assert optimizer.state[narrow.head.weight]["exp_avg"].dtype == torch.bfloat16
    assert_coupled(optimizer, narrow.head.weight, steps=1)


@after("float16 with GradScaler")
def _(names: Names) -> None:
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=3)
    for fused in (False, True):
        for unscale in (False, True):
            assert_gradients_after_a_scaled_step(fused, unscale)


def assert_gradients_after_a_scaled_step(fused: bool, unscale: bool) -> None:
    """The page's table of unscaling: the factor that remains in p.grad, and a norm without it."""
    from tiny import loss_of

    scaled, plain = fresh_model(), fresh_model()
    optimizer = CoupledAdamW(scaled, fused=fused, max_grad_norm=1e9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(scaled, tokens_of(1)[0])).backward()
    loss_of(plain, tokens_of(1)[0]).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for (name, p), other in zip(scaled.named_parameters(), plain.parameters(), strict=True):
        left = 1024.0 if name == "embedding.weight" and fused and not unscale else 1.0
        torch.testing.assert_close(p.grad, other.grad * left, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(optimizer.grad_norm, nn.utils.get_total_norm([p.grad for p in plain.parameters()]))


@after("DDP")
def _(names: Names) -> None:
    expected = fresh_model()
    of_both_ranks = [torch.cat(pair) for pair in zip(tokens_of(3, seed=0), tokens_of(3, seed=1), strict=True)]
    train_by_algorithm_1(expected, of_both_ranks, max_norm=1.0)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].module.head.weight, steps=3)


@after("ZeroRedundancyOptimizer")
def _(names: Names) -> None:
    expected = fresh_model()
    of_both_ranks = [torch.cat(pair) for pair in zip(tokens_of(3, seed=0), tokens_of(3, seed=1), strict=True)]
    train_by_algorithm_1(expected, of_both_ranks, max_norm=1.0)
    assert_same_weights(names["model"], expected)


@after("FSDP2")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    expected = fresh_model()
    trained = train_by_algorithm_1(expected, tokens_of(3), max_norm=1.0)
    assert_same_weights(model, expected)
    assert model.head.weight is model.embedding.weight
    assert local(model.head.weight).shape[0] in (50, 51)  # 101 rows on two ranks
    assert_coupled(optimizer, model.head.weight, steps=3)
    assert_second_moment(optimizer, model.head.weight, trained)
    assert optimizer.state[model.head.weight]["exp_avg_sq"].placements[0].is_replicate()


@after("Tensor parallel")
def _(names: Names) -> None:
    model, optimizer = names["model"], names["optimizer"]
    expected = fresh_model()
    trained = train_by_algorithm_1(expected, tokens_of(3))
    assert_same_weights(model, expected)
    assert local(model.head.weight).shape[0] in (50, 51)
    assert_coupled(optimizer, model.head.weight, steps=3)
    assert_second_moment(optimizer, model.head.weight, trained)


@after("A learning rate in a tensor")
def _(names: Names) -> None:
    expected = fresh_model()
    tokens = [batch for epoch in range(3) for batch in tokens_of(2, seed=epoch)]
    train_by_algorithm_1(expected, tokens, learning_rates=[1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4])
    assert_same_weights(names["model"], expected)
    assert isinstance(names["optimizer"].param_groups[0]["lr"], Tensor)


@after("torch.compile")
def _(names: Names) -> None:
    expected = fresh_model()
    train_by_algorithm_1(expected, tokens_of(3), max_norm=1.0)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=3)
    assert names["optimizer"].grad_norm > 1.0


@after("CUDA graphs")
def _(names: Names) -> None:
    expected = fresh_model()
    warm_up = tokens_of(1) * 3
    train_by_algorithm_1(expected, warm_up + tokens_of(5), max_norm=1.0)
    assert_same_weights(names["model"], expected, atol=1e-5)  # the reference is trained on the CPU
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=8)
    before = names["optimizer"].grad_norm.clone()
    names["tokens"].copy_(tokens_of(1, seed=5)[0])
    names["graph"].replay()
    assert names["optimizer"].grad_norm != before


@after("Save and resume")
def _(names: Names) -> None:
    from tiny import train

    train(names["model"], names["optimizer"], steps=3, seed=1)  # uninterrupted
    assert_coupled(names["resumed_optimizer"], names["resumed"].head.weight, steps=6)
    for resumed, uninterrupted in zip(names["resumed"].parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(resumed, uninterrupted)


@after("From AdamW, with the same groups")
def _(names: Names) -> None:
    from tiny import train

    expected = fresh_model()
    decayed = [expected.block[1].weight]
    rest = [p for p in expected.parameters() if p is not decayed[0]]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=1e-3, weight_decay=0)
    train(expected, adamw, steps=3)
    train_by_algorithm_1(expected, tokens_of(3), adamw=adamw, weight_decay=0.1)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=6)


@after("From AdamW, with other groups")
def _(names: Names) -> None:
    from tiny import train

    expected = fresh_model()
    adamw = torch.optim.AdamW(expected.parameters(), lr=1e-3)
    train(expected, adamw, steps=3)
    train_by_algorithm_1(expected, tokens_of(3), adamw=adamw)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=6)


@after("From a sharded AdamW checkpoint")
def _(names: Names) -> None:
    from tiny import train

    expected = fresh_model()
    decayed = [expected.block[1].weight]
    rest = [p for p in expected.parameters() if p is not decayed[0]]
    adamw = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0}], lr=1e-3)
    train(expected, adamw, steps=3)
    trained = train_by_algorithm_1(expected, tokens_of(3), adamw=adamw)
    for model, optimizer in ((names["model"], "optimizer"), (names["resumed"], "resumed_optimizer")):
        assert_same_weights(model, expected)
        assert_coupled(names[optimizer], model.head.weight, steps=6)
        assert_second_moment(names[optimizer], model.head.weight, trained)
    for key, value in names["optimizer"].state[names["model"].head.weight].items():
        assert torch.equal(local(value), local(names["resumed_optimizer"].state[names["resumed"].head.weight][key]))


@after("Back to AdamW")
def _(names: Names) -> None:
    from tiny import train

    expected = fresh_model()
    trained = train_by_algorithm_1(expected, tokens_of(3))
    adamw = torch.optim.AdamW(expected.parameters(), lr=1e-3)
    adamw.state.update({p: copy.deepcopy(state) for p, state in trained.rest.state.items()})
    adamw.state[expected.embedding.weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": trained.table.first_moment.float(),
        "exp_avg_sq": trained.table.second_moment.mean(dim=0).repeat(101, 1).float(),
    }
    train(expected, adamw, steps=3)
    assert_same_weights(names["model"], expected)


@after("Skip a bad batch")
def _(names: Names) -> None:
    expected = fresh_model()
    first, _, last = tokens_of(3)
    train_by_algorithm_1(expected, [first, last])
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=2)
