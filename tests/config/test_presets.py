"""The presets, compared with the paper's two tables of hyperparameters."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.config.builtin_files import PRESETS, preset_text
from coupled_adam.config.run_config import load_config
from coupled_adam.models.model_config import parameter_count

# Tab. model_sizes: preset -> N, lr, heads, layers, embedding dimension.
SIZES = {
    "gpt2-125m": ("125M", 6.0e-4, 12, 12, 768),
    "gpt2-355m": ("355M", 3.0e-4, 16, 24, 1024),
    "gpt2-760m": ("760M", 2.5e-4, 16, 24, 1536),
    "llama-1.3b": ("1.3B", 2.0e-4, 32, 24, 2048),
    "llama-2.6b": ("2.6B", 1.6e-4, 32, 32, 2560),
}
# Tab. model_architecture as values of our keys: both columns, then small-scale, then large-scale.
COMMON = {
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_grad_norm": 1.0,
    "model.tied": True,
    "rows": 50304,
    "schedule.kind": "cosine",
    "schedule.final_fraction": 0.1,  # the text below the table
    "training.precision": "bf16",
    "data.tokenizer": "gpt2",
}
SMALL = {
    "model.architecture": "gpt2",
    "model.context": 1024,
    "training.batch_size": 96,
    "schedule.warmup": 100,
    "training.parallel": "ddp",
    "data.source": "openwebtext",
}
LARGE = {
    "model.architecture": "llama",
    "model.context": 2048,
    "training.batch_size": 256,
    "schedule.warmup": "1%",
    "training.parallel": "fsdp2",
    "data.source": "slimpajama",
}
TOKENS = {"gpt2-125m": 5, "gpt2-355m": 5, "gpt2-760m": 5, "llama-1.3b": 26, "llama-2.6b": 52}  # billions


def value(name: str, key: str) -> Any:
    result: Any = load_config(name)
    for part in key.split("."):
        result = getattr(result, part)
    return result


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_sizes_of_the_table(name: str) -> None:
    keys = ("optimizer.lr", "model.heads", "model.layers", "model.width")
    assert tuple(value(name, key) for key in keys) == SIZES[name][1:]


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_general_settings_of_the_table(name: str) -> None:
    expected = COMMON | (SMALL if name.startswith("gpt2") else LARGE)
    assert {key: value(name, key) for key in expected} == expected


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_has_the_number_of_parameters_in_its_name(name: str) -> None:
    label = SIZES[name][0]
    named = float(label[:-1]) * {"M": 1e6, "B": 1e9}[label[-1]]
    assert parameter_count(load_config(name).to_model_config()) == pytest.approx(named, rel=0.035)


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_trains_on_the_papers_tokens(name: str) -> None:
    config = load_config(name)
    assert config.training.tokens == TOKENS[name] * 10**9
    assert config.tokens_per_step == (98_304 if name.startswith("gpt2") else 524_288)  # "~100k", "~500k"
    assert config.total_steps == TOKENS[name] * 10**9 // config.tokens_per_step
    assert config.warmup_steps == {"gpt2": 100, "llama-1.3b": 496, "llama-2.6b": 992}.get(name, 100)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_on_one_and_on_several_ranks(name: str) -> None:
    config = load_config(name)
    for ranks in (1, 2, 4, 8):
        assert config.training.batch_size % (ranks * config.micro_batch_size(ranks)) == 0


def test_tiny_is_300_steps_of_1024_tokens() -> None:
    config = load_config("tiny")
    assert (config.total_steps, config.tokens_per_step) == (300, 1024)
    assert (config.model.layers, config.model.width, config.rows) == (2, 64, 4096)


def test_every_file_is_listed_and_named_after_its_preset() -> None:
    folder = Path(__file__).parents[2] / "src" / "coupled_adam" / "config" / "presets"
    assert {path.stem for path in folder.iterdir()} == set(PRESETS)
    assert all(tomllib.loads(preset_text(name))["name"] == name for name in PRESETS)


def test_the_tables_here_match_the_paper() -> None:
    data = os.environ.get("COUPLED_ADAM_TEST_DATA")
    if data is None:
        pytest.skip("COUPLED_ADAM_TEST_DATA is not set")
    paper = (Path(data) / "paper" / "paper.tex").read_text(encoding="utf-8")
    lines = [line for line in paper.replace("\\\\", "").splitlines() if "&" in line]
    rows = [tuple(cell.strip() for cell in line.split("&")) for line in lines]
    for label, lr, heads, layers, width in SIZES.values():
        assert (label, f"{lr * 1e4:.1f}e-4", str(heads), str(layers), str(width)) in rows
    both = {row[0]: re.sub(r"\\multicolumn\{2\}\{c\}\{(.*)\}", r"\1", row[1]) for row in rows if len(row) == 2}
    assert [both[key] for key in ("$\\beta_1$", "$\\beta_2$", "$\\epsilon$", "weight decay", "gradient clipping")] == [
        "0.9",
        "0.95",
        "1e-8",
        "0.1",
        "1.0",
    ]
    assert [both[key] for key in ("weight tying", "vocab size", "precision")] == ["true", "50304", "BF16"]
    assert both["learning rate schedule"] == "cosine decay"
    for row in (
        ("hidden activation", "GeLU", "SwiGLU"),
        ("positional embedding", "absolute (learned)", "RoPE"),
        ("sequence length", "1024", "2048"),
        ("batch size (samples)", "96", "256"),
        ("warmup", "100 steps", "$1\\%$ of steps"),
        ("training parallelism", "DDP", "FSDP"),
    ):
        assert row in rows
    assert "$10\\%$ of the maximum" in paper
