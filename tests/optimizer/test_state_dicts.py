"""State dicts: round trips, files of AdamW, other groups, other dtypes, and conversion back to AdamW."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import assert_matches, coupled, gradients, run, table
from test_against_adamw import LanguageModel, train
from torch import nn

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups
from coupled_adam.optimizer.reference import ReferenceState, reference_step


class UntiedModel(LanguageModel):
    """The same model with separate table and head."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_round_trip_is_exact(dtype: torch.dtype, flags: dict[str, Any]) -> None:
    """Also for bfloat16, for which torch alone would cast the second moment."""
    param = table((11, 4), dtype)
    grads = gradients((11, 4), 6, dtype)
    optimizer = coupled(param, **flags)
    run(optimizer, param, grads[:3])
    other_param = copy.deepcopy(param)
    other = coupled(other_param, **flags)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.state[other_param]["exp_avg_sq"].dtype == optimizer.state[param]["exp_avg_sq"].dtype
    run(optimizer, param, grads[3:])
    run(other, other_param, grads[3:])
    assert torch.equal(param, other_param)
    for key, value in optimizer.state[param].items():
        assert torch.equal(other.state[other_param][key], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_can_switch_from_adamw_in_the_middle(dtype: torch.dtype) -> None:
    """After loading, the group is coupled with its own weight decay, and the next step equals the oracle's."""
    param = table((30, 5), dtype)
    grads = gradients((30, 5), 5, dtype)
    adamw = torch.optim.AdamW([param], lr=0.05, weight_decay=0.3, betas=(0.8, 0.9))
    run(adamw, param, grads[:4])
    state = adamw.state[param]
    expected = ReferenceState(param.detach().double(), state["exp_avg"].double(), state["exp_avg_sq"].double(), 4)
    expected = reference_step(expected, grads[4], lr=0.05, betas=(0.8, 0.9), weight_decay=0.02, scale_exponent=1.0)

    optimizer = CoupledAdamW(
        [{"params": [param], "coupled": True, "weight_decay": 0.02}], lr=1.0, scale_exponent=1.0, max_grad_norm=1e9
    )
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    (group,) = optimizer.param_groups
    assert group["coupled"] is True
    assert group["weight_decay"] == 0.02
    assert group["scale_exponent"] == 1.0
    assert group["max_grad_norm"] == optimizer.defaults["max_grad_norm"] == 1e9
    assert group["lr"] == 0.05  # as in torch, options are loaded from the file
    assert optimizer.state[param]["exp_avg_sq"].dtype == torch.float32
    run(optimizer, param, [grads[4]])
    assert_matches(optimizer, param, expected)


def test_clipping_and_scale_exponent_are_loaded_from_a_file_that_has_them() -> None:
    param = table((5, 2))
    written = coupled(param, scale_exponent=3.0, max_grad_norm=0.5).state_dict()
    optimizer = coupled(table((5, 2)))
    optimizer.load_state_dict(written)
    assert optimizer.param_groups[0]["scale_exponent"] == 3.0
    assert optimizer.defaults["max_grad_norm"] == 0.5


def test_a_file_without_clipping_does_not_switch_it_off() -> None:
    optimizer = coupled(table((5, 2)), max_grad_norm=0.5)
    optimizer.load_state_dict(coupled(table((5, 2))).state_dict())
    assert optimizer.defaults["max_grad_norm"] == optimizer.param_groups[0]["max_grad_norm"] == 0.5


@pytest.mark.parametrize("model_class", [LanguageModel, UntiedModel])
def test_baseline_groups_load_without_conversion(model_class: type[LanguageModel]) -> None:
    torch.manual_seed(0)
    model = model_class()
    adamw = torch.optim.AdamW(param_groups(model, 0.1, couple="none"))
    train(model, adamw, steps=2)
    optimizer = CoupledAdamW(model, weight_decay=0.1, couple="all")
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    average = adamw.state[model.head.weight]["exp_avg_sq"].double().mean(0, keepdim=True)
    torch.testing.assert_close(optimizer.state[model.head.weight]["exp_avg_sq"].double(), average, rtol=1e-6, atol=0)
    assert optimizer.param_groups[0]["coupled"]
    train(model, optimizer, steps=1)


def test_the_live_optimizer_decides_what_is_coupled() -> None:
    """A file that couples only the head loads into an optimizer that couples both tables, and vice versa."""
    torch.manual_seed(0)
    model = UntiedModel()
    output_only = CoupledAdamW(model, couple="output")
    train(model, output_only, steps=2)
    both = CoupledAdamW(model, couple="all")
    both.load_state_dict(through_a_file(output_only.state_dict()))
    assert [group["coupled"] for group in both.param_groups] == [True, True, False, False]
    assert both.state[model.embedding.weight]["exp_avg_sq"].shape == (1, 6)
    back = CoupledAdamW(model, couple="output")
    back.load_state_dict(through_a_file(both.state_dict()))
    assert [group["coupled"] for group in back.param_groups] == [True, False, False, False]
    repeated = back.state[model.embedding.weight]["exp_avg_sq"]
    assert torch.equal(repeated, both.state[model.embedding.weight]["exp_avg_sq"].expand(23, 6))
    train(model, back, steps=1)


@pytest.mark.parametrize("named", [False, True])
def test_a_file_with_other_groups_is_converted_by_name(named: bool) -> None:
    torch.manual_seed(0)
    model = UntiedModel()
    names = [name for name, _ in model.named_parameters()]
    adamw = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    train(model, adamw, steps=2)
    optimizer = CoupledAdamW(model, lr=0.5)
    written = through_a_file(adamw.state_dict())
    if named:
        optimizer.load_state_dict(written)
    else:
        with pytest.raises(ValueError, match=r"groups of \[\d+\].*coupled_adam.convert_state_dict"):
            optimizer.load_state_dict(written)
        with pytest.raises(ValueError, match=r"param_names\b.*model\.named_parameters\(\)"):
            convert_state_dict(written, optimizer)
        optimizer.load_state_dict(convert_state_dict(written, optimizer, param_names=names))
    assert optimizer.param_groups[0]["lr"] == 0.5
    for name, param in model.named_parameters():
        expected = adamw.state[param]["exp_avg_sq"]
        if name == "head.weight":
            expected = expected.mean(0, keepdim=True)
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], expected)
        assert torch.equal(optimizer.state[param]["exp_avg"], adamw.state[param]["exp_avg"])
        assert optimizer.state[param]["step"].item() == 2


