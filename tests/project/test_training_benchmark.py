"""What benchmarks/train.py measures: variants of our peers, and the experiment with the gradients of attention."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import ModelConfig, build_model

MODEL = ModelConfig("gpt2", layers=2, heads=2, width=16, context=8, vocabulary_size=32)


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import train

    return train


def parsed(train: Any, monkeypatch: pytest.MonkeyPatch, options: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["train.py", *options.split()])
    return train.parse()


def test_each_of_our_peers_is_measured_with_each_setting(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--peers plain ours --residual-dtype float32 bfloat16 --combo-kernels off on"
    workload = train.Workload(MODEL, 2, 2, torch.device("cuda"), bf16=True, compile=True, cuda_graphs=True)
    found = list(train.variants(parsed(train, monkeypatch, options), workload))
    assert [
        (name, peer, each.model.residual_dtype, each.combo_kernels, each.qkv_apart) for name, peer, each in found
    ] == [
        ("plain", "plain", "float32", False, False),
        ("ours", "ours", "float32", False, False),
        ("ours-combo", "ours", "float32", True, False),
        ("ours-bf16-residual", "ours", "bfloat16", False, False),
        ("ours-bf16-residual-combo", "ours", "bfloat16", True, False),
    ]
    apart = list(train.variants(parsed(train, monkeypatch, "--peers muon --qkv-gradients apart"), workload))
    assert [(name, each.qkv_apart) for name, _, each in apart] == [("muon-qkv-apart", True)]


@pytest.mark.parametrize(
    "options", ["--residual-dtype bfloat16", "--combo-kernels on", "--qkv-gradients apart --preset llama"]
)
def test_settings_without_effect_are_refused(options: str, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = ModelConfig("llama", layers=1, heads=1, width=8)
    model = llama if "llama" in options else MODEL
    workload = train.Workload(model, 2, 2, torch.device("cpu"), bf16=False, compile=False, cuda_graphs=False)
    with pytest.raises(SystemExit, match=options.split()[0]):
        train.require_effect(parsed(train, monkeypatch, options), workload)


@pytest.mark.usefixtures("train")
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-6), (True, 0.02)])
def test_gradients_apart_are_those_of_float64(autocast: bool, tolerance: float) -> None:
    from coupled_adam.models.gpt2 import GPT2Attention
    from qkv_gradients import attention, gradients_apart

    windows = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))

    def gradients(dtype: torch.dtype, autocast: bool) -> dict[str, Tensor]:
        model = build_model(MODEL)
        initialise(model, seed=1)
        model.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(torch.float64, autocast=False)
    with gradients_apart():
        assert GPT2Attention.forward is attention
        found = gradients(torch.float32, autocast)
    assert GPT2Attention.forward is not attention
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() < tolerance * gradient.norm(), name
