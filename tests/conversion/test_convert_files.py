"""`coupled-adam convert` of plain PyTorch files: other groupings, names or none, schedulers inside, dtypes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conversion_runs import H, V, convert, gpt2, llama, load, names_in_order, states_by_name, train_steps
from torch import nn

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.cli import app


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of nanoGPT and of many loops after it."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


GROUPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "single": lambda model: model.parameters(),
    "matrices": by_dimension,
    "tables": lambda model: [
        {"params": [p for _, p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in param_groups(model, weight_decay=0.1, couple="none")
    ],
}


def write_model(folder: Path, model: nn.Module) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_groups_of_a_file_without_names_are_recognized(
    tmp_path: Path, build: Callable[[], nn.Module], grouping: str
) -> None:
    model = build()
    adamw = torch.optim.AdamW(GROUPINGS[grouping](model), lr=1e-2, betas=(0.8, 0.95))
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(
        tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder, "--couple", "all"
    )
    assert result.exit_code == 0, result.output

    optimizer = CoupledAdamW(model, couple="all", lr=0.5, scale_exponent=2.0, max_grad_norm=3.0)
    optimizer.load_state_dict(load(tmp_path / "coupled.pt"))
    tables = {p for p in model.parameters() if p.shape[0] == V}
    for parameter in model.parameters():
        expected, got = adamw.state[parameter], optimizer.state[parameter]
        assert torch.equal(got["exp_avg"], expected["exp_avg"])
        assert got["step"] == 3
        if parameter in tables:
            average = expected["exp_avg_sq"].double().mean(0, keepdim=True).float()
            assert torch.equal(got["exp_avg_sq"], average)
        else:
            assert torch.equal(got["exp_avg_sq"], expected["exp_avg_sq"])
        assert "row_avg_sq" not in got  # row_exponent is 0
    for group in optimizer.param_groups:  # AdamW's options are the file's, Coupled Adam's own the optimizer's
        assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.95))
        assert (group["scale_exponent"], group["max_grad_norm"]) == (2.0, 3.0)
        decayed = 0.01 if grouping == "single" else 0.1
        assert group["weight_decay"] == (decayed if group["name"] == "decay" else 0.0)

    torch.save(optimizer.state_dict(), tmp_path / "resumed.pt")
    result = convert(
        tmp_path / "resumed.pt", tmp_path / "back.pt", "--to", "adamw", "--model", folder, "--adamw-groups", grouping
    )
    assert result.exit_code == 0, result.output
    back = torch.optim.AdamW(GROUPINGS[grouping](model))
    back.load_state_dict(load(tmp_path / "back.pt"))
    assert not any("param_names" in group for group in back.param_groups)
    for parameter in model.parameters():
        row = optimizer.state[parameter]["exp_avg_sq"]
        assert torch.equal(back.state[parameter]["exp_avg_sq"], row.expand(parameter.shape))
    assert [g["weight_decay"] for g in back.param_groups] == [g["weight_decay"] for g in adamw.param_groups]
    train_steps(model, back)

    result = convert(
        tmp_path / "back.pt", tmp_path / "again.pt", "--to", "coupled", "--model", folder, "--couple", "all"
    )
    assert result.exit_code == 0, result.output
    before, after = load(tmp_path / "coupled.pt"), load(tmp_path / "again.pt")
    assert before["param_groups"] == after["param_groups"]
    for saved_id, state in before["state"].items():
        for key in state.keys() - {"row_avg_sq"}:
            assert torch.equal(after["state"][saved_id][key], state[key])  # bit for bit


@pytest.mark.parametrize("by_name", [False, True], ids=["with a model", "with a name"])
def test_row_moments_are_those_that_the_optimizer_takes_from_adamw(tmp_path: Path, by_name: bool) -> None:
    """An optimizer without a row exponent gets none, and takes the same steps as if it had loaded AdamW's file."""
    model = llama()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"), lr=1e-2)
    train_steps(model, adamw)
    torch.save({"model": model.state_dict(), "optimizer": adamw.state_dict()}, tmp_path / "adamw.pt")
    way = ("--couple", "lm_head.weight") if by_name else ("--model", write_model(tmp_path / "model", model))
    result = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", *way)
    assert result.exit_code == 0, result.output
    new = load(tmp_path / "coupled.pt")["optimizer"]
    for row_exponent in (1.0, 0.0):
        direct, converted = copy.deepcopy(model), copy.deepcopy(model)
        states = []
        for copied, file in ((direct, adamw.state_dict()), (converted, new)):
            optimizer = CoupledAdamW(copied, lr=1e-2, row_exponent=row_exponent)
            optimizer.load_state_dict(file)
            states.append({key: value.clone() for key, value in optimizer.state[copied.lm_head.weight].items()})
            train_steps(copied, optimizer)
        assert states[0].keys() == states[1].keys()
        assert ("row_avg_sq" in states[0]) == (row_exponent == 1.0)
        assert all(torch.equal(states[1][key], value) for key, value in states[0].items())
        assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), converted.parameters(), strict=True))


