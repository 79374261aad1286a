"""A coupled table that the model no longer uses gets no gradient: a step warns about it once."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import table
from test_against_adamw import LanguageModel
from torch import Tensor, nn

from coupled_adam import CoupledAdamW

WARNING = "no coupled table"


def step_warnings(step: Callable[[], Any]) -> list[str]:
    """The warnings of a step that concern tables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(warning.message) for warning in caught if WARNING in str(warning.message)]


def two_groups(**options: Any) -> tuple[nn.Parameter, nn.Parameter, CoupledAdamW]:
    param, other = table((6, 2)), nn.Parameter(torch.randn(3))
    groups = [{"params": [("head.weight", param)], "coupled": True}, {"params": [("norm.bias", other)]}]
    return param, other, CoupledAdamW(groups, **options)


def causal_model(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=37, n_embd=8, n_layer=1, n_head=2, n_positions=16, **options)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def backward(model: nn.Module, optimizer: CoupledAdamW) -> None:
    optimizer.zero_grad()
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tables_tied_after_the_optimizer_was_built_are_warned_about(name: str) -> None:
    model = causal_model(name, tie_word_embeddings=False)
    optimizer = CoupledAdamW(model)
    backward(model, optimizer)
    assert step_warnings(optimizer.step) == []
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    backward(model, optimizer)
    said = step_warnings(optimizer.step)
    assert len(said) == 1
    assert "'lm_head.weight'" in said[0]
    assert step_warnings(optimizer.step) == []
    rebuilt = CoupledAdamW(model)
    backward(model, rebuilt)
    assert step_warnings(rebuilt.step) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tables_resized_after_the_optimizer_was_built_are_warned_about(name: str) -> None:
    model = causal_model(name, tie_word_embeddings=False)
    optimizer = CoupledAdamW(model, max_grad_norm=1.0)
    model.resize_token_embeddings(41)
    backward(model, optimizer)
    assert len(step_warnings(optimizer.step)) == 1
    assert step_warnings(optimizer.step) == []
    rebuilt = CoupledAdamW(model)
    backward(model, rebuilt)
    assert step_warnings(rebuilt.step) == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_resized_tied_table_is_coupled_or_warned_about(name: str) -> None:
    """Some releases of transformers put the new rows into the existing parameter."""
    model = causal_model(name, tie_word_embeddings=True)
    optimizer = CoupledAdamW(model)
    model.resize_token_embeddings(41)
    backward(model, optimizer)
    warned = step_warnings(optimizer.step)
    trained = model.get_output_embeddings().weight in optimizer.param_groups[0]["params"]
    assert len(warned) == (0 if trained else 1)
    if trained:
        assert optimizer.state[model.get_output_embeddings().weight]["exp_avg_sq"].shape == (1, 8)


def test_a_table_resized_in_place_after_its_first_step_is_refused() -> None:
    """The kernels would read and write beyond the end of its state."""
    param = table((6, 2))
    optimizer = CoupledAdamW([{"params": [("head.weight", param)], "coupled": True}])
    param.grad = torch.ones(6, 2)
    optimizer.step()
    param.grad = None
    param.data = torch.zeros(9, 2)
    param.grad = torch.ones(9, 2)
    with pytest.raises(ValueError, match=r"'head\.weight'.*\(9, 2\).*\(6, 2\)"):
        optimizer.step()


def test_tables_materialized_after_the_optimizer_was_built_are_warned_about() -> None:
    """`to_empty` replaces the parameters of a module; for the whole model, the optimizer has none left to train."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[0].to_empty(device="cpu")
    optimizer = CoupledAdamW(model)
    model[1].to_empty(device="cpu")
    model(torch.tensor([1, 2])).sum().backward()
    assert len(step_warnings(optimizer.step)) == 1


def test_training_never_warns() -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model, max_grad_norm=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 3]])).logsumexp(-1).mean().backward()
        assert step_warnings(optimizer.step) == []


def test_a_step_without_any_gradient_does_not_warn() -> None:
    """Some loops call a step before the first backward pass, for their learning rate schedule."""
    _, other, optimizer = two_groups()
    assert step_warnings(optimizer.step) == []
    other.grad = torch.ones(3)
    assert len(step_warnings(optimizer.step)) == 1


def test_frozen_tables_are_not_warned_about() -> None:
    param, other, optimizer = two_groups()
    param.requires_grad_(False)
    other.grad = torch.ones(3)
    assert step_warnings(optimizer.step) == []
    param.requires_grad_(True)
    assert len(step_warnings(optimizer.step)) == 1


def test_steps_that_alternate_between_the_groups_warn_once() -> None:
    param, other, optimizer = two_groups()
    said = []
    for step in range(6):
        optimizer.zero_grad()
        chosen = param if step % 2 == 0 else other
        chosen.grad = torch.ones_like(chosen)
        said += step_warnings(optimizer.step)
    assert len(said) == 1


def test_only_the_gradients_after_the_closure_count() -> None:
    param, other, optimizer = two_groups()
    other.grad = torch.ones(3)

    def closure() -> Tensor:
        param.grad = torch.ones_like(param)
        return torch.tensor(1.0)

    assert step_warnings(lambda: optimizer.step(closure)) == []


def test_one_of_two_tables_may_be_unused() -> None:
    first, second, other = table((6, 2)), table((8, 3)), nn.Parameter(torch.randn(3))
    optimizer = CoupledAdamW(
        [{"params": [first], "coupled": True}, {"params": [second], "coupled": True}, {"params": [other]}]
    )
    first.grad, other.grad = torch.ones(6, 2), torch.ones(3)
    assert step_warnings(optimizer.step) == []


def test_a_coupled_group_without_tables_does_not_warn() -> None:
    """A rank without a table has such a group under ZeroRedundancyOptimizer."""
    other = nn.Parameter(torch.ones(3))
    optimizer = CoupledAdamW([{"params": [], "coupled": True}, {"params": [other]}])
    other.grad = torch.ones(3)
    assert step_warnings(optimizer.step) == []


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("warned", [False, True])
def test_a_copy_remembers_whether_it_has_warned(how: Callable[[Any], Any], warned: bool) -> None:
    _, other, optimizer = two_groups()
    if warned:
        other.grad = torch.ones(3)
        assert len(step_warnings(optimizer.step)) == 1
    other, optimizer = how((other, optimizer))
    other.grad = torch.ones(3)
    assert len(step_warnings(optimizer.step)) == (0 if warned else 1)


@pytest.mark.slow
def test_a_compiled_step_warns_too() -> None:
    torch._dynamo.reset()
    _, other, optimizer = two_groups()
    step = torch.compile(optimizer.step, backend="eager")
    other.grad = torch.ones(3)
    assert len(step_warnings(step)) == 1
    assert step_warnings(step) == []