def test_the_same_names_in_another_order_are_not_mixed_up() -> None:
    first, second = table((6, 3)), nn.Parameter(torch.randn(6, 3))
    adamw = torch.optim.AdamW([("b", second), ("a", first)])
    first.grad, second.grad = torch.ones(6, 3), torch.full((6, 3), 2.0)
    adamw.step()
    optimizer = CoupledAdamW([{"params": [("a", first), ("b", second)], "coupled": True}])
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    assert torch.equal(optimizer.state[first]["exp_avg"], adamw.state[first]["exp_avg"])


def test_conversion_names_what_does_not_fit() -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model)
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, steps=1)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"param_names\b.* 2\b.* 5\b"):
        convert_state_dict(adamw.state_dict(), optimizer, param_names=names[:2])
    renamed = [name.replace("hidden.weight", "hidden.w") for name in names]
    with pytest.raises(ValueError, match=r"file\b.*\['hidden\.weight'\].*optimizer\b.*\['hidden\.w'\].*param_names"):
        convert_state_dict(adamw.state_dict(), optimizer, param_names=renamed)
    others = [f"other.{i}" for i in range(300)]
    many = torch.optim.AdamW([(name, nn.Parameter(torch.ones(1))) for name in others])
    with pytest.raises(ValueError, match=r"'other\.7'\].* 292\b") as caught:
        convert_state_dict(adamw.state_dict(), many, param_names=names)
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match=r"optimizer\b.*\(name, tensor\)"):
        convert_state_dict(adamw.state_dict(), coupled(table((3, 2))), param_names=names)


