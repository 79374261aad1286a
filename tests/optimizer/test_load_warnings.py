"""load_state_dict warns if a file of AdamW replaces settings that only the tables of the optimizer have."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from test_against_adamw import LanguageModel, train

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups

RECOMMENDED: dict[str, Any] = {"row_exponent": 1.0, "mean_free": True}
OWN = {"lr": 3e-3, "betas": (0.0, 0.99)}


def adamw_file(model: LanguageModel, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95)) -> dict[str, Any]:
    adamw = torch.optim.AdamW(param_groups(model, couple="none"), lr=lr, betas=betas)
    train(model, adamw, steps=2)
    return adamw.state_dict()


def recommended(model: LanguageModel, lr: float = 1e-3, own: dict[str, Any] | None = None) -> CoupledAdamW:
    options = {"output_embeddings": OWN if own is None else own}
    return CoupledAdamW(model, lr=lr, betas=(0.9, 0.95), options=options, **RECOMMENDED)


def warned(optimizer: CoupledAdamW, file: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(file)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_file_of_adamw_that_replaces_settings_of_the_tables_names_them_and_the_remedy_works() -> None:
    model = LanguageModel()
    file = adamw_file(model)
    optimizer = recommended(model)
    [message] = warned(optimizer, file)
    assert "group 0 ('output_embeddings'), lr 0.003 becomes 0.001, betas (0.0, 0.99) becomes (0.9, 0.95)" in message
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["row_exponent"]) == (1e-3, (0.9, 0.95), 1.0)
    remedy = re.search(r"call (optimizer\S+\(.*\)) after loading", message)
    assert remedy is not None
    exec(remedy.group(1), {"optimizer": optimizer})
    assert {key: group[key] for key in OWN} == OWN
    train(model, optimizer, steps=1)
    assert "exp_avg" not in optimizer.state[group["params"][0]]


def test_a_learning_rate_alone_is_named_alone() -> None:
    model = LanguageModel()
    [message] = warned(recommended(model, own={"lr": 3e-3}), adamw_file(model))
    assert "update(lr=0.003)" in message
    assert "betas" not in message


@pytest.mark.parametrize(("live", "saved"), [((0.0, 0.99), (0.9, 0.95)), ((0.9, 0.95), (0.0, 0.99))])
def test_betas_that_all_groups_share_are_replaced_silently(
    live: tuple[float, float], saved: tuple[float, float]
) -> None:
    model = LanguageModel()
    assert not warned(CoupledAdamW(model, betas=live), adamw_file(model, betas=saved))
    table = model.head.weight
    adamw = torch.optim.AdamW([table], betas=saved)
    train(model, adamw, steps=1)
    assert not warned(CoupledAdamW([{"params": [table], "coupled": True}], betas=live), adamw.state_dict())


@pytest.mark.parametrize("kind", ["LambdaLR", "ExponentialLR", "CosineAnnealingLR", "StepLR", "LinearLR"])
def test_a_new_scheduler_continues_where_the_old_one_was(kind: str) -> None:
    """The remedy of the warning and of docs/coupledadamw-reference.md."""
    arguments: dict[str, dict[str, Any]] = {
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 20},
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "LinearLR": {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 20},
    }
    model = LanguageModel()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"), lr=1e-3, betas=(0.9, 0.95))
    old = getattr(torch.optim.lr_scheduler, kind)(adamw, **arguments[kind])
    for _ in range(5):
        train(model, adamw, steps=1)
        old.step()
    optimizer = recommended(model)
    [message] = warned(optimizer, adamw.state_dict())
    remedy = re.search(r"call (optimizer\S+\(.*\)) after loading, and set lr to initial_lr in every group", message)
    assert remedy is not None
    exec(remedy.group(1), {"optimizer": optimizer})
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    new = getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimizer before that of a scheduler
        for _ in range(5):
            new.step()
    table, *others = [group["lr"] for group in optimizer.param_groups]
    assert others == pytest.approx([group["lr"] for group in adamw.param_groups][1:])
    assert table == pytest.approx(3 * others[0])


def test_every_coupled_group_is_named() -> None:
    model = LanguageModel()
    table = model.head.weight
    others = [p for p in model.parameters() if p is not table]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [table], "coupled": True, "lr": torch.tensor(0.5)}]
    adamw = torch.optim.AdamW([{"params": others}, {"params": [table]}])
    train(model, adamw, steps=1)
    [message] = warned(CoupledAdamW(groups, foreach=False), adamw.state_dict())
    assert "in group 1, lr 0.5 becomes 0.001;" in message


@pytest.mark.parametrize("lr", [1e-3, 4e-4])
def test_settings_that_all_groups_share_are_replaced_silently(lr: float) -> None:
    model = LanguageModel()
    assert not warned(recommended(model, own={}), adamw_file(model, lr))
    assert not warned(CoupledAdamW(model), adamw_file(model, lr))


def test_a_schedule_is_no_reason_to_warn() -> None:
    """Neither one that has changed the file's learning rate, nor one whose warm-up starts the optimizer at 0."""
    model = LanguageModel()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"), lr=1e-3, betas=(0.9, 0.95))
    for group in adamw.param_groups[:1]:
        group["lr"] = 3e-3
    decay = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
    train(model, adamw, steps=2)
    decay.step()
    optimizer = recommended(model, own={"lr": 3e-3})
    assert not warned(optimizer, adamw.state_dict())
    optimizer = recommended(model, own={"lr": 3e-3})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert not warned(optimizer, adamw.state_dict())
    optimizer = recommended(model, own={"lr": 6e-3})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    [message] = warned(optimizer, adamw.state_dict())
    assert "update(lr=0.006, initial_lr=0.006)" in message  # a new scheduler takes initial_lr as its base


def test_a_resumed_run_warns_of_nothing() -> None:
    model = LanguageModel()
    optimizer = recommended(model)
    train(model, optimizer, steps=2)
    assert not warned(recommended(model), optimizer.state_dict())
    optimizer.param_groups[0].update(lr=1e-5, betas=(0.9, 0.95))
    train(model, optimizer, steps=1)
    assert not warned(recommended(model), optimizer.state_dict())  # the file of CoupledAdamW is meant


def test_groups_matched_by_name_keep_their_settings_and_warn_of_nothing() -> None:
    model = LanguageModel()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    train(model, adamw, steps=2)
    for file in (adamw.state_dict(), convert_state_dict(adamw.state_dict(), recommended(model))):
        optimizer = recommended(model)
        assert not warned(optimizer, file)
        assert {key: optimizer.param_groups[0][key] for key in OWN} == OWN


def test_betas_that_leave_a_first_moment_missing_are_warned_about_once() -> None:
    model = LanguageModel()
    optimizer = recommended(model)
    train(model, optimizer, steps=2)
    file = copy.deepcopy(optimizer.state_dict())
    for group in file["param_groups"]:  # as a script might that writes AdamW's settings into the file
        for key in set(group) - set(torch.optim.AdamW([torch.zeros(1)]).defaults) - {"params"}:
            del group[key]
        group["betas"] = (0.9, 0.95)
    [message] = warned(recommended(model), file)
    assert "starts at 0" in message
