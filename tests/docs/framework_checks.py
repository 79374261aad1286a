"""Checks that run after each example of docs/frameworks.md, by its heading.

Legend: V vocabulary rows, H hidden size.
"""

import torch
from check_registry import Checks, Names
from page_reference import assert_coupled, assert_same_weights, fresh_model, tokens_of, train_by_algorithm_1
from torch import nn

from coupled_adam import CoupledAdamW

CHECKS = Checks()
after = CHECKS.after


def fresh_llama() -> nn.Module:
    """Build the same model as an example, which starts from seed 0."""
    from small_llama import size
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**size))


def assert_trainer_equals_algorithm_1(names: Names, max_norm: float) -> None:
    """Every step of the example uses all rows, so their order does not matter."""
    from small_llama import tokens

    expected = fresh_llama()
    train_by_algorithm_1(
        expected,
        [tokens] * 3,
        table="lm_head.weight",
        loss_of=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        weight_decay=0.1,
        max_norm=max_norm,
    )
    assert_same_weights(names["model"], expected)
    assert_coupled(names["trainer"].optimizer, names["model"].lm_head.weight, steps=3)


@after("Hugging Face Trainer, by class")
def _(names: Names) -> None:
    import pytest
    from transformers import Trainer

    assert_trainer_equals_algorithm_1(names, max_norm=1.0)  # the Trainer's own default
    for arguments in ({"lr": 1e-3}, names["trainer"].optimizer_cls_and_kwargs[1]):
        assert "model" not in arguments  # as the page says, the Trainer removes the key from the dict
        unmarked = Trainer(names["model"], names["trainer"].args, optimizer_cls_and_kwargs=(CoupledAdamW, arguments))
        with pytest.raises(ValueError, match=r"\b2\b.*CoupledAdamW\(model"):
            unmarked.create_optimizer()


@after("Hugging Face Trainer, by instance")
def _(names: Names) -> None:
    assert_trainer_equals_algorithm_1(names, max_norm=0.5)
    assert names["optimizer"].grad_norm > 0.5


@after("Hugging Face Trainer, switching in the middle")
def _(names: Names) -> None:
    adamw, coupled, back = names["adamw"], names["coupled"], names["back"]
    head = coupled.model.lm_head.weight
    assert_coupled(coupled.optimizer, head, steps=6)
    for run in (adamw, back):
        assert type(run.optimizer.optimizer) is torch.optim.AdamW
        assert run.optimizer.param_groups[0]["weight_decay"] == 0.1  # tables included, as the page says
    assert [g["weight_decay"] for g in coupled.optimizer.param_groups] == [0.0, 0.0, 0.1, 0.0]
    assert {g["lr"] for g in coupled.optimizer.param_groups} == {1e-3}
    assert back.optimizer.state[back.model.lm_head.weight]["step"] == 9
    # Parameters that are not coupled keep the moments of the original file.
    before = torch.load("coupled/checkpoint-6/optimizer.pt", weights_only=True)
    after = torch.load("back/checkpoint-6/optimizer.pt", weights_only=True)
    position = [name for name, p in back.model.named_parameters() if p.dim() >= 2].index("model.embed_tokens.weight")
    assert torch.equal(after["state"][position]["exp_avg_sq"], before["state"][1]["exp_avg_sq"])


@after("Lightning")
def _(names: Names) -> None:
    import pytest
    from lightning.pytorch.plugins import MixedPrecision

    expected = fresh_model()
    train_by_algorithm_1(expected, tokens_of(3), max_norm=1.0)
    model, (optimizer,) = names["task"].model, names["trainer"].optimizers
    assert_same_weights(model, expected)
    assert_coupled(optimizer, model.head.weight, steps=3)
    assert optimizer.grad_norm > 1.0
    fused = CoupledAdamW(model, fused=True)
    with pytest.raises(RuntimeError, match=r"CoupledAdamW.*clipping"):
        MixedPrecision("16-mixed", "cuda").clip_gradients(fused, clip_val=1.0)


@after("accelerate")
def _(names: Names) -> None:
    expected = fresh_model()
    train_by_algorithm_1(expected, tokens_of(3), max_norm=1.0)
    assert_same_weights(names["model"], expected)
    assert_coupled(names["optimizer"], names["model"].head.weight, steps=3)


@after("Hugging Face Trainer, by factory")
def _(names: Names) -> None:
    assert_trainer_equals_algorithm_1(names, max_norm=1.0)
    assert names["trainer"].optimizer_cls_and_kwargs[1] == {"lr": 1e-3, "weight_decay": 0.1}  # can be used again


@after("TRL, by class")
def _(names: Names) -> None:
    assert_trainer_equals_algorithm_1(names, max_norm=1.0)


@after("TRL, by factory")
def _(names: Names) -> None:
    """Only adapters and the copy of the head are trained, and that copy is coupled."""
    import inspect

    import trl

    optimizer, model = names["trainer"].optimizer, names["trainer"].model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (table,) = (p for name, p in trained.items() if "lm_head" in name)
    assert_coupled(optimizer, table, steps=3)
    assert len(trained) == 3
    assert not torch.equal(table, fresh_llama().lm_head.weight)
    # The page's statement about the other trainers.
    for name in ("SFTTrainer", "RewardTrainer", "DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer"):
        arguments = inspect.signature(getattr(trl, name)).parameters
        assert "optimizers" in arguments, name
        assert ("optimizer_cls_and_kwargs" in arguments) == (name in ("SFTTrainer", "RewardTrainer")), name
