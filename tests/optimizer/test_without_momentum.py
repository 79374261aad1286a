"""Coupled tables with beta1 = 0: no first moment in the state, untouched gradients, and changes of beta1."""

import copy
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from oracle import coupled, gradients, oracle, relative_error, run, table
from test_against_adamw import LanguageModel
from test_grad_scaler import train_plainly
from test_torch_features import peak_bytes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups
from coupled_adam.optimizer.reference import reference_init, reference_step

SHAPE = (40, 8)
GRADS = gradients(SHAPE, 6)
BETAS = (0.0, 0.99)
MEMBERS: list[dict[str, Any]] = [
    {},
    {"row_exponent": 1.0},
    {"mean_free": True},
    {"row_exponent": 1.0, "mean_free": True, "vocabulary_size": 30},
]


def trained(betas: tuple[float, float], **options: Any) -> tuple[nn.Parameter, CoupledAdamW]:
    param = table(SHAPE)
    optimizer = coupled(param, betas=betas, **options)
    run(optimizer, param, GRADS[:3])
    return param, optimizer


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_state_has_only_numbers_per_row_and_column(
    member: dict[str, Any], dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:
    param = table(SHAPE, dtype)
    optimizer = coupled(param, betas=BETAS, state_dtype=state_dtype, **member)
    run(optimizer, param, [grad.to(dtype) for grad in GRADS[:2]])
    rows = ["row_avg_sq"] if "row_exponent" in member else []
    assert list(optimizer.state[param]) == ["step", "exp_avg_sq", *rows]
    V, H = SHAPE
    assert sum(value.nbytes for value in optimizer.state[param].values()) == 4 + 4 * H + (4 * V if rows else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", [{}, {"max_grad_norm": 1e-3}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_step_does_not_write_the_gradient(
    path: ModuleType, member: dict[str, Any], flags: dict[str, Any], dtype: torch.dtype
) -> None:
    param = table(SHAPE, dtype)
    optimizer = coupled(param, betas=BETAS, **member, **flags)
    for grad in GRADS[:2]:
        param.grad = grad.to(dtype)
        before, version = param.grad.clone(), param.grad._version
        optimizer.step()
        assert torch.equal(param.grad, before)
        assert param.grad._version == version


@pytest.mark.parametrize("flags", [{"max_grad_norm": 0.1}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("member", MEMBERS[1:3], ids=str)
def test_no_temporary_has_half_the_size_of_the_table(
    member: dict[str, Any], dtype: torch.dtype, flags: dict[str, Any]
) -> None:
    param = nn.Parameter(torch.zeros(2048, 768, dtype=dtype))
    optimizer = coupled(param, betas=BETAS, **member, **flags)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert peak_bytes(optimizer.step) < param.nbytes / 2


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_skipped_step_changes_nothing(path: ModuleType, member: dict[str, Any]) -> None:
    param = table(SHAPE)
    optimizer = coupled(param, betas=BETAS, fused=True, **member)
    run(optimizer, param, GRADS[:1])
    before = copy.deepcopy([param.detach(), *optimizer.state[param].values()])
    optimizer.found_inf = torch.tensor(1.0)  # as set by GradScaler
    optimizer.grad_scale = torch.tensor(8.0)
    run(optimizer, param, GRADS[1:2])
    after = [param.detach(), *optimizer.state[param].values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    row_exponent=st.sampled_from([0.0, 0.25, 1.0]),
    mean_free=st.booleans(),
    beta2=st.floats(0, 0.999),
)
def test_any_table_gives_the_updates_of_the_equations(
    rows: int, columns: int, seed: int, row_exponent: float, mean_free: bool, beta2: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(torch.randn(rows, columns, generator=generator))
    grads = [torch.randn(rows, columns, generator=generator) for _ in range(3)]
    member: dict[str, Any] = {"betas": (0.0, beta2), "row_exponent": row_exponent, "mean_free": mean_free}
    expected = oracle(param, grads, **member)
    run(coupled(param, **member), param, grads)
    assert relative_error(param, expected.embeddings) < 1e-5


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_beta1_may_become_zero_during_training(path: ModuleType, member: dict[str, Any]) -> None:
    param, initial = table(SHAPE), table(SHAPE)
    expected = oracle(initial, GRADS[:3], **member)
    for grad in GRADS[3:]:
        expected = reference_step(expected, grad, betas=BETAS, **member)
    optimizer = coupled(param, **member)
    run(optimizer, param, GRADS[:3])
    optimizer.param_groups[0]["betas"] = BETAS
    run(optimizer, param, GRADS[3:])
    assert "exp_avg" not in optimizer.state[param]
    assert relative_error(param, expected.embeddings) < 3e-6


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_step_that_raises_keeps_a_moment_that_is_no_longer_needed(path: ModuleType, member: dict[str, Any]) -> None:
    param = table(SHAPE)
    optimizer = coupled(param, error_if_nonfinite=True, **member)
    run(optimizer, param, GRADS[:3])
    before = copy.deepcopy({"param": param.detach(), **optimizer.state[param]})
    optimizer.param_groups[0]["betas"] = BETAS
    with pytest.raises(RuntimeError, match="Nothing was updated"):
        run(optimizer, param, [torch.full(SHAPE, torch.nan)])
    after = {"param": param.detach(), **optimizer.state[param]}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    run(optimizer, param, GRADS[3:4])
    assert "exp_avg" not in optimizer.state[param]


def test_a_compiled_step_drops_the_moment_too() -> None:
    torch._dynamo.reset()
    params = [table(SHAPE), table(SHAPE)]
    optimizers = [coupled(param, lr=torch.tensor(1e-3)) for param in params]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for betas, grad in zip([(0.9, 0.99), BETAS, BETAS, (0.9, 0.99)], GRADS, strict=False):
        for param, optimizer, step in zip(params, optimizers, steps, strict=True):
            optimizer.param_groups[0]["betas"] = betas
            param.grad = grad.clone()
            step()
        assert all(("exp_avg" in o.state[p]) == (betas != BETAS) for p, o in zip(params, optimizers, strict=True))
        assert relative_error(params[0], params[1]) < 1e-6


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_moment_made_in_the_middle_starts_at_zero(path: ModuleType, member: dict[str, Any]) -> None:
    param, initial = table(SHAPE), table(SHAPE)
    expected = oracle(initial, GRADS[:3], betas=BETAS, **member)
    expected = expected._replace(first_moment=torch.zeros_like(expected.first_moment))
    for grad in GRADS[3:]:
        expected = reference_step(expected, grad, betas=(0.5, 0.99), **member)
    optimizer = coupled(param, betas=BETAS, **member)
    run(optimizer, param, GRADS[:3])
    optimizer.param_groups[0]["betas"] = (0.5, 0.99)
    run(optimizer, param, GRADS[3:])
    assert relative_error(param, expected.embeddings) < 3e-6
    assert relative_error(optimizer.state[param]["exp_avg"], expected.first_moment) < 1e-6


def test_a_beta1_in_a_tensor_keeps_the_moment() -> None:
    """It may become nonzero at any time."""
    param = table(SHAPE)
    optimizer = coupled(param, betas=(torch.tensor(0.0), torch.tensor(0.99)), lr=torch.tensor(1e-3), foreach=False)
    run(optimizer, param, GRADS[:3])
    assert relative_error(optimizer.state[param]["exp_avg"], GRADS[2]) < 1e-6
    assert relative_error(param, oracle(table(SHAPE), GRADS[:3], betas=BETAS).embeddings) < 1e-6


@pytest.mark.parametrize("member", [{}, {"row_exponent": 1.0}], ids=str)
def test_a_state_of_adamw_with_beta1_zero_loads_without_its_moment(member: dict[str, Any]) -> None:
    param = table(SHAPE)
    adamw = torch.optim.AdamW([param], betas=BETAS)
    run(adamw, param, GRADS[:3])
    optimizer = coupled(param, betas=BETAS, **member)
    optimizer.load_state_dict(adamw.state_dict())
    state = optimizer.state[param]
    assert "exp_avg" not in state
    torch.testing.assert_close(state["exp_avg_sq"], adamw.state[param]["exp_avg_sq"].mean(0, keepdim=True))
    run(optimizer, param, GRADS[3:])


def test_a_file_sets_beta1_and_with_it_whether_a_moment_is_kept() -> None:
    _, with_momentum = trained((0.9, 0.99))
    _, without = trained(BETAS)
    for written_by, live in ((with_momentum, BETAS), (without, (0.9, 0.99))):
        param = table(SHAPE)
        optimizer = coupled(param, betas=live)
        optimizer.load_state_dict(written_by.state_dict())
        assert optimizer.param_groups[0]["betas"] == written_by.param_groups[0]["betas"]
        assert optimizer.state[param].keys() == next(iter(written_by.state.values())).keys()
        run(optimizer, param, GRADS[3:4])


def test_a_file_of_a_version_that_kept_the_moment_loads() -> None:
    param, optimizer = trained(BETAS)
    file = copy.deepcopy(optimizer.state_dict())
    file["state"][0]["exp_avg"] = GRADS[2].clone()
    other = nn.Parameter(param.detach().clone())
    loaded = coupled(other, betas=BETAS)
    loaded.load_state_dict(file)
    assert "exp_avg" not in loaded.state[other]
    for one, parameter in ((optimizer, param), (loaded, other)):
        run(one, parameter, GRADS[3:])
    assert torch.equal(param, other)


def test_a_moment_that_the_file_lacks_starts_at_zero_and_the_step_count_continues() -> None:
    param, optimizer = trained(BETAS)
    file = copy.deepcopy(optimizer.state_dict())
    file["param_groups"][0]["betas"] = (0.9, 0.99)
    expected = reference_init(param)._replace(
        second_moment=optimizer.state[param]["exp_avg_sq"].double().expand(SHAPE), step=3
    )
    expected = reference_step(expected, GRADS[3], betas=(0.9, 0.99))
    other = coupled(param, betas=(0.9, 0.99))
    with pytest.warns(UserWarning, match="'parameter 0'.* starts at 0"):
        other.load_state_dict(file)
    run(other, param, GRADS[3:4])
    assert relative_error(param, expected.embeddings) < 1e-6


def trained_model(betas: tuple[float, float], steps: int = 4) -> tuple[LanguageModel, CoupledAdamW]:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = CoupledAdamW(model, options={"output_embeddings": {"betas": betas}})
    if steps:
        train_plainly(model, optimizer, skipped=None)
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("remedy", [None, "betas of the file before", "betas of the run after"])
def test_a_moment_that_dcp_does_not_read_is_warned_about(tmp_path: Path, remedy: str | None) -> None:
    model, optimizer = trained_model((0.9, 0.99))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    moment = optimizer.state[model.embedding.weight]["exp_avg"]

    model, optimizer = trained_model(BETAS, steps=0)
    if remedy == "betas of the file before":
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path)
    if remedy == "betas of the run after":
        optimizer_state["param_groups"][0]["betas"] = BETAS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    warned = [str(warning.message) for warning in caught if "CoupledAdamW" in str(warning.message)]
    assert len(warned) == (0 if remedy else 1)
    assert all("'embedding.weight'" in message for message in warned)
    found = optimizer.state[model.embedding.weight].get("exp_avg")
    assert (found is not None) == (remedy == "betas of the file before")
    assert found is None or torch.equal(found, moment)


@pytest.mark.parametrize("live", [BETAS, (0.9, 0.99)], ids=str)
@pytest.mark.parametrize("saved", [BETAS, (0.9, 0.99)], ids=str)
def test_loading_a_file_with_its_betas_warns_of_nothing(
    saved: tuple[float, float], live: tuple[float, float], recwarn: pytest.WarningsRecorder
) -> None:
    _, optimizer = trained_model(saved)
    _, other = trained_model(live, steps=0)
    other.load_state_dict(optimizer.state_dict())
    assert not recwarn.list


def test_a_moment_missing_in_a_file_matched_by_name_is_warned_about_once() -> None:
    model, optimizer = trained_model(BETAS)
    other = CoupledAdamW(model, couple="all")
    with pytest.warns(UserWarning, match=r"'embedding\.weight'") as caught:
        other.load_state_dict(convert_state_dict(optimizer.state_dict(), other))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_conversion_to_adamw_and_back() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    options = {"output_embeddings": {"betas": BETAS, "row_exponent": 1.0}}
    optimizer = CoupledAdamW(model, options=options)
    train_plainly(model, optimizer, skipped=None)
    weight: Tensor = model.embedding.weight
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    adamw.load_state_dict(convert_state_dict(optimizer.state_dict(), adamw))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in adamw.state.values())
    assert adamw.state[weight]["exp_avg"].shape == weight.shape
    assert not adamw.state[weight]["exp_avg"].any()
    again = CoupledAdamW(model, options=options)
    again.load_state_dict(convert_state_dict(adamw.state_dict(), again))
    assert again.state[weight].keys() == optimizer.state[weight].keys()
    for key in ("exp_avg_sq", "row_avg_sq"):
        torch.testing.assert_close(again.state[weight][key], optimizer.state[weight][key], rtol=1e-5, atol=0)


def test_a_state_of_another_optimizer_without_a_first_moment_is_refused() -> None:
    param, optimizer = trained((0.9, 0.99))
    file = copy.deepcopy(optimizer.state_dict())
    del file["state"][0]["exp_avg"]
    file["state"][0]["exp_avg_sq"] = torch.ones(SHAPE)
    with pytest.raises(ValueError, match="no 'exp_avg'"):
        optimizer.load_state_dict(file)
    assert "exp_avg" in optimizer.state[param]


@pytest.mark.parametrize("member", [{}, {"row_exponent": 1.0}], ids=str)
def test_state_of_another_shape_is_refused(member: dict[str, Any]) -> None:
    param, optimizer = trained(BETAS, **member)
    param.data = torch.zeros(40, 9)
    with pytest.raises(ValueError, match=r"\(40, 9\).*\(40, 8\)"):
        run(optimizer, param, [torch.zeros(40, 9)])
    if member:
        param.data = torch.zeros(41, 8)
        with pytest.raises(ValueError, match=r"\(41, 8\).*\(40, 8\)"):
            run(optimizer, param, [torch.zeros(41, 8)])


def test_standard_groups_keep_their_moment_as_in_adamw() -> None:
    other = nn.Parameter(torch.ones(3))
    optimizer = CoupledAdamW([{"params": [table(SHAPE)], "coupled": True}, {"params": [other]}], betas=BETAS)
    other.grad = torch.ones(3)
    optimizer.param_groups[0]["params"][0].grad = GRADS[0]
    optimizer.step()
    assert list(optimizer.state[other]) == ["step", "exp_avg", "exp_avg_sq"]
