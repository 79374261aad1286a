"""Invalid input: each error names the option or tensor, its value and the remedy."""

import re
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, run, table
from test_against_adamw import LanguageModel
from torch import nn

from coupled_adam import CoupledAdamW


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"betas": (1.0, 0.9)}, r"beta\b.* 0: 1\.0"),
        ({"betas": (0.9, -0.1)}, r"beta\b.* 1: -0\.1"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"amsgrad": True}, r"amsgrad\b.*True\b.*torch\.optim\.AdamW"),
        ({"scale_exponent": float("nan")}, "Invalid scale_exponent value: nan"),
        ({"scale_exponent": "1"}, "Invalid scale_exponent value: '1'"),
        ({"max_grad_norm": "1"}, "Invalid max_grad_norm value: '1'"),
        ({"max_grad_norm": 0.0}, "Invalid max_grad_norm value: 0.0"),
        ({"max_grad_norm": float("nan")}, "Invalid max_grad_norm value: nan"),
        ({"couple": "lm_head.weight"}, r"couple=\['lm_head.weight'\]"),
        ({"couple": ["no.such.*"]}, r"'no\.such\.\*'"),
        ({"couple": ["norm.weight"]}, r"'norm\.weight'.*\(6,\).*\(V, H\)"),
        ({"couple": "none"}, r"torch\.optim\.AdamW\(param_groups\(model, couple='none'\)\)"),
        ({"couple": None}, r"couple\b.*None\b.*torch\.optim\.AdamW\(param_groups\(model, couple='none'\)\)"),
        ({"couple": 3}, r"couple\b.* 3\b.*'output', 'input', 'all'"),
        ({"differentiable": True}, r"differentiable=True\b.*torch\.optim\.AdamW"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoupledAdamW(LanguageModel(), **options)


@pytest.mark.parametrize("couple", [None, 3, "lm_head.weight", []])
def test_the_error_about_couple_suggests_only_valid_values(couple: Any) -> None:
    with pytest.raises(ValueError, match="couple") as error:
        CoupledAdamW(LanguageModel(), couple=couple)
    offered = str(error.value).partition("torch.optim.AdamW(")[0]
    assert re.findall(r"'(\w+)'", offered) == ["output", "input", "all"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("option", "label"), [("lr", "learning rate"), ("eps", "epsilon value"), ("weight_decay", "weight_decay value")]
)
def test_options_that_are_not_finite_are_refused_everywhere(option: str, label: str, value: float) -> None:
    """torch accepts infinite options, and the first step turns everything into NaN."""

    def groups(of_coupled: dict[str, Any], of_standard: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"params": [table((3, 2))], "coupled": True, **of_coupled}, {"params": [table((4, 2))], **of_standard}]

    with pytest.raises(ValueError, match=f"Invalid {label}"):
        CoupledAdamW(groups({}, {}), **{option: value})
    with pytest.raises(ValueError, match=f"group 0: Invalid {label}"):
        CoupledAdamW(groups({option: value}, {}))
    with pytest.raises(ValueError, match=f"group 1: Invalid {label}: {value}"):
        CoupledAdamW(groups({}, {option: value}))
    optimizer = coupled(table((3, 2)))
    with pytest.raises(ValueError, match=f"group 1: Invalid {label}: {value}"):
        optimizer.add_param_group({"params": [table((4, 2))], option: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_learning_rate_tensor_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        coupled(table((3, 2)), lr=torch.tensor(value))


def test_no_coupled_group_is_never_a_silent_adamw() -> None:
    for params in ([nn.Parameter(torch.zeros(3, 2))], list(LanguageModel().named_parameters())):
        with pytest.raises(ValueError, match=r"torch\.optim\.AdamW.*CoupledAdamW\(model"):
            CoupledAdamW(params)


def test_couple_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"couple\b.*'all'.*coupled=True"):
        CoupledAdamW([{"params": [table((3, 2))], "coupled": True}], couple="all")


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(768), r"'ln_f\.weight'.*\(768,\).*\(V, H\).*coupled=True"),
        (torch.zeros(2, 3, 4), r"\(2, 3, 4\).*\(V, H\)"),
        (torch.zeros(3, 2, dtype=torch.complex64), "complex64.*coupled=True"),
        (torch.zeros(0, 4), r"'ln_f\.weight'.*\(0, 4\)(?!.*\(V, H\))"),
    ],
    ids=["1-D", "3-D", "complex", "empty"],
)
def test_tensors_that_are_not_tables_are_named(param: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoupledAdamW([{"params": [("ln_f.weight", nn.Parameter(param))], "coupled": True}])


def test_flattened_fsdp1_parameters_are_refused() -> None:
    param = nn.Parameter(torch.zeros(12))
    param._fsdp_flattened = True  # FSDP1 marks its flat parameters with this attribute
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        CoupledAdamW([{"params": [param], "coupled": True}])


def test_a_table_that_was_flattened_after_construction_is_named_at_the_step() -> None:
    """FSDP1 with use_orig_params does this to parameters that an optimizer already has."""
    param = table((6, 2))
    optimizer = CoupledAdamW([{"params": [("wte.weight", param)], "coupled": True}])
    param.data = param.data.flatten()
    param.grad = torch.zeros(12)
    with pytest.raises(ValueError, match=r"'wte\.weight'.*\(12,\).*fully_shard"):
        optimizer.step()


def test_sparse_gradients_are_refused_with_torchs_error_type() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = CoupledAdamW(embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse\b.*'weight'.*sparse=False"):
        optimizer.step()
    assert not optimizer.state[embedding.weight]


def test_clipping_cannot_differ_between_groups() -> None:
    with pytest.raises(ValueError, match=r"group 0: max_grad_norm\b.* 2\.0\b.* 1\.0\b.*optimizer\.max_grad_norm\b"):
        CoupledAdamW([{"params": [table((3, 2))], "coupled": True, "max_grad_norm": 2.0}], max_grad_norm=1.0)


def test_the_message_names_the_option_that_differs_between_groups() -> None:
    with pytest.raises(
        ValueError, match=r"group 0: error_if_nonfinite\b.* True\b.* False\b.*optimizer\.error_if_nonfinite\b"
    ):
        CoupledAdamW([{"params": [table((3, 2))], "coupled": True, "error_if_nonfinite": True}])


def test_a_group_that_is_refused_with_any_error_is_not_added() -> None:
    optimizer = coupled(table((3, 2)))
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [table((4, 2))], "coupled": True, "eps": "small"})
    assert len(optimizer.param_groups) == 1


