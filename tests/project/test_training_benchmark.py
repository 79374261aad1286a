"""What benchmarks/train.py measures: variants of our peers, and which settings it refuses."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coupled_adam.models.model_config import ModelConfig

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
    assert [(name, peer, each.model.residual_dtype, each.combo_kernels) for name, peer, each in found] == [
        ("plain", "plain", "float32", False),
        ("ours", "ours", "float32", False),
        ("ours-combo", "ours", "float32", True),
        ("ours-bf16-residual", "ours", "bfloat16", False),
        ("ours-bf16-residual-combo", "ours", "bfloat16", True),
    ]
    muon = list(train.variants(parsed(train, monkeypatch, "--peers muon --combo-kernels on"), workload))
    assert [(name, peer, each.combo_kernels) for name, peer, each in muon] == [("muon-combo", "muon", True)]


@pytest.mark.parametrize("options", ["--residual-dtype bfloat16", "--combo-kernels on"])
def test_settings_without_effect_are_refused(options: str, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = train.Workload(MODEL, 2, 2, torch.device("cpu"), bf16=False, compile=False, cuda_graphs=False)
    with pytest.raises(SystemExit, match=options.split()[0]):
        train.require_effect(parsed(train, monkeypatch, options), workload)
