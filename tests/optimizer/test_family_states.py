"""The family of second moments in state dicts, copies, GradScaler and torch.compile; and invalid options."""

import copy
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import coupled, gradients, oracle, relative_error, run, table
from test_against_adamw import LanguageModel
from test_grad_scaler import state_tensors, train_plainly, train_scaled
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups
from coupled_adam.optimizer import checks

PARTIAL: dict[str, Any] = {"row_exponent": 0.25, "mean_free": True}
WITHOUT_MOMENTUM: dict[str, Any] = {"betas": (0.0, 0.99), "row_exponent": 1.0, "mean_free": True}
GRADS = gradients((40, 8), 6)


def trained(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, CoupledAdamW]:
    param = table((40, 8), dtype)
    optimizer = coupled(param, **options)
    run(optimizer, param, [grad.to(dtype) for grad in GRADS[:3]])
    return param, optimizer


@pytest.mark.parametrize("member", [PARTIAL, WITHOUT_MOMENTUM], ids=["partial", "without momentum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("through", ["state dict", "deepcopy", "pickle"])
def test_resumed_training_is_bitwise_equal(dtype: torch.dtype, through: str, member: dict[str, Any]) -> None:
    param, optimizer = trained(member, dtype)
    if through == "state dict":
        other = nn.Parameter(param.detach().clone())
        copied = coupled(other, **member)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        copied = copy.deepcopy(optimizer) if through == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        other = copied.param_groups[0]["params"][0]
    for one, parameter in ((optimizer, param), (copied, other)):
        run(one, parameter, [grad.to(dtype) for grad in GRADS[3:]])
    assert torch.equal(param, other)
    assert torch.equal(optimizer.state[param]["row_avg_sq"], copied.state[other]["row_avg_sq"])
    assert copied.state[other]["row_avg_sq"].dtype == torch.promote_types(dtype, torch.float32)


def test_exponents_are_loaded_from_a_file_like_the_learning_rate() -> None:
    _, optimizer = trained({**PARTIAL, "column_exponent": 0.75, "lr": 0.5})
    param = table((40, 8))
    other = coupled(param, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    group = other.param_groups[0]
    assert [group[key] for key in ("lr", "row_exponent", "column_exponent", "mean_free")] == [0.5, 0.25, 0.75, True]


def test_the_live_vocabulary_size_is_kept() -> None:
    _, optimizer = trained({**PARTIAL, "vocabulary_size": 30})
    other = coupled(table((40, 8)), vocabulary_size=20)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["vocabulary_size"] == 20


def test_a_file_without_row_moments_continues_as_coupled_adam() -> None:
    param, optimizer = trained({})
    file = optimizer.state_dict()
    for group in file["param_groups"]:  # as 0.1.0 wrote it
        for key in ("row_exponent", "column_exponent", "mean_free", "vocabulary_size"):
            del group[key]
    other = coupled(param, row_exponent=0.25)
    other.load_state_dict(file)
    assert other.param_groups[0]["row_exponent"] == 0.25
    expected = 0.999 * optimizer.state[param]["exp_avg_sq"].mean() + 0.001 * GRADS[3].square().mean(1, keepdim=True)
    run(other, param, GRADS[3:4])
    assert relative_error(other.state[param]["row_avg_sq"], expected) < 1e-6


def test_zero_row_moments_next_to_filled_column_moments_are_recreated() -> None:
    """A loader created them and no step filled them: filled row and column moments have the same mean."""
    param, optimizer = trained(PARTIAL)
    file = optimizer.state_dict()
    file["state"][0]["row_avg_sq"] = torch.zeros(40, 1)
    optimizer.load_state_dict(file)
    assert "row_avg_sq" not in optimizer.state[param]


@pytest.mark.parametrize("vocabulary_size", [None, 30])
def test_a_state_of_adamw_is_converted_to_row_and_column_means(vocabulary_size: int | None) -> None:
    param = table((40, 8))
    adamw = torch.optim.AdamW([param])
    run(adamw, param, GRADS[:3])
    second_moment = adamw.state[param]["exp_avg_sq"].clone()
    optimizer = coupled(param, **PARTIAL, vocabulary_size=vocabulary_size)
    optimizer.load_state_dict(adamw.state_dict())
    state = optimizer.state[param]
    torch.testing.assert_close(state["exp_avg_sq"], second_moment[:vocabulary_size].mean(0, keepdim=True))
    torch.testing.assert_close(state["row_avg_sq"], second_moment.mean(1, keepdim=True))


def test_to_adamw_and_back_keeps_row_and_column_moments() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = CoupledAdamW(model, **PARTIAL)
    train_plainly(model, optimizer, skipped=None)
    weight = next(p for p in model.parameters() if "row_avg_sq" in optimizer.state[p])
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    adamw.load_state_dict(convert_state_dict(optimizer.state_dict(), adamw))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in adamw.state.values())
    assert adamw.state[weight]["exp_avg_sq"].shape == weight.shape
    again = CoupledAdamW(model, **PARTIAL)
    again.load_state_dict(convert_state_dict(adamw.state_dict(), again))
    for key in ("exp_avg", "exp_avg_sq", "row_avg_sq"):
        torch.testing.assert_close(again.state[weight][key], optimizer.state[weight][key], rtol=1e-5, atol=0)


def test_a_pickle_of_0_1_0_continues_as_coupled_adam() -> None:
    param, optimizer = trained({})
    state = copy.deepcopy(optimizer.__getstate__())
    for options in (state["defaults"], *state["param_groups"]):
        for key in ("row_exponent", "column_exponent", "mean_free", "vocabulary_size"):
            options.pop(key)
    restored = CoupledAdamW.__new__(CoupledAdamW)
    restored.__setstate__(state)
    other = restored.param_groups[0]["params"][0]
    run(optimizer, param, GRADS[3:])
    run(restored, other, GRADS[3:])
    assert torch.equal(param, other)


@pytest.mark.parametrize("overflow_at", [None, 0, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("member", [PARTIAL, WITHOUT_MOMENTUM], ids=["partial", "without momentum"])
def test_scaled_training_equals_unscaled_training(
    path: ModuleType,
    member: dict[str, Any],
    flags: dict[str, Any],
    max_grad_norm: float | None,
    overflow_at: int | None,
) -> None:
    torch.manual_seed(0)
    scaled = LanguageModel()
    plain = copy.deepcopy(scaled)
    options = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": max_grad_norm, **member}
    scaled_optimizer = CoupledAdamW(scaled, **options, **flags)
    plain_optimizer = CoupledAdamW(plain, **options)
    train_scaled(scaled, scaled_optimizer, False, overflow_at)
    train_plainly(plain, plain_optimizer, skipped=overflow_at)
    for mine, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert relative_error(mine, theirs) < 4e-6
    assert {state["step"].item() for state in scaled_optimizer.state.values()} == {4 if overflow_at is None else 3}


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.99)], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_a_compiled_step_equals_the_eager_one(as_tensor: bool, betas: tuple[float, float]) -> None:
    torch._dynamo.reset()  # torch 2.6 cannot compile the step of one optimizer after that of another
    params = [table((40, 8)), table((40, 8))]
    exponent: Tensor | float = torch.tensor(0.25) if as_tensor else 0.25
    options = {"betas": betas, "row_exponent": exponent, "mean_free": True, "max_grad_norm": 0.5}
    optimizers = [coupled(param, **options) for param in params]
    steps = [torch.compile(optimizers[0].step), optimizers[1].step]
    for grad in GRADS[:3]:
        for param, step in zip(params, steps, strict=True):
            param.grad = grad.clone()
            step()
    assert relative_error(params[0], params[1]) < 1e-6
    for mine, theirs in zip(*(state_tensors(optimizer) for optimizer in optimizers), strict=True):
        assert relative_error(mine, theirs) < 1e-5


def test_a_nonfinite_gradient_changes_nothing_when_it_is_an_error(path: ModuleType) -> None:
    param = table((40, 8))
    optimizer = coupled(param, **PARTIAL, error_if_nonfinite=True)
    run(optimizer, param, GRADS[:2])
    before = copy.deepcopy([param.detach(), *optimizer.state[param].values()])
    bad = GRADS[2].clone()
    bad[3, 4] = torch.nan
    with pytest.raises(RuntimeError, match="nan"):
        run(optimizer, param, [bad])
    after = [param.detach(), *optimizer.state[param].values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_standard_groups_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    reference = copy.deepcopy(model)
    optimizer = CoupledAdamW(model, **PARTIAL, vocabulary_size=20)
    standard = [group for group in optimizer.param_groups if not group["coupled"]]
    assert standard
    assert all(group["row_exponent"] == 0 and not group["mean_free"] for group in standard)
    adamw = torch.optim.AdamW(param_groups(reference, couple="none"))
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        mine.grad = torch.ones_like(mine)
        theirs.grad = torch.ones_like(theirs)
        assert name
    optimizer.step()
    adamw.step()
    coupled_params = {p for group in optimizer.param_groups if group["coupled"] for p in group["params"]}
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs) or mine in coupled_params


@pytest.mark.parametrize("option", ["row_exponent", "column_exponent"])
@pytest.mark.parametrize(
    "value", [-0.1, 1.5, float("nan"), "half", torch.tensor(2.0), torch.tensor([0.1, 0.2]), torch.tensor(1)], ids=repr
)
def test_exponents_outside_zero_and_one_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        coupled(table((4, 2)), **{option: value})
    with pytest.raises(ValueError, match=option):
        CoupledAdamW([{"params": [table((4, 2))], "coupled": True, option: value}])


def test_an_exponent_set_to_a_wrong_number_during_training_is_refused() -> None:
    param, optimizer = trained(PARTIAL)
    optimizer.param_groups[0]["row_exponent"] = 1.01
    with pytest.raises(ValueError, match=r"row_exponent.*1\.01"):
        run(optimizer, param, GRADS[3:4])


@pytest.mark.parametrize(
    ("option", "value"),
    [("mean_free", True), ("row_exponent", 0.5), ("column_exponent", 0.0), ("vocabulary_size", 3)],
)
def test_options_of_the_family_on_a_standard_group_are_refused(option: str, value: Any) -> None:
    tables = {"params": [table((4, 2))], "coupled": True}
    with pytest.raises(ValueError, match=rf"group 1.*{option}.*coupled=True"):
        CoupledAdamW([tables, {"params": [table((4, 2))], option: value}])
    optimizer = CoupledAdamW([tables])
    with pytest.raises(ValueError, match=rf"group 1.*{option}.*coupled=True"):
        optimizer.add_param_group({"params": [table((4, 2))], option: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "4"])
def test_a_vocabulary_size_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ValueError, match="vocabulary_size"):
        coupled(table((4, 2)), vocabulary_size=value)


def test_more_real_rows_than_a_table_has_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"vocabulary_size is 5.*'head'.*4 rows"):
        CoupledAdamW([{"params": [("head", table((4, 2)))], "coupled": True}], vocabulary_size=5)


