"""`coupled-adam convert` of files whose tables have no first moment, because their beta1 is 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_runs import V, convert, gpt2, llama, load, train_steps
from test_convert_files import write_model

from coupled_adam import CoupledAdamW, param_groups


@pytest.mark.parametrize("options", [{}, {"row_exponent": 1.0}], ids=str)
@pytest.mark.parametrize("named", [True, False])
def test_adamw_starts_with_moments_of_zero(tmp_path: Path, options: dict[str, Any], named: bool) -> None:
    model = llama()
    optimizer = CoupledAdamW(model, couple="all", lr=1e-2, betas=(0.0, 0.99), **options)
    train_steps(model, optimizer)
    file = optimizer.state_dict()
    if not named:
        for group in file["param_groups"]:
            del group["param_names"]
    torch.save(file, tmp_path / "coupled.pt")
    folder = write_model(tmp_path / "model", model)
    groups = "single" if named else "tables"
    arguments = ("--to", "adamw", "--model", folder, "--adamw-groups", groups)
    result = convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", *arguments)
    assert result.exit_code == 0, result.output
    states = load(tmp_path / "adamw.pt")["state"].values()
    assert all(state["exp_avg"].shape == state["exp_avg_sq"].shape for state in states)
    tables = [state for state in states if state["exp_avg"].shape[0] == V]
    assert len(tables) == 2
    assert not any(state["exp_avg"].any() for state in tables)
    assert all(state["exp_avg_sq"].any() for state in tables)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.bfloat16, {"row_exponent": 1.0}),
        (torch.bfloat16, {"state_dtype": torch.float32}),
        (torch.float32, {}),
        (torch.float64, {}),
    ],
    ids=str,
)
def test_moments_have_the_dtype_of_the_table_in_the_model(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = llama().to(dtype)
    optimizer = CoupledAdamW(model, couple="all", lr=1e-2, betas=(0.0, 0.99), **options)
    train_steps(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "coupled.pt")
    assert convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", "--to", "adamw").exit_code == 0
    states = load(tmp_path / "adamw.pt")["optimizer"]["state"].values()
    assert {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")} == {dtype}


def test_moments_of_a_float64_model_built_from_its_config_stay_float64(tmp_path: Path) -> None:
    model = llama().double()
    optimizer = CoupledAdamW(model, couple="all", lr=1e-2, betas=(0.0, 0.99))
    train_steps(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "coupled.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", "--to", "adamw", "--model", folder)
    assert result.exit_code == 0, result.output
    adamw = torch.optim.AdamW(model.parameters())
    adamw.load_state_dict(load(tmp_path / "adamw.pt"))
    for parameter, state in adamw.state.items():
        assert state["exp_avg_sq"].dtype == torch.float64
        row = optimizer.state[parameter]["exp_avg_sq"]
        assert torch.equal(state["exp_avg_sq"], row.expand(parameter.shape))


def test_a_file_without_a_model_asks_for_it(tmp_path: Path) -> None:
    model = llama()
    optimizer = CoupledAdamW(model, lr=1e-2, betas=(0.0, 0.99))
    train_steps(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "coupled.pt")
    result = convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", "--to", "adamw")
    assert result.exit_code == 2
    assert "--model" in result.output
    again = convert(tmp_path / "coupled.pt", tmp_path / "again.pt", "--to", "coupled", "--couple", "lm_head.weight")
    assert "nothing to convert" in again.output


def test_a_table_with_its_own_betas_needs_its_own_group_of_adamw(tmp_path: Path) -> None:
    model = llama()
    optimizer = CoupledAdamW(model, lr=1e-2, options={"output_embeddings": {"betas": (0.0, 0.99)}})
    train_steps(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "coupled.pt")
    arguments = (tmp_path / "coupled.pt", tmp_path / "adamw.pt", "--to", "adamw")
    arguments += ("--model", write_model(tmp_path / "model", model))
    refused = convert(*arguments)
    assert refused.exit_code == 2
    assert "betas is (0.0, 0.99), (0.9, 0.999)" in refused.output
    remedies = [refused.output.find(remedy) for remedy in ("--adamw-groups tables", "convert_state_dict")]
    assert 0 < remedies[0] < remedies[1]
    assert convert(*arguments, "--adamw-groups", "tables").exit_code == 0
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    adamw.load_state_dict(load(tmp_path / "adamw.pt"))
    assert [group["betas"] for group in adamw.param_groups] == [(0.0, 0.99), *[(0.9, 0.999)] * 3]


def test_tables_that_differ_within_a_group_of_adamw_are_converted_in_python(tmp_path: Path) -> None:
    model = gpt2()
    tables = [("transformer.wte.weight", model.transformer.wte.weight)]
    others = [(name, p) for name, p in model.named_parameters() if p is not tables[0][1]]
    groups = [{"params": tables, "coupled": True}, {"params": others[:1]}, {"params": others[1:], "betas": (0.8, 0.9)}]
    optimizer = CoupledAdamW(groups, lr=1e-2)
    train_steps(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "coupled.pt")
    folder = write_model(tmp_path / "model", model)
    arguments = ("--to", "adamw", "--model", folder, "--adamw-groups", "tables")
    refused = convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", *arguments)
    assert refused.exit_code == 2
    assert "convert_state_dict" in refused.output
    assert "--adamw-groups" not in refused.output


def test_a_table_of_adamw_loses_its_moment_when_it_is_loaded(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.0, 0.99))
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder)
    assert result.exit_code == 0, result.output
    optimizer = CoupledAdamW(model, betas=(0.0, 0.99))
    optimizer.load_state_dict(load(tmp_path / "coupled.pt"))
    for group in optimizer.param_groups:
        assert all(("exp_avg" in optimizer.state[p]) != group["coupled"] for p in group["params"])
    train_steps(model, optimizer)