def test_wrapper_prefixes_do_not_matter_to_conversion() -> None:
    model = LanguageModel()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, steps=1)
    names = [f"_orig_mod.module.{name}" for name, _ in model.named_parameters()]
    optimizer = CoupledAdamW(model)
    optimizer.load_state_dict(convert_state_dict(adamw.state_dict(), optimizer, param_names=names))
    assert optimizer.state[model.hidden.weight]["step"].item() == 1


@pytest.mark.parametrize("outer_wrote", [True, False])
def test_a_module_around_the_model_does_not_matter_to_conversion(outer_wrote: bool) -> None:
    """As in Lightning, where one optimizer gets the module and the other the model inside it."""
    model = UntiedModel()
    outer = nn.ModuleDict({"model": model})
    writer, reader = (outer, model) if outer_wrote else (model, outer)
    adamw = torch.optim.AdamW(writer.named_parameters())
    train(model, adamw, steps=1)
    optimizer = CoupledAdamW(reader)
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    for parameter in model.parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], adamw.state[parameter]["exp_avg"])
    half = torch.optim.AdamW([pair for pair in writer.named_parameters() if "head" not in pair[0]])
    with pytest.raises(ValueError, match=r"\[.*head\.weight.*\].*\[.*\].*param_names"):
        convert_state_dict(half.state_dict(), optimizer)


def test_conversion_to_adamw_repeats_the_row() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = CoupledAdamW(model)
    train(model, optimizer, steps=2)
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    adamw.load_state_dict(convert_state_dict(through_a_file(optimizer.state_dict()), adamw))
    row = optimizer.state[model.embedding.weight]["exp_avg_sq"]
    assert torch.equal(adamw.state[model.embedding.weight]["exp_avg_sq"], row.expand(23, 6))
    train(model, adamw, steps=1)


@pytest.mark.parametrize("rows", [7, 4096, 50_257])
def test_conversion_to_adamw_and_back_is_exact(rows: int) -> None:
    """The average of equal rows is bitwise equal to the row, for any number of rows."""
    param = table((rows, 5))
    optimizer = CoupledAdamW([{"params": [("table", param)], "coupled": True}])
    run(optimizer, param, gradients((rows, 5), 2))
    adamw = torch.optim.AdamW([("table", param)])
    adamw.load_state_dict(convert_state_dict(optimizer.state_dict(), adamw))
    again = CoupledAdamW([{"params": [("table", param)], "coupled": True}])
    again.load_state_dict(adamw.state_dict())
    assert torch.equal(again.state[param]["exp_avg_sq"], optimizer.state[param]["exp_avg_sq"])


def test_conversion_works_for_a_model_on_the_meta_device() -> None:
    torch.manual_seed(0)
    model = UntiedModel()
    names = [name for name, _ in model.named_parameters()]
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, steps=2)
    described = copy.deepcopy(model).to("meta")
    coupled_state = convert_state_dict(adamw.state_dict(), CoupledAdamW(described), param_names=names)
    optimizer = CoupledAdamW(model)
    optimizer.load_state_dict(coupled_state)
    average = adamw.state[model.head.weight]["exp_avg_sq"].double().mean(0, keepdim=True).float()
    assert torch.equal(optimizer.state[model.head.weight]["exp_avg_sq"], average)
    back = torch.optim.AdamW(model.named_parameters())
    back.load_state_dict(convert_state_dict(coupled_state, torch.optim.AdamW(described.named_parameters())))
    assert torch.equal(back.state[model.head.weight]["exp_avg_sq"], average.expand(23, 6))
    train(model, back, steps=1)


