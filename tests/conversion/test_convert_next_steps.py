"""The lines that `coupled-adam convert` prints load the new file: they are run as printed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_runs import H, V, convert, llama, train_steps

from coupled_adam import CoupledAdamW, param_groups

PLACES: dict[str, Callable[[Any], Any]] = {
    "a state dict": lambda state: state,
    "a file with the model": lambda state: {"model": llama().state_dict(), "optimizer": state},
    "Lightning": lambda state: {"optimizer_states": [state]},
}


def loaded_as_printed(output: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    lines = [line.strip() for line in output.splitlines() if line.startswith("    ")]
    names: dict[str, Any] = {"CoupledAdamW": CoupledAdamW, "param_groups": param_groups, "torch": torch, "model": model}
    exec("\n".join(lines), names)
    optimizer: torch.optim.Optimizer = names["optimizer"]
    return optimizer


@pytest.mark.parametrize("place", PLACES)
def test_the_printed_lines_load_the_converted_file_there_and_back(tmp_path: Path, place: str) -> None:
    model = llama()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "model")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, adamw)
    torch.save(PLACES[place](adamw.state_dict()), tmp_path / "adamw.pt")
    second_moment = adamw.state[model.lm_head.weight]["exp_avg_sq"]

    coupled = convert(tmp_path / "adamw.pt", tmp_path / "coupled.pt", "--to", "coupled", "--model", tmp_path / "model")
    optimizer = loaded_as_printed(coupled.stdout, model)
    assert isinstance(optimizer, CoupledAdamW)
    found = optimizer.state[model.lm_head.weight]["exp_avg_sq"]
    torch.testing.assert_close(found, second_moment.mean(dim=0, keepdim=True))

    for options in ([], ["--adamw-groups", "tables"]):
        arguments = ["--to", "adamw", "--model", tmp_path / "model", "--overwrite", *options]
        back = convert(tmp_path / "coupled.pt", tmp_path / "back.pt", *arguments)
        optimizer = loaded_as_printed(back.stdout, model)
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.state[model.lm_head.weight]["exp_avg_sq"].shape == (V, H)
