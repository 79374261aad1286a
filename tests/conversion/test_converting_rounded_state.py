"""`coupled-adam convert` of files whose first moments are in bfloat16."""

from pathlib import Path

import torch
from conversion_runs import V, convert, llama, load, train_steps
from test_convert_files import write_model

from coupled_adam import CoupledAdamW


def test_adamw_gets_all_moments_in_float32(tmp_path: Path) -> None:
    model = llama()
    optimizer = CoupledAdamW(model, couple="all", lr=1e-2, state_dtype=torch.bfloat16)
    train_steps(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "coupled.pt")
    folder = write_model(tmp_path / "model", model)
    arguments = ("--to", "adamw", "--model", folder, "--adamw-groups", "single")
    result = convert(tmp_path / "coupled.pt", tmp_path / "adamw.pt", *arguments)
    assert result.exit_code == 0, result.output
    states = load(tmp_path / "adamw.pt")["state"].values()
    assert {state[key].dtype for state in states for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}

    adamw = torch.optim.AdamW(model.parameters())
    adamw.load_state_dict(load(tmp_path / "adamw.pt"))
    for parameter in model.parameters():
        before, after = optimizer.state[parameter], adamw.state[parameter]
        assert before["exp_avg"].dtype == (torch.bfloat16 if parameter.shape[0] == V else torch.float32)
        assert torch.equal(after["exp_avg"], before["exp_avg"].float())
        assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"].expand_as(parameter))


def test_a_file_of_adamw_is_converted_for_an_optimizer_with_bfloat16_moments(tmp_path: Path) -> None:
    model = llama()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    folder = write_model(tmp_path / "model", model)
    result = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", folder)
    assert result.exit_code == 0, result.output
    optimizer = CoupledAdamW(model, state_dtype=torch.bfloat16, state_seed=4)
    optimizer.load_state_dict(load(tmp_path / "coupled.pt"))
    for group in optimizer.param_groups:
        assert group["state_dtype"] == (torch.bfloat16 if group["coupled"] else None)
        for parameter in group["params"]:
            dtype = torch.bfloat16 if group["coupled"] else torch.float32
            assert torch.equal(optimizer.state[parameter]["exp_avg"], adamw.state[parameter]["exp_avg"].to(dtype))
    assert next(group["state_seed"] for group in optimizer.param_groups if group["coupled"]) == 4
    train_steps(model, optimizer)
