"""Settings of single groups: `param_groups(model, options=...)`."""

import copy
from typing import Any

import pytest
import torch
from group_models import GPT, names
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from coupled_adam import CoupledAdamW, param_groups

OPTIONS: dict[str, dict[str, Any]] = {
    "output_embeddings": {"lr": 3e-3, "betas": (0.8, 0.9), "row_exponent": 0.25, "mean_free": True},
    "decay": {"lr": 5e-4, "weight_decay": 0.3, "eps": 1e-6},
}


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in groups}


@pytest.mark.parametrize("how", ["groups", "model"])
def test_settings_reach_their_group_and_no_other(how: str) -> None:
    model = GPT(tied=False)
    if how == "groups":
        optimizer = CoupledAdamW(param_groups(model, options=OPTIONS), lr=1e-3)
    else:
        optimizer = CoupledAdamW(model, lr=1e-3, options=OPTIONS)
    plain = by_name(CoupledAdamW(model, lr=1e-3).param_groups)
    for name, group in by_name(optimizer.param_groups).items():
        expected = plain[name] | OPTIONS.get(name, {})
        assert {key: group[key] for key in expected if key != "params"} == {
            key: value for key, value in expected.items() if key != "params"
        }
        assert all(mine is theirs for mine, theirs in zip(group["params"], plain[name]["params"], strict=True))


def test_settings_change_the_step_of_their_group() -> None:
    """Compared with one optimizer per group, each with the settings as defaults."""
    torch.manual_seed(0)
    start = GPT(tied=False)
    model, reference = copy.deepcopy(start), copy.deepcopy(start)
    optimizer = CoupledAdamW(model, lr=1e-3, weight_decay=0.1, options=OPTIONS)
    singles: list[torch.optim.Optimizer] = []
    for group in param_groups(reference, weight_decay=0.1):
        given = {"lr": 1e-3, "weight_decay": group["weight_decay"]} | OPTIONS.get(group["name"], {})
        params = [tensor for _, tensor in group["params"]]
        if group.get("coupled"):
            singles.append(CoupledAdamW([{"params": params, "coupled": True}], **given))
        else:
            singles.append(torch.optim.AdamW(params, **given))
    for step in range(3):
        torch.manual_seed(step)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape)
            theirs.grad = mine.grad.clone()
        optimizer.step()
        for single in singles:
            single.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_baseline_takes_the_settings_that_every_group_has() -> None:
    groups = param_groups(GPT(tied=True), couple="none", options={"output_embeddings": {"lr": 3e-3}})
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (step + 1)), [1.0, 1 / 2, 1 / 3]),
        (lambda optimizer: CosineAnnealingLR(optimizer, T_max=4), [1.0, 0.8535533905932737, 0.5]),
    ],
    ids=["LambdaLR", "CosineAnnealingLR"],
)
def test_schedulers_keep_the_ratios(schedule: Any, factors: list[float]) -> None:
    model = GPT(tied=False)
    optimizer = CoupledAdamW(model, lr=1e-3, options=OPTIONS)
    scheduler: LRScheduler = schedule(optimizer)
    expected = {"output_embeddings": 3e-3, "input_embeddings": 1e-3, "decay": 5e-4, "no_decay": 1e-3}
    for factor in factors:
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx({name: lr * factor for name, lr in expected.items()})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()


