"""Edge cases of the family of second moments: long runs, mixed groups, late changes, invalid numbers."""

import copy
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, oracle, relative_error, run, table
from torch import nn

from coupled_adam import CoupledAdamW, convert_state_dict

PARTIAL: dict[str, Any] = {"row_exponent": 0.25, "mean_free": True}
GRADS = gradients((40, 8), 6)


@pytest.mark.parametrize(
    "member",
    [PARTIAL, {"row_exponent": 0.5, "max_grad_norm": 0.01}, {**PARTIAL, "betas": (0.0, 0.99)}],
    ids=str,
)
def test_a_compiled_step_leaves_padding_out_of_all_means(member: dict[str, Any]) -> None:
    params = [table((40, 8)), table((40, 8))]
    optimizers = [coupled(param, vocabulary_size=13, **member) for param in params]
    steps = [torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step]
    for grad in GRADS[:3]:
        for param, step in zip(params, steps, strict=True):
            param.grad = grad.clone()
            step()
    assert relative_error(params[0], params[1]) < 1e-6
    if "max_grad_norm" not in member:
        assert (
            relative_error(params[0], oracle(table((40, 8)), GRADS[:3], vocabulary_size=13, **member).embeddings) < 1e-6
        )


def test_a_thousand_mean_free_steps_do_not_move_the_mean() -> None:
    param = table((16, 4))
    before = param.detach().double()[:12].mean(0)
    optimizer = coupled(param, **PARTIAL, vocabulary_size=12)
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 0, 16).unsqueeze(1)
    for _ in range(1000):
        run(optimizer, param, [scale * (torch.randn(16, 4, generator=generator) + 0.3)])
    assert (param.detach().double()[:12].mean(0) - before).abs().max() < 2e-6
    assert (param.detach() - table((16, 4)).detach()).abs().max() > 0.1


def test_tables_of_one_group_may_differ_in_shape_and_dtype() -> None:
    shapes = {(40, 8): torch.float32, (30, 6): torch.bfloat16, (20, 4): torch.float64}
    together = [table(shape, dtype) for shape, dtype in shapes.items()]
    optimizer = CoupledAdamW([{"params": together, "coupled": True}], weight_decay=0.0, **PARTIAL)
    all_grads = [gradients(shape, 3, dtype) for shape, dtype in shapes.items()]
    for grads in zip(*all_grads, strict=True):
        for param, grad in zip(together, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    for param, (shape, dtype), grads in zip(together, shapes.items(), all_grads, strict=True):
        alone = table(shape, dtype)
        run(coupled(alone, **PARTIAL), alone, list(grads))
        assert torch.equal(param, alone)


def test_a_table_without_a_gradient_is_left_alone() -> None:
    used, idle = table((40, 8)), table((30, 8))
    before = idle.detach().clone()
    optimizer = CoupledAdamW([{"params": [used, idle], "coupled": True}], weight_decay=0.0, **PARTIAL)
    run(optimizer, used, GRADS[:2])
    assert torch.equal(idle, before)
    assert not optimizer.state.get(idle)
    used.grad = None
    idle.grad = GRADS[2][:30].clone()
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in (used, idle)] == [2, 1]
    expected = oracle(before, [GRADS[2][:30]], **PARTIAL)
    assert relative_error(idle, expected.embeddings) < 1e-6


def test_row_moments_continue_while_the_exponent_is_zero_and_are_not_recreated() -> None:
    """Exponents 0, 0.25, 0, 0.25: created at the second step from the column moments after the first."""
    param = table((40, 8))
    optimizer = coupled(param)
    run(optimizer, param, GRADS[:1])
    r = optimizer.state[param]["exp_avg_sq"].double().mean().expand(40, 1)
    for grad, row_exponent in zip(GRADS[1:4], (0.25, 0.0, 0.25), strict=True):
        optimizer.param_groups[0]["row_exponent"] = row_exponent
        run(optimizer, param, [grad])
        r = 0.999 * r + 0.001 * grad.double().square().mean(1, keepdim=True)
        assert relative_error(optimizer.state[param]["row_avg_sq"], r) < 1e-6


def test_a_tensor_on_the_host_is_read_at_every_step() -> None:
    params = [table((40, 8)), table((40, 8))]
    by_tensor = coupled(params[0], row_exponent=torch.tensor(1.0), mean_free=True)
    by_number = coupled(params[1], row_exponent=1.0, mean_free=True)
    for grad, row_exponent in zip(GRADS, (1.0, 0.75, 0.5, 0.25, 0.0, 0.5), strict=True):
        by_tensor.param_groups[0]["row_exponent"].fill_(row_exponent)
        by_number.param_groups[0]["row_exponent"] = row_exponent
        run(by_tensor, params[0], [grad])
        run(by_number, params[1], [grad])
    assert torch.equal(params[0], params[1])


def test_a_copy_has_its_own_exponents() -> None:
    optimizer = coupled(table((40, 8)), row_exponent=torch.tensor(0.25))
    copied = copy.deepcopy(optimizer)
    copied.param_groups[0]["row_exponent"].fill_(0.75)
    assert float(optimizer.param_groups[0]["row_exponent"]) == 0.25


