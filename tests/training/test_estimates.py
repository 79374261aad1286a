"""The estimates, compared with the bytes of small models and with measurements."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from coupled_adam.config.builtin_files import PRESETS, preset_text
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.models import loss
from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import build_model, parameter_count
from coupled_adam.training import estimates
from coupled_adam.training.optimizers import build_optimizers

SMALL = ["model.width=96", "model.heads=3", "model.layers=3", "training.batch_size=8", "training.tokens=1M"]
LLAMA = [*SMALL, "model.architecture=llama"]


def trained(config: Config) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model and its optimizers after one step."""
    model = build_model(config.to_model_config())
    initialise(model, seed=1)
    optimizers = build_optimizers(model, config.optimizer)
    tokens = torch.randint(config.rows, (2, config.model.context))
    model(tokens, tokens).backward()
    optimizers.step()
    return model, optimizers.optimizers


def bytes_of_state(optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of all moments, without the scalar step counts."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [moment for state in states for moment in state.values() if moment is not None and moment.ndim > 0]
    return sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize(
    "optimizer",
    [
        ["optimizer.embeddings=adamw"],
        ["optimizer.embeddings=coupled"],
        ["optimizer.embeddings=coupled", "model.tied=false"],
        ["optimizer.embeddings=coupled", "model.tied=false", "optimizer.couple=all"],
        ["optimizer.embeddings=coupled", "optimizer.row_exponent=1.0"],
        ["optimizer.embeddings=coupled", "optimizer.tables.beta1=0.0"],
        ["optimizer.embeddings=coupled", "optimizer.beta1=0.0", "optimizer.state_dtype=bfloat16"],
        [
            *("optimizer.embeddings=coupled", "model.tied=false", "optimizer.couple=all"),
            *("optimizer.row_exponent=1.0", "optimizer.input_table.beta1=0.0"),
        ],
        ["optimizer.embeddings=sgd", "optimizer.sgd_factor=300"],
        ["optimizer.embeddings=sgd", "optimizer.sgd_factor=300", "optimizer.sgd_momentum=0.0"],
    ],
)
def test_weights_and_optimizer_state_are_counted_to_the_byte(optimizer: list[str]) -> None:
    config = load_config("tiny", [*SMALL, *optimizer, "training.precision=float32"])
    model, optimizers = trained(config)
    memory = estimates.memory(config)
    assert memory.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert memory.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert memory.optimizer == bytes_of_state(optimizers)


@contextmanager
def saved_storages(model: nn.Module) -> Iterator[dict[tuple[int, int], int]]:
    """Bytes of all tensors that autograd saves for the backward pass, without parameters.

    Tensors with equal contents count once: eager autocast saves a copy of a norm's result for each matrix, and
    attention's result in two layouts; compiled code saves one of each.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[tuple[int, int], int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            kept[storage.nbytes(), int(content.sum())] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("shape", [SMALL, LLAMA])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_activations_match_the_tensors_saved_by_autograd(shape: list[str], precision: str) -> None:
    """Up to 5%: tokens, the norms' means and deviations, and attention's sums are not counted."""
    config = load_config("tiny", [*shape, f"training.precision={precision}", "model.layers=6", "model.context=256"])
    model = build_model(config.to_model_config())
    initialise(model, seed=1)
    tokens = torch.randint(config.rows, (8, 256))
    with saved_storages(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        hidden = model.hidden_states(tokens)
    copies = 2 * sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2) if precision == "bf16" else 0
    measured = sum(kept.values()) - copies
    assert hidden.shape == (8, 256, 96)
    assert estimates.memory(config).activations == pytest.approx(measured, rel=0.05)


def test_the_head_uses_chunks_of_the_estimated_size() -> None:
    assert loss.CHUNK_BYTES["cuda"] == estimates.LOGITS_BYTES


def test_the_estimate_for_gpt2_125m_matches_the_measurement() -> None:
    """H200, batch 96 x 1024, chunked loss: 37 GB and 541,000 tokens per second."""
    config = load_config("gpt2-125m")
    assert estimates.memory(config).total == pytest.approx(37e9, rel=0.1)
    assert config.training.tokens / estimates.seconds(config, estimates.H200) == pytest.approx(541_000, rel=0.1)


def test_the_estimate_for_tiny_matches_the_measurement_on_two_cores() -> None:
    assert estimates.seconds(load_config("tiny"), estimates.cpu(2)) == pytest.approx(11, rel=0.25)


def test_this_machine_is_its_gpu_if_the_peak_is_known_and_otherwise_its_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert estimates.this_machine() == estimates.cpu(torch.get_num_threads())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    assert estimates.this_machine() == estimates.gpu("NVIDIA A100-SXM4-80GB", 312e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus 3000")
    assert estimates.this_machine() is None


def test_small_steps_are_limited_by_launch_overhead() -> None:
    config = load_config("tiny")
    assert estimates.seconds(config, estimates.gpu("H200", 989e12)) == config.total_steps * 2e-3


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_into_80_gb_as_its_comment_says(name: str) -> None:
    gigabytes = estimates.memory(load_config(name)).total / 1e9
    assert gigabytes < 70
    for stated in re.findall(r"about (\d+) GB", preset_text(name)):
        assert round(gigabytes) == int(stated)


def test_the_table_lists_every_preset_with_its_size() -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(estimates.preset_table(estimates.cpu(4)))
    text = capture.get()
    for name in PRESETS:
        [row] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert f"{load_config(name).total_steps:,}" in row
    [row] = [line for line in text.splitlines() if "gpt2-125m" in line]
    assert re.split(r"\s{2,}", row.strip())[:6] == [
        "gpt2-125m",
        "openwebtext",
        "124M",
        "5B",
        "50,862",
        "36.5 GB",
    ]
    assert "Estimates" in text
    assert re.search(r" 4 CPU\n.* cores\n", text), text


def test_without_a_known_device_there_is_no_column_for_it() -> None:
    with_device, without = estimates.preset_table(estimates.cpu(1)), estimates.preset_table()
    assert len(with_device.columns) == len(without.columns) + 1


def test_the_estimate_uses_the_parameters_of_the_model() -> None:
    config = load_config("tiny", LLAMA)
    model = build_model(config.to_model_config())
    assert parameter_count(config.to_model_config()) == sum(p.numel() for p in model.parameters())
