"""The section on litgpt: a function for `class_path`, called as litgpt does, and by litgpt itself if installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step

ROWS, H = 128, 16


class LitgptShape(nn.Module):
    """The parameters of litgpt's GPT, in order."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(H, ROWS, bias=False)
        block = nn.ModuleDict({"norm_1": nn.LayerNorm(H), "proj": nn.Linear(H, H)})
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(ROWS, H), "h": nn.ModuleList([block])})
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("framework_files")
def test_the_head_is_coupled_and_tables_and_vectors_are_not_decayed(tied: bool) -> None:
    from coupled_litgpt import coupled_adamw

    model = LitgptShape(tied)
    optimizer = coupled_adamw(model.parameters(), rows=ROWS, lr=2e-3, weight_decay=0.1, fused=False, row_exponent=0.25)
    assert isinstance(optimizer, CoupledAdamW)
    held = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert held.keys() == set(model.parameters())
    for name, p in model.named_parameters():
        assert held[p]["coupled"] == (name == "lm_head.weight"), name
        assert held[p]["weight_decay"] == (0.1 if name.endswith("proj.weight") else 0.0), name
        assert held[p]["lr"] == optimizer.defaults["lr"] == 2e-3  # litgpt reads the defaults
    assert held[model.lm_head.weight]["row_exponent"] == 0.25


@pytest.mark.usefixtures("framework_files")
def test_frozen_parameters_are_left_out() -> None:
    from coupled_litgpt import coupled_adamw

    model = LitgptShape(tied=False)
    model.transformer["wte"].requires_grad_(False)
    optimizer = coupled_adamw(model.parameters(), rows=ROWS)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("flat", [False, True], ids=["another number of rows", "flattened"])
@pytest.mark.usefixtures("framework_files")
def test_without_a_table_the_function_names_the_rows(flat: bool) -> None:
    from coupled_litgpt import coupled_adamw

    parameters = [nn.Parameter(torch.zeros(ROWS * H) if flat else torch.zeros(ROWS + 1, H))]
    with pytest.raises(ValueError, match=rf"\b0 matrices have {ROWS} rows.*padded_vocab_size.*FSDP1"):
        coupled_adamw(parameters, rows=ROWS)


def test_the_class_itself_is_refused_without_a_coupled_group() -> None:
    with pytest.raises(ValueError, match="No coupled group"):
        CoupledAdamW(LitgptShape(tied=False).parameters(), lr=1e-3)


DATA = """
import torch
from dataclasses import dataclass
from litgpt.data import DataModule
from torch.utils.data import DataLoader


@dataclass
class RandomTokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size = batch_size

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(0, 101, (17,), generator=generator) for _ in range(16)]
        return DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader
"""
CONFIG = """
model_name: tiny
model_config: {name: tiny, block_size: 16, vocab_size: 101, padded_vocab_size: 128, n_layer: 1, n_head: 2, n_embd: 16}
out_dir: out
precision: 32-true
devices: 1
data: random_tokens.RandomTokens
train: {save_interval: 1, log_interval: 1, global_batch_size: 4, micro_batch_size: 4, max_tokens: 192, max_norm: 1.0,
        lr_warmup_steps: 0, min_lr: 1e-3, max_seq_length: 16}
eval: {interval: 1000, max_iters: 1, initial_validation: false, final_validation: false}
logger_name: csv
optimizer:
  class_path: coupled_litgpt.coupled_adamw
  init_args: {rows: 128, lr: 1e-3, weight_decay: 0.1}
"""


@pytest.mark.skipif(find_spec("litgpt") is None, reason="litgpt is not installed")
def test_litgpt_pretrain_couples_the_head(framework_files: Path) -> None:
    (framework_files / "random_tokens.py").write_text(DATA)
    (framework_files / "run.yaml").write_text(CONFIG)
    path = os.pathsep.join([str(framework_files), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "litgpt", "pretrain", "--config", "run.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (
        torch.load(path / "lit_model.pth", weights_only=False)
        for path in sorted((framework_files / "out").glob("step-*"))[:2]
    )
    before, state = (checkpoint["optimizer"]["state"][0] for checkpoint in (first, second))  # of the coupled head
    assert tuple(state["exp_avg_sq"].shape) == (1, H)
    # The moments before and after the second step must follow Algorithm 1 for its gradient.
    gradient = (state["exp_avg"] - 0.9 * before["exp_avg"]) / 0.1
    start = reference_init(first["model"]["lm_head.weight"])._replace(
        first_moment=before["exp_avg"].double(),
        second_moment=before["exp_avg_sq"].double().expand(ROWS, H),
        step=int(before["step"]),
    )
    expected = reference_step(start, gradient, lr=1e-3)
    torch.testing.assert_close(second["model"]["lm_head.weight"].double(), expected.embeddings, rtol=0, atol=2e-6)
