"""Real Trainer runs and optimizer files to convert, and the command as a user calls it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from click.testing import Result
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from typer.testing import CliRunner

from coupled_adam.cli import app

V, H = 37, 8


def convert(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["convert", *map(str, arguments)])


def llama() -> LlamaForCausalLM:
    """Untied: a table and a head."""
    torch.manual_seed(0)
    size = {"hidden_size": H, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **size))


def gpt2() -> GPT2LMHeadModel:
    """Tied, and with a position table, which the Trainer decays and param_groups does not."""
    torch.manual_seed(0)
    size = {"n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size))


class Recorder(TrainerCallback):
    """Weights, gradients and learning rates around every step, as float64 copies."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        named = dict(self.model.named_parameters())
        self.steps.append(
            {
                "before": {name: p.detach().double().clone() for name, p in named.items()},
                "grad": {name: p.grad.double().clone() for name, p in named.items()},
                "lr": [group["lr"] for group in optimizer.param_groups],
            }
        )

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        named = self.model.named_parameters()
        self.steps[-1]["after"] = {name: p.detach().double().clone() for name, p in named}


def trainer(model: nn.Module, folder: Path, steps: int, **options: Any) -> tuple[Trainer, Recorder]:
    """A Trainer that saves every third step, with a schedule that ends at step 9."""
    tokens = torch.randint(0, V, (16, 7), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=9,
        save_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    recorder = Recorder(model)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model, arguments, train_dataset=data, callbacks=[recorder], **options), recorder


def names_in_order(optimizer: Any, model: nn.Module) -> list[str]:
    """The name of every parameter of a live optimizer, in its order: the truth about a file without names."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def states_by_name(state_dict: dict[str, Any], names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    return {name: state_dict["state"][saved_id] for name, saved_id in zip(names, ids, strict=True)}


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        tokens = torch.randint(0, V, (4, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)