def test_amsgrad_in_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"amsgrad\b.*True\b.*torch\.optim\.AdamW"):
        CoupledAdamW([{"params": [table((3, 2))], "coupled": True}, {"params": [table((3, 2))], "amsgrad": True}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"group 0: .*learning rate\b.*-1\.0"),
        ({"betas": (0.9, 1.0)}, r"group 0: .*beta\b.* 1\b"),
        ({"eps": -1.0}, r"group 0: .*epsilon\b.*-1\.0"),
        ({"weight_decay": -1.0}, r"group 0: .*weight_decay\b.*-1\.0"),
        ({"scale_exponent": 2000}, "Invalid scale_exponent value: 2000"),
        ({"couple": True}, r"group 0: .*'couple'.*coupled=True"),
    ],
    ids=str,
)
def test_wrong_options_of_a_group_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoupledAdamW([{"params": [table((3, 2))], "coupled": True, **options}])


def test_fused_and_foreach_together_are_refused_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match=r"`fused`.*`foreach`"):
        coupled(table((3, 2)), fused=True, foreach=True)


def test_a_state_dict_of_another_shape_is_named() -> None:
    param, smaller = table((10, 4)), table((9, 4))
    optimizer, other = coupled(param), coupled(smaller)
    run(other, smaller, gradients((9, 4), 1))
    with pytest.raises(ValueError, match=r"'parameter 0': exp_avg\b.*\(9, 4\).*\(10, 4\)"):
        optimizer.load_state_dict(other.state_dict())


def test_a_state_dict_of_another_optimizer_is_named() -> None:
    param, other = table((10, 4)), table((10, 4))
    sgd = torch.optim.SGD([other], lr=0.1, momentum=0.9)
    run(sgd, other, gradients((10, 4), 1))
    with pytest.raises(ValueError, match=r"'parameter 0'.*'exp_avg'.*'momentum_buffer'.*AdamW"):
        coupled(param).load_state_dict(sgd.state_dict())