def test_converting_back_at_once_keeps_the_averages_of_rows_and_columns(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    for source, out, to in (("adamw", "coupled", "coupled"), ("coupled", "back", "adamw")):
        result = convert(tmp_path / f"{source}.pt", tmp_path / f"{out}.pt", "--to", to, "--model", folder)
        assert result.exit_code == 0, result.output
    back = torch.optim.AdamW(model.parameters())
    back.load_state_dict(load(tmp_path / "back.pt"))
    before, after = (optimizer.state[model.lm_head.weight]["exp_avg_sq"].double() for optimizer in (adamw, back))
    for dim in (0, 1):
        torch.testing.assert_close(after.mean(dim), before.mean(dim), rtol=1e-5, atol=0)


def test_a_file_with_model_and_scheduler_keeps_everything_and_needs_no_config(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(by_dimension(model), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(adamw, 0.5, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(adamw, [warmup, cosine], milestones=[2])
    for _ in range(4):
        train_steps(model, adamw, 1)
        schedule.step()
    everything = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": adamw.state_dict(),
        "scheduler": schedule.state_dict(),
        "step": 4,
        "config": {"lr": 1e-2},
    }
    torch.save(everything, tmp_path / "ckpt.pt")
    result = convert(tmp_path / "ckpt.pt", tmp_path / "new.pt", "--to", "coupled")
    assert result.exit_code == 2
    assert "--couple lm_head.weight" in result.stderr or "--couple model.embed_tokens.weight" in result.stderr
    result = convert(tmp_path / "ckpt.pt", tmp_path / "new.pt", "--to", "coupled", "--couple", "lm_head.*")
    assert result.exit_code == 0, result.output
    new = load(tmp_path / "new.pt")
    assert (new["step"], new["config"], list(new["model"])) == (4, {"lr": 1e-2}, list(everything["model"]))
    assert [len(inner["base_lrs"]) for inner in new["scheduler"]["_schedulers"]] == [3, 3]

    head = model.lm_head.weight
    others = [(name, p) for name, p in model.named_parameters() if p is not head]
    optimizer = CoupledAdamW(
        [
            {"params": [("lm_head.weight", head)], "coupled": True},
            {"params": [pair for pair in others if pair[1].dim() >= 2]},
            {"params": [pair for pair in others if pair[1].dim() < 2]},
        ]
    )
    optimizer.load_state_dict(new["optimizer"])
    average = adamw.state[head]["exp_avg_sq"].double().mean(0, keepdim=True).float()
    assert torch.equal(optimizer.state[head]["exp_avg_sq"], average)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1, 0.0]
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    resumed = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    optimizer.load_state_dict(new["optimizer"])  # building a scheduler has changed the learning rates
    resumed.load_state_dict(new["scheduler"])
    for _ in range(3):
        for chosen, plan in ((adamw, schedule), (optimizer, resumed)):
            chosen.step()
            plan.step()
        assert resumed.get_last_lr() == [schedule.get_last_lr()[0]] * 3

    back = convert(tmp_path / "new.pt", tmp_path / "back.pt", "--to", "adamw", "--adamw-groups", "matrices")
    assert back.exit_code == 0, back.output
    fresh = torch.optim.AdamW(by_dimension(model))
    fresh.load_state_dict(load(tmp_path / "back.pt")["optimizer"])
    torch.testing.assert_close(fresh.state[head]["exp_avg_sq"].mean(0, keepdim=True), average, rtol=1e-5, atol=0)
    assert load(tmp_path / "back.pt")["scheduler"]["_last_lr"] == everything["scheduler"]["_last_lr"]


def test_names_in_the_file_are_enough_for_named_tables(tmp_path: Path) -> None:
    """As in Lightning: the optimizer in a list, its parameters in a model inside a module."""
    model = llama()
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    train_steps(model, adamw)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state, "optimizer_states": [adamw.state_dict()], "epoch": 1}, tmp_path / "last.ckpt")
    result = convert(tmp_path / "last.ckpt", tmp_path / "new.ckpt", "--to", "coupled", "--couple", "lm_head.weight")
    assert result.exit_code == 0, result.output
    optimizer = CoupledAdamW(model)
    optimizer.load_state_dict(load(tmp_path / "new.ckpt")["optimizer_states"][0])
    expected = adamw.state[model.lm_head.weight]["exp_avg_sq"].double().mean(0, keepdim=True).float()
    assert torch.equal(optimizer.state[model.lm_head.weight]["exp_avg_sq"], expected)
    assert torch.equal(
        optimizer.state[model.model.norm.weight]["exp_avg_sq"], adamw.state[model.model.norm.weight]["exp_avg_sq"]
    )


