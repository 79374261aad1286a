"""Checkpoints as accelerate and Lightning write them, converted and resumed by them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversion_runs import H, convert, llama, load, train_steps

from coupled_adam import CoupledAdamW

SMALL_MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(37, 8), nn.LayerNorm(8), nn.Linear(8, 37, bias=False))
"""
LIGHTNING_RUN = """
import sys
import lightning, torch
from coupled_adam import CoupledAdamW
from small_model_of_mine import build
from torch import nn
from torch.utils.data import DataLoader

kind, given, written = sys.argv[1:]


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, tokens, index):
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def configure_optimizers(self):
        of_kind = {"adamw": lambda: torch.optim.AdamW(self.parameters()), "coupled": lambda: CoupledAdamW(self.model)}
        optimizer = of_kind[kind]()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


torch.manual_seed(0)
task = Task()
data = DataLoader(torch.randint(0, 37, (3, 2, 5)), batch_size=None)
epochs = 1 if kind == "adamw" else 2
trainer = lightning.Trainer(
    max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
)
trainer.fit(task, data, ckpt_path=None if given == "-" else given)
trainer.save_checkpoint(written)
print(trainer.optimizers[0].param_groups[0]["lr"])
"""


@pytest.mark.slow
def test_lightning_resumes_from_a_converted_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "small_model_of_mine.py").write_text(SMALL_MODEL)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> float:
        command = [sys.executable, "-c", LIGHTNING_RUN, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout.splitlines()[-1])

    assert run("adamw", "-", tmp_path / "adamw.ckpt") == 5e-4
    function = "small_model_of_mine:build"
    result = convert(tmp_path / "adamw.ckpt", tmp_path / "new.ckpt", "--to", "coupled", "--model", function)
    assert result.exit_code == 0, result.output
    assert run("coupled", tmp_path / "new.ckpt", tmp_path / "coupled.ckpt") == 2.5e-4
    before = load(tmp_path / "adamw.ckpt")["optimizer_states"][0]
    (after,) = load(tmp_path / "coupled.ckpt")["optimizer_states"]
    assert after["state"][0]["exp_avg_sq"].shape == (1, 8)
    assert [float(state["step"]) for state in after["state"].values()] == [6.0] * 4
    assert len(before["param_groups"]) == 1


def test_accelerate_resumes_from_a_converted_folder(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    model.save_pretrained(tmp_path / "model")
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, wrapped, scheduled = accelerator.prepare(model, adamw, schedule)
    train_steps(prepared, wrapped)
    scheduled.step()
    accelerator.save_state(str(tmp_path / "adamw"))
    arguments = (tmp_path / "adamw", tmp_path / "coupled", "--to", "coupled")
    assert convert(*arguments).exit_code == 2  # the folder does not name the model
    result = convert(*arguments, "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output

    resumed = llama()
    optimizer = CoupledAdamW(resumed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, wrapped, scheduled = accelerator.prepare(resumed, optimizer, schedule)
    accelerator.load_state(str(tmp_path / "coupled"))
    head = adamw.state[model.lm_head.weight]["exp_avg_sq"].double().mean(0, keepdim=True).float()
    assert torch.equal(optimizer.state[resumed.lm_head.weight]["exp_avg_sq"], head)
    assert head.shape == (1, H)
    train_steps(prepared, wrapped, 1)
    scheduled.step()
    assert {group["lr"] for group in optimizer.param_groups} == {2.5e-3}