def test_a_state_dict_keeps_the_settings() -> None:
    model = GPT(tied=False)
    written = CoupledAdamW(model, lr=1e-3, options=OPTIONS).state_dict()
    loaded = CoupledAdamW(model, lr=1e-3)
    loaded.load_state_dict(written)
    for name, given in OPTIONS.items():
        group = by_name(loaded.param_groups)[name]
        assert {key: group[key] for key in given} == given


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": {"lr": 1}}, ["'head'", "'output_embeddings'", "'input_embeddings'", "'decay'", "'no_decay'"]),
        ({"input_embeddings": {"lr": 1}}, ["'input_embeddings'", "'output_embeddings'", "'decay'", "'no_decay'"]),
        ({"coupled": {"lr": 1}}, ["'coupled'", "'output_embeddings'"]),
        ({"decay": {"learning_rate": 1}}, ["'decay'", "'learning_rate'", "'lr'", "'betas'", "'eps'", "'weight_decay'"]),
        ({"output_embeddings": {"row": 1}}, ["'row'", "'row_exponent'", "'mean_free'", "'vocabulary_size'"]),
        ({"output_embeddings": {"max_grad_norm": 1}}, ["'max_grad_norm'", "'lr'"]),
        ({"decay": {"row_exponent": 0.5}}, ["row_exponent", "'decay'", "'output_embeddings'"]),
        ({"decay": {"lr": -1.0}}, ["'decay'", "lr", "-1.0"]),
        ({"decay": {"lr": float("nan")}}, ["lr", "nan"]),
        ({"decay": {"betas": 0.9}}, ["betas", "0.9"]),
        ({"no_decay": {"betas": (0.9, 1.0)}}, ["'no_decay'", "betas", "1.0"]),
        ({"no_decay": {"eps": "small"}}, ["eps", "small"]),
        ({"decay": {"weight_decay": float("inf")}}, ["weight_decay", "inf"]),
        ({"output_embeddings": {"row_exponent": 2.0}}, ["row_exponent", "2.0"]),
        ({"output_embeddings": {"vocabulary_size": 10_000}}, ["vocabulary_size", "10000"]),
    ],
    ids=str,
)
def test_settings_without_effect_and_invalid_values_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as raised:
        CoupledAdamW(GPT(tied=True), options=options)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("options", [{"decay": 1e-3}, [("decay", {"lr": 1e-3})]], ids=str)
def test_settings_must_be_a_dict_of_dicts(options: Any) -> None:
    with pytest.raises(TypeError, match="options"):
        param_groups(GPT(tied=True), options=options)


def test_a_group_made_by_a_pattern_accepts_settings() -> None:
    groups = param_groups(GPT(tied=False), couple=["wte.*"], options={"coupled": {"lr": 2e-3, "mean_free": True}})
    optimizer = CoupledAdamW(groups)
    assert {"lr": 2e-3, "mean_free": True, "name": "coupled"}.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize("option", ["options", "exclude"])
def test_settings_and_exclusions_need_a_model(option: str) -> None:
    model = nn.Embedding(4, 2)
    with pytest.raises(ValueError, match=option):
        CoupledAdamW(param_groups(model), **{option: {} if option == "options" else []})


def test_the_summary_shows_settings_only_if_some_are_given() -> None:
    model = GPT(tied=False)
    assert "options" not in str(param_groups(model))
    with_options = str(param_groups(model, options=OPTIONS))
    (line,) = (line for line in with_options.splitlines() if line.startswith("decay"))
    assert "lr=0.0005, weight_decay=0.3, eps=1e-06" in line


def test_excluded_parameters_are_in_no_group_and_the_rest_is_unchanged() -> None:
    model = GPT(tied=False)
    excluded = [("any name", model.h[0].fc.weight), model.wpe.weight]
    expected = names(param_groups(model))
    expected["decay"].remove("h.0.fc.weight")
    expected["no_decay"].remove("wpe.weight")
    groups = param_groups(model, exclude=excluded)
    assert names(groups) == expected
    assert names(param_groups(model, exclude=iter(excluded))) == expected
    assert "(excluded)" in str(groups)


def test_an_excluded_input_table_is_shown_as_such() -> None:
    model = GPT(tied=False)
    groups = param_groups(model, exclude=[model.wte.weight])
    assert "input_embeddings" not in names(groups)
    (line,) = (line for line in str(groups).splitlines() if line.startswith("wte.weight"))
    assert "no (excluded)" in line


def test_a_coupled_table_cannot_be_excluded() -> None:
    model = GPT(tied=False)
    with pytest.raises(ValueError, match=r"'lm_head\.weight' \(100, 16\).*couple='output'"):
        param_groups(model, exclude=[p for p in model.parameters() if p.ndim == 2])


def test_only_parameters_of_the_model_can_be_excluded() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        param_groups(GPT(tied=True), exclude=[nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(TypeError, match="str"):
        param_groups(GPT(tied=True), exclude=["wpe.weight"])  # type: ignore[list-item]