def test_a_coupled_group_added_later_inherits_the_options_of_the_optimizer() -> None:
    optimizer = coupled(table((40, 8)), **PARTIAL, vocabulary_size=20)
    late, standard = table((30, 8)), table((9, 4))
    optimizer.add_param_group({"params": [late], "coupled": True, "weight_decay": 0.0})
    optimizer.add_param_group({"params": [standard]})
    keys = ("row_exponent", "mean_free", "vocabulary_size")
    assert [optimizer.param_groups[1][key] for key in keys] == [0.25, True, 20]
    assert [optimizer.param_groups[2][key] for key in keys] == [0.0, False, None]
    expected = oracle(late, [GRADS[0][:30]], **PARTIAL, vocabulary_size=20)
    late.grad = GRADS[0][:30].clone()
    optimizer.step()
    assert relative_error(late, expected.embeddings) < 1e-6


@pytest.mark.parametrize("written_by", ["AdamW", "0.1.0"])
def test_a_group_keeps_options_that_the_file_lacks(written_by: str) -> None:
    """It keeps its own options, which may differ from the optimizer's defaults."""
    param = table((40, 8))
    writer = torch.optim.AdamW([param]) if written_by == "AdamW" else coupled(param)
    run(writer, param, GRADS[:2])
    file = writer.state_dict()
    for group in file["param_groups"]:
        for key in ("row_exponent", "column_exponent", "mean_free", "vocabulary_size"):
            group.pop(key, None)
    own = {"row_exponent": 0.5, "column_exponent": 0.75, "mean_free": True, "vocabulary_size": 30}
    optimizer = CoupledAdamW([{"params": [param], "coupled": True, **own}])
    optimizer.load_state_dict(file)
    assert {key: optimizer.param_groups[0][key] for key in own} == own


def test_row_moments_without_a_gradient_yet_are_kept() -> None:
    param = table((40, 8))
    optimizer = coupled(param, **PARTIAL)
    run(optimizer, param, [torch.zeros(40, 8)])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(optimizer.state[param]["row_avg_sq"], torch.zeros(40, 1))


def test_zero_row_moments_are_ignored_in_the_conversion_to_adamw() -> None:
    """A loader created them and no step filled them; with them, AdamW would divide by eps."""
    param = table((40, 8))
    optimizer = coupled(param, **PARTIAL)
    run(optimizer, param, GRADS[:2])
    file = optimizer.state_dict()
    file["state"][0]["row_avg_sq"] = torch.zeros(40, 1)
    file["param_groups"][0]["param_names"] = ["table"]
    adamw = torch.optim.AdamW([("table", param)])
    converted = convert_state_dict(file, adamw)["state"][0]["exp_avg_sq"]
    assert torch.equal(converted, optimizer.state[param]["exp_avg_sq"].expand(40, 8))


def test_step_hooks_run_once() -> None:
    param = table((40, 8))
    optimizer = coupled(param, **PARTIAL)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run(optimizer, param, GRADS[:1])
    assert calls == ["before", "after"]


def moved_after(grad_at: float, **options: Any) -> tuple[nn.Parameter, torch.Tensor]:
    """Where a table moves if its gradient has one unusual element, at row 3 and column 4."""
    param = table((40, 8))
    before = param.detach().clone()
    grad = GRADS[0].clone()
    grad[3, 4] = grad_at
    run(coupled(param, **options), param, [grad])
    return param, param.detach() != before


@pytest.mark.parametrize("member", [{"row_exponent": 0.25}, PARTIAL, {"column_exponent": 0.5}], ids=str)
def test_one_nan_spoils_the_whole_table_of_a_member_that_uses_its_mean(member: dict[str, Any]) -> None:
    param, _ = moved_after(torch.nan, **member)
    assert param.isnan().all()


def test_one_nan_spoils_only_its_column_if_only_the_mean_is_removed() -> None:
    param, _ = moved_after(torch.nan, mean_free=True)
    assert param[:, 4].isnan().all()
    assert int(param.isnan().sum()) == 40


def test_one_infinity_spoils_only_its_column_if_only_the_mean_is_removed() -> None:
    param, moved = moved_after(torch.inf, mean_free=True)
    assert param[:, 4].isnan().all()
    assert int(moved.sum()) == 40


@pytest.mark.parametrize("member", [{"row_exponent": 0.25}, PARTIAL, {"column_exponent": 0.5}], ids=str)
def test_a_square_too_large_for_the_state_stops_the_whole_table(member: dict[str, Any]) -> None:
    param, moved = moved_after(1e25, **member)
    assert param.isfinite().all()
    assert not moved.any()


@pytest.mark.parametrize("value", ["yes", "no", 1, None])
def test_mean_free_must_be_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="mean_free"):
        coupled(table((4, 2)), mean_free=value)
    with pytest.raises(ValueError, match="mean_free"):
        CoupledAdamW([{"params": [table((4, 2))], "coupled": True, "mean_free": value}])


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.tensor([0.1, 0.2])], ids=repr)
def test_an_exponent_in_a_tensor_on_a_standard_group_is_refused(value: Any) -> None:
    tables = {"params": [table((4, 2))], "coupled": True}
    with pytest.raises(ValueError, match=r"group 1.*row_exponent.*coupled=True"):
        CoupledAdamW([tables, {"params": [table((4, 2))], "row_exponent": value}])
