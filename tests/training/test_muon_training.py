"""Runs whose matrices are trained by Muon, and tables with their own settings: updates, resuming, memory."""

import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import rows, saved_tensors, small_config, train
from test_family_training import assert_resumes_bitwise
from test_training_optimizers import loss_of, section, small_model, weights
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from coupled_adam import CoupledAdamW
from coupled_adam.base.errors import UserError
from coupled_adam.cli import app
from coupled_adam.config.run_config import load_config
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.models.model_config import build_model
from coupled_adam.optimizer import BatchedMuon, newton_schulz
from coupled_adam.training import estimates, run
from coupled_adam.training.optimizers import build_optimizers

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from muon_reference import muon_reference

MUON: dict[str, Any] = {"matrices": "muon"}
TABLES = {"tables": {"lr_factor": 3.0, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4}}


def is_hidden_matrix(name: str) -> bool:
    return "c_" in name and name.endswith("weight")


@pytest.mark.parametrize("embeddings", ["adamw", "coupled", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_the_matrices_of_the_blocks_and_nothing_else(embeddings: str, tied: bool) -> None:
    model = small_model(tied)
    factor = 10.0 if embeddings == "sgd" else None
    optimizers = build_optimizers(model, section(embeddings=embeddings, sgd_factor=factor, **MUON)).optimizers
    muon = optimizers[-1]
    assert isinstance(muon, BatchedMuon)
    assert {name for group in muon.param_groups for name in group["param_names"]} == {
        name for name, _ in model.named_parameters() if is_hidden_matrix(name)
    }
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a_step_equals_clipping_followed_by_muon_and_torchs_adamw(adjust: str) -> None:
    model, reference = small_model(), small_model()
    settings = {"lr_factor": 2.0, "momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": adjust}
    optimizers = build_optimizers(model, section(embeddings="adamw", max_grad_norm=0.1, **MUON, muon=settings))
    optimizers.optimizers[-1].param_groups[0]["ns_dtype"] = "float32"  # for tight tolerances
    start, gradients = weights(model), []
    others = [p for name, p in reference.named_parameters() if not is_hidden_matrix(name)]
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.clone()
        norm = optimizers.step()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert float(expected) > 0.1  # otherwise nothing would be clipped
        gradients.append({name: p.grad.clone() for name, p in reference.named_parameters()})
        adamw.step()
    for name, found in weights(model).items():
        if not is_hidden_matrix(name):
            torch.testing.assert_close(found, weights(reference)[name], rtol=1e-5, atol=1e-7)
            continue
        A, B = found.shape
        ratio = math.sqrt(max(1, A / B)) if adjust == "original" else 0.2 * math.sqrt(max(A, B))
        expected, _ = muon_reference(
            start[name], [step[name] for step in gradients], lr=2e-2, weight_decay=0.3, momentum=0.9, ratio=ratio
        )
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_clipping_counts_the_gradients_of_all_optimizers() -> None:
    """The momentum after one step is a twentieth of the gradient, clipped by the norm of everything."""
    model = small_model()
    optimizers = build_optimizers(model, section(max_grad_norm=0.1, **MUON))
    loss_of(model).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert float(optimizers.step()) == pytest.approx(norm, rel=1e-5)
    coupled, muon = optimizers.optimizers
    assert isinstance(coupled, CoupledAdamW)
    for name, p in model.named_parameters():
        if is_hidden_matrix(name):
            momentum = muon.state[p]["momentum_buffer"]
            torch.testing.assert_close(momentum, 0.05 * gradients[name] * 0.1 / norm, rtol=1e-4, atol=1e-9)
    first_moment = coupled.state[model.get_parameter("wte.weight")]["exp_avg"]
    torch.testing.assert_close(first_moment, 0.1 * gradients["wte.weight"] * 0.1 / norm, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("capturable", [False, True])
def test_learning_rates_keep_their_ratios_along_the_schedule(capturable: bool) -> None:
    settings = {"muon": {"lr_factor": 20.0}, "tables": {"lr_factor": 3.0}, "input_table": {"lr_factor": 0.5}}
    optimizers = build_optimizers(small_model(tied=False), section(**MUON, **settings), capturable=capturable)
    for lr in (1e-2, 4e-3, 0.0):
        optimizers.set_lr(lr)
        rates = {
            group["name"]: float(group["lr"]) for optimizer in optimizers.optimizers for group in optimizer.param_groups
        }
        assert rates == pytest.approx(
            {
                "output_embeddings": 3 * lr,
                "input_embeddings": 0.5 * lr,
                "no_decay": lr,
                "hidden_matrices": 20 * lr,
            }
        )


@pytest.mark.parametrize("embeddings", ["adamw", "coupled"])
def test_settings_of_a_table_apply_only_to_its_update(embeddings: str) -> None:
    """With beta1 = beta2 = 0.5 and a large eps the first step is lr g / (|g| + eps), whatever the others have."""
    plain, own = small_model(tied=False), small_model(tied=False)
    numbers = {"lr_factor": 3.0, "beta1": 0.5, "beta2": 0.25, "eps": 1.0}
    for model, settings in ((plain, {}), (own, {"input_table": numbers})):
        optimizers = build_optimizers(model, section(embeddings=embeddings, max_grad_norm=0.0, **settings))
        loss_of(model).backward()
        gradient = model.get_parameter("wte.weight").grad.clone()
        optimizers.step()
    start = weights(small_model(tied=False))["wte.weight"]
    expected = start - 3e-2 * gradient / (gradient.abs() + 1.0)
    torch.testing.assert_close(weights(own)["wte.weight"], expected, rtol=1e-5, atol=1e-7)
    for name in weights(plain).keys() - {"wte.weight"}:
        assert torch.equal(weights(plain)[name], weights(own)[name]), name
    state = next(optimizer.state[own.get_parameter("wte.weight")] for optimizer in optimizers.optimizers)
    torch.testing.assert_close(state["exp_avg"], 0.5 * gradient)
    torch.testing.assert_close(state["exp_avg_sq"], 0.75 * gradient.square())


def test_a_model_without_matrices_is_refused() -> None:
    tables_alone = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    with pytest.raises(UserError, match=r"optimizer\.matrices"):
        build_optimizers(tables_alone, section(**MUON))


@pytest.mark.parametrize("optimizer", [MUON, {**MUON, "embeddings": "adamw"}, {**MUON, **TABLES}, TABLES])
def test_resumed_run_is_bitwise_equal(
    optimizer: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumes_bitwise(optimizer, corpus, tmp_path, monkeypatch)


def test_the_checkpoint_has_one_moment_per_matrix_and_the_run_learns(corpus: Path, tmp_path: Path) -> None:
    outcome, output = train(small_config(corpus, optimizer=MUON), tmp_path / "run")
    assert outcome.is_finished
    assert "muon" in output
    saved = saved_tensors(tmp_path / "run")
    moments: dict[str, set[str]] = {}
    for key in saved:
        if key.startswith("optimizer."):
            name, _, moment = key.removeprefix("optimizer.").rpartition(".")
            moments.setdefault(name, set()).add(moment)
    assert {name for name in moments if moments[name] == {"momentum_buffer"}} == {
        name for name in moments if is_hidden_matrix(name)
    }
    assert moments["wte.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    losses = [row["loss"] for row in rows(tmp_path / "run") if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1


def test_resuming_with_another_optimizer_of_the_matrices_is_refused(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, optimizer=MUON), tmp_path / "run")
    with pytest.raises(ValueError, match=r"optimizer\.matrices"):
        train(small_config(corpus), tmp_path / "run", resume=True)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", ["adamw", "coupled"])
def test_state_of_muon_is_counted_to_the_byte(architecture: str, embeddings: str) -> None:
    config = load_config(
        "tiny",
        [
            *("model.width=96", "model.heads=3", "model.layers=3", "training.batch_size=8", "training.tokens=1M"),
            *("optimizer.matrices=muon", f"optimizer.embeddings={embeddings}", f"model.architecture={architecture}"),
        ],
    )
    model = build_model(config.to_model_config())
    optimizers = build_optimizers(model, config.optimizer).optimizers
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    moments = [m for each in optimizers for state in each.state.values() for m in state.values() if m.ndim > 0]
    assert estimates.optimizer_bytes(config) == sum(moment.nbytes for moment in moments)
    shapes = sorted(tuple(p.shape) for group in optimizers[-1].param_groups for p in group["params"])
    assert sorted(estimates.hidden_matrices(config)) == shapes


def test_the_flops_of_muon_are_those_of_its_products() -> None:
    """Counted by torch's FLOP counter while the iteration runs on empty matrices."""
    config = load_config("tiny", ["optimizer.matrices=muon"])
    with FlopCounterMode(display=False) as counter:
        for m, n in map(sorted, estimates.hidden_matrices(config)):
            empty = torch.zeros(1, m, n, device="meta")
            newton_schulz.orthogonalised(empty, newton_schulz.COEFFICIENTS, newton_schulz.STEPS, newton_schulz.EPS)
    assert estimates.muon_flops(config) == counter.get_total_flops()
    assert estimates.muon_flops(load_config("tiny")) == 0
    assert estimates.NEWTON_SCHULZ_STEPS == newton_schulz.STEPS
    slower = estimates.seconds(config, estimates.cpu(1)) - estimates.seconds(load_config("tiny"), estimates.cpu(1))
    assert slower > 0


@pytest.mark.parametrize(("optimizer", "expected"), [(MUON, 1), ({}, 0)])
def test_instructions_for_bfloat16_are_checked_before_muon_multiplies(
    optimizer: dict[str, Any], expected: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(run, "limit_instructions", lambda: calls.append(1))
    train(small_config(corpus, optimizer=optimizer, training={"precision": "float32"}), tmp_path / "run")
    assert len(calls) == expected


def test_the_default_folder_name_contains_muon(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(to_toml(small_config(corpus, optimizer=MUON)))
    result = CliRunner().invoke(app, ["train", "small.toml"])
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small-coupled-muon-seed1"]
    shown = CliRunner().invoke(app, ["train", "runs/small-coupled-muon-seed1", "--show"])
    assert tomllib.loads(shown.output)["optimizer"]["matrices"] == "muon"