def test_amsgrad_files_are_refused() -> None:
    param = table((5, 2))
    adamw = torch.optim.AdamW([param], amsgrad=True)
    run(adamw, param, gradients((5, 2), 1))
    with pytest.raises(ValueError, match="amsgrad=True"):
        coupled(param).load_state_dict(adamw.state_dict())
    model = LanguageModel()
    other = torch.optim.AdamW(model.named_parameters(), amsgrad=True)
    train(model, other, steps=1)
    with pytest.raises(ValueError, match="amsgrad=True"):
        CoupledAdamW(model).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda named: torch.optim.AdamW(named, amsgrad=True), "amsgrad=True.*amsgrad=False"),
        (lambda named: torch.optim.SGD(named, momentum=0.9), r"SGD\b.*torch\.optim\.AdamW\b.*CoupledAdamW"),
        (lambda named: torch.optim.NAdam(named), r"NAdam\b.*torch\.optim\.AdamW\b.*CoupledAdamW"),
        (lambda named: torch.optim.Adamax(named), r"Adamax\b.*torch\.optim\.AdamW\b.*CoupledAdamW"),
    ],
    ids=["amsgrad", "SGD", "NAdam", "Adamax"],
)
def test_conversion_for_an_optimizer_with_other_state_is_refused(build: Callable[..., Any], named: str) -> None:
    model = LanguageModel()
    optimizer = CoupledAdamW(model)
    train(model, optimizer, steps=1)
    with pytest.raises(ValueError, match=named):
        convert_state_dict(optimizer.state_dict(), build(model.named_parameters()))


def test_files_contain_no_numpy_numbers() -> None:
    """torch.load would refuse them."""
    optimizer = coupled(table((5, 2)), max_grad_norm=np.float64(2.0), error_if_nonfinite=np.True_)
    for _ in range(2):
        through_a_file(optimizer.state_dict())
        optimizer.max_grad_norm, optimizer.error_if_nonfinite = np.float64(3.0), np.False_
    assert optimizer.max_grad_norm == 3.0
    assert optimizer.error_if_nonfinite is False


def test_loading_does_not_change_the_given_state_dict() -> None:
    param = table((5, 2))
    adamw = torch.optim.AdamW([param], weight_decay=0.3)
    run(adamw, param, gradients((5, 2), 1))
    written = adamw.state_dict()
    before = copy.deepcopy(written)
    optimizer = coupled(param)
    optimizer.load_state_dict(written)
    run(optimizer, param, gradients((5, 2), 1))
    assert written["param_groups"] == before["param_groups"]
    assert torch.equal(written["state"][0]["exp_avg_sq"], before["state"][0]["exp_avg_sq"])


def test_loading_twice_leaves_no_hooks_behind() -> None:
    optimizer = coupled(table((5, 2)))
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_the_live_optimizer_keeps_its_check_for_nonfinite_gradients() -> None:
    optimizer = coupled(table((5, 2)), error_if_nonfinite=True)
    optimizer.load_state_dict(coupled(table((5, 2))).state_dict())
    assert optimizer.param_groups[0]["error_if_nonfinite"] is True


def test_two_parameters_with_the_same_name_are_not_mixed_up() -> None:
    first, second = table((6, 3)), nn.Parameter(torch.randn(6, 3))
    adamw = torch.optim.AdamW([("weight", first), ("weight", second)])
    first.grad, second.grad = torch.ones(6, 3), torch.full((6, 3), 2.0)
    adamw.step()
    optimizer = CoupledAdamW([{"params": [("a", first)], "coupled": True}, {"params": [("b", second)]}])
    with pytest.raises(ValueError, match=r"\['weight'\]"):
        optimizer.load_state_dict(adamw.state_dict())


def test_hooks_of_the_user_run_around_the_adaptation() -> None:
    param = table((5, 2))
    adamw = torch.optim.AdamW([param])
    run(adamw, param, gradients((5, 2), 1))
    optimizer = coupled(param)
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append(given["state"][0]["exp_avg_sq"].shape))
    optimizer.register_load_state_dict_post_hook(lambda live: seen.append(live.state[param]["exp_avg_sq"].shape))
    optimizer.load_state_dict(adamw.state_dict())
    assert seen == [(5, 2), (1, 2)]
