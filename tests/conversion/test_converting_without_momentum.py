"""`coupled-adam convert` of files whose tables have no first moment, because their beta1 is 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_runs import V, convert, llama, load, train_steps
from test_convert_files import write_model

from coupled_adam import CoupledAdamW


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
