"""A real Hugging Face Trainer run switches its optimizer with `coupled-adam convert`, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion_runs import V, convert, gpt2, llama, load, names_in_order, states_by_name, trainer
from torch import Tensor, nn

from coupled_adam import CoupledAdamW

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def updated(
    step: dict[str, Any], name: str, m: Tensor, v: Tensor, t: int, weight_decay: float, coupled: bool
) -> Tensor:
    """One step of Algorithm 1, or of AdamW, in float64."""
    grad, weight, lr = step["grad"][name], step["before"][name], step["lr"][0]
    square = grad.square().mean(0, keepdim=True) if coupled else grad.square()
    m = BETA1 * m.double() + (1 - BETA1) * grad
    v = BETA2 * v.double() + (1 - BETA2) * square
    direction = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)
    return weight * (1 - lr * weight_decay) - lr * direction


def resume(model: nn.Module, checkpoint: Path, folder: Path, steps: int, **options: Any) -> Any:
    resumed, recorder = trainer(model, folder, steps, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    return resumed, recorder


@pytest.mark.parametrize(
    ("build", "table", "others"),
    [
        (llama, "lm_head.weight", {"model.embed_tokens.weight": 0.0, "model.layers.1.mlp.up_proj.weight": 0.1}),
        (gpt2, "transformer.wte.weight", {"transformer.wpe.weight": 0.0, "transformer.h.0.attn.c_attn.weight": 0.1}),
    ],
    ids=["llama", "gpt2"],
)
def test_a_trainer_run_switches_to_coupled_adam_and_back(
    tmp_path: Path, build: Callable[[], nn.Module], table: str, others: dict[str, float]
) -> None:
    model = build()
    adamw, adamw_steps = trainer(model, tmp_path / "adamw", steps=6)
    adamw.train()
    names = names_in_order(adamw.optimizer, model)
    saved = states_by_name(load(tmp_path / "adamw" / "checkpoint-3" / "optimizer.pt"), names)

    result = convert(tmp_path / "adamw" / "checkpoint-3", tmp_path / "coupled" / "checkpoint-3", "--to", "coupled")
    assert result.exit_code == 0, result.output
    model = build()
    options = {"optimizer_cls_and_kwargs": (CoupledAdamW, {"model": model, "lr": 123.0})}
    coupled, steps = resume(model, tmp_path / "coupled" / "checkpoint-3", tmp_path / "coupled", 6, **options)
    assert len(steps.steps) == 3
    # The same weights, batch and learning rate as in an uninterrupted run.
    for log in ("loss", "learning_rate", "step"):
        assert coupled.state.log_history[3][log] == adamw.state.log_history[3][log]
    assert [set(step["lr"]) for step in steps.steps] == [set(step["lr"]) for step in adamw_steps.steps[3:]]
    first, m, v = steps.steps[0], saved[table]["exp_avg"], saved[table]["exp_avg_sq"].double().mean(0, keepdim=True)
    expected = updated(first, table, m, v, t=4, weight_decay=0.0, coupled=True)
    torch.testing.assert_close(first["after"][table], expected, rtol=1e-5, atol=1e-7)
    for name, decay in others.items():
        expected = updated(first, name, saved[name]["exp_avg"], saved[name]["exp_avg_sq"], 4, decay, coupled=False)
        torch.testing.assert_close(first["after"][name], expected, rtol=1e-5, atol=1e-7)

    written = load(tmp_path / "coupled" / "checkpoint-6" / "optimizer.pt")
    saved = states_by_name(written, names_in_order(coupled.optimizer, model))
    result = convert(tmp_path / "coupled" / "checkpoint-6", tmp_path / "back" / "checkpoint-6", "--to", "adamw")
    assert result.exit_code == 0, result.output
    model = build()
    back, steps = resume(model, tmp_path / "back" / "checkpoint-6", tmp_path / "back", 9)
    assert type(back.optimizer.optimizer) is torch.optim.AdamW
    sizes = [[len(group["params"]) for group in run.optimizer.param_groups] for run in (back, adamw)]
    assert sizes[0] == sizes[1]
    first = steps.steps[0]
    for name, decay in ({table: 0.1} | dict.fromkeys(others, 0.1)).items():
        v = saved[name]["exp_avg_sq"].expand_as(saved[name]["exp_avg"])
        expected = updated(first, name, saved[name]["exp_avg"], v, 7, decay, coupled=False)
        torch.testing.assert_close(first["after"][name], expected, rtol=1e-5, atol=1e-7)
    assert back.optimizer.state[dict(model.named_parameters())[table]]["exp_avg_sq"].shape[0] == V
    assert back.state.log_history[-2]["loss"] < adamw.state.log_history[0]["loss"]
    # Once more: converted files are AdamW files like any other.
    assert convert(tmp_path / "back" / "checkpoint-9", tmp_path / "again", "--to", "coupled").exit_code == 0


def test_everything_else_in_a_trainer_checkpoint_is_copied(tmp_path: Path) -> None:
    model = llama()
    run, _ = trainer(model, tmp_path / "adamw", steps=3)
    run.train()
    source = tmp_path / "adamw" / "checkpoint-3"
    (source / "adapter").mkdir()
    (source / "adapter" / "notes.txt").write_text("kept")
    assert convert(source, tmp_path / "new", "--to", "coupled").exit_code == 0
    files = {path.relative_to(source) for path in source.rglob("*")}
    assert {path.relative_to(tmp_path / "new") for path in (tmp_path / "new").rglob("*")} == files
    for name in files - {Path("optimizer.pt"), Path("scheduler.pt"), Path("adapter")}:
        assert (tmp_path / "new" / name).read_bytes() == (source / name).read_bytes()
        assert not (tmp_path / "new" / name).samefile(source / name)
    before, after = load(source / "scheduler.pt"), load(tmp_path / "new" / "scheduler.pt")
    groups = len(load(tmp_path / "new" / "optimizer.pt")["param_groups"])
    assert after["last_epoch"] == before["last_epoch"] == 3
    assert after["base_lrs"] == [before["base_lrs"][0]] * groups