def test_a_file_with_row_moments_of_another_vocabulary_changes_nothing() -> None:
    param, optimizer = trained(PARTIAL)
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][0]["row_avg_sq"] = torch.ones(41, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"row_avg_sq.*\(41, 1\).*\(40, 8\)"):
        optimizer.load_state_dict(file)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert torch.equal(optimizer.state[param]["row_avg_sq"], before["state"][0]["row_avg_sq"])


def test_a_file_with_a_wrong_exponent_changes_nothing() -> None:
    _, optimizer = trained(PARTIAL)
    file = copy.deepcopy(optimizer.state_dict())
    file["param_groups"][0]["row_exponent"] = torch.tensor(3.0)
    with pytest.raises(ValueError, match="row_exponent"):
        optimizer.load_state_dict(file)
    assert optimizer.param_groups[0]["row_exponent"] == 0.25


def test_the_second_moment_of_padding_rows_does_not_enter_that_of_the_columns() -> None:
    param = table((40, 8))
    grads = [grad.clone() for grad in GRADS[:3]]
    for grad in grads:
        grad[30:] *= 1000
    expected = oracle(param, grads, vocabulary_size=30)
    optimizer = coupled(param, vocabulary_size=30)
    run(optimizer, param, grads)
    assert relative_error(param, expected.embeddings) < 1e-6
    only_real = [grad[:30] for grad in grads]
    small = nn.Parameter(table((40, 8)).detach()[:30].clone())
    run(coupled(small), small, only_real)
    assert relative_error(param[:30], small) < 1e-6


def test_a_table_whose_rows_cannot_be_summed_over_ranks_is_refused_by_name() -> None:
    """For example a partial tensor: each rank has a summand of every row, and no rank has a complete row."""
    param = SimpleNamespace(placements=[Replicate(), Partial()], shape=(4, 2))
    with pytest.raises(ValueError, match=r"'head'.*Partial"):
        checks.check_placements("tensor 'head'", param)  # type: ignore[arg-type]
    for placement in (Shard(0), Shard(1), _StridedShard(0, split_factor=2)):
        checks.check_placements("tensor 'head'", SimpleNamespace(placements=[placement]))  # type: ignore[arg-type]