def test_names_with_a_prefix_belong_to_the_model_inside(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(nn.ModuleDict({"inner": model}).named_parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder)
    assert result.exit_code == 0, result.output
    optimizer = CoupledAdamW(model)
    optimizer.load_state_dict(load(tmp_path / "coupled.pt"))
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    norm = model.model.norm.weight
    assert torch.equal(optimizer.state[norm]["exp_avg_sq"], adamw.state[norm]["exp_avg_sq"])


def test_a_model_trained_in_bfloat16_keeps_its_dtypes(tmp_path: Path) -> None:
    model = llama()
    folder = write_model(tmp_path / "model", model)  # its config says float32
    model.bfloat16()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    assert convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder).exit_code == 0
    coupled = load(tmp_path / "coupled.pt")["state"][0]
    assert (coupled["exp_avg"].dtype, coupled["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    assert coupled["exp_avg_sq"].shape == (1, H)
    assert convert(tmp_path / "coupled.pt", tmp_path / "back.pt", "--to", "adamw", "--model", folder).exit_code == 0
    states = states_by_name(load(tmp_path / "back.pt"), names_in_order(adamw, model))
    head = states["lm_head.weight"]["exp_avg_sq"]
    assert head.dtype == torch.bfloat16
    columns, rows = coupled["exp_avg_sq"], coupled["row_avg_sq"]
    torch.testing.assert_close(head, (columns * rows / columns.mean()).bfloat16())


def test_frozen_parameters_are_excluded_by_pattern(tmp_path: Path) -> None:
    model = llama()
    folder = write_model(tmp_path / "model", model)
    model.model.embed_tokens.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    arguments = (tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder)
    assert convert(*arguments).exit_code == 2
    assert convert(*arguments, "--frozen", "*embed_tokens*").exit_code == 0
    optimizer = CoupledAdamW(model)
    optimizer.load_state_dict(load(tmp_path / "coupled.pt"))
    assert optimizer.state[model.lm_head.weight]["exp_avg_sq"].shape == (1, H)


def test_the_summary_shows_tables_bytes_and_groups(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder)
    table = V * H * 4
    for words in ("lm_head.weight", f"{(2 * table + 4) / 1000:.2f} KB", f"{(table + 4 * (H + V) + 4) / 1000:.2f} KB"):
        assert words in result.stdout
    for name in ("output_embeddings", "input_embeddings", "decay", "no_decay", "0.01"):
        assert name in result.stdout
    assert "your own row_exponent, mean_free and options" in result.stdout
    assert "The file sets lr and betas" in result.stdout


def test_the_page_and_the_help_list_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text()
    shown = convert("--help").output
    assert "coupled-adam convert adamw/checkpoint-500 coupled/checkpoint-500 --to coupled" in " ".join(shown.split())
    for parameter in typer.main.get_command(app).commands["convert"].params:
        if parameter.name != "help" and parameter.param_type_name == "option":
            assert f"`{parameter.opts[0]}" in page
            assert parameter.opts[0] in shown
