"""Initial weights: GPT-2's distribution, determined by seed and name, and the same when sharded."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model


def built(architecture: str, layers: int = 2, seed: int = 1, tied: bool = True, bias: bool = False) -> LanguageModel:
    model = build_model(ModelConfig(architecture, layers, 4, 64, context=32, vocabulary_size=500, tied=tied, bias=bias))
    initialise(model, seed)
    return model


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("layers", [2, 8])
def test_weights_are_drawn_as_in_gpt2(architecture: str, layers: int) -> None:
    model = built(architecture, layers, tied=False, bias=architecture == "gpt2")
    on_residual = ("attn.c_proj.weight", "mlp.c_proj.weight", "o_proj.weight", "down_proj.weight")
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
            continue
        scaled = name.endswith(on_residual)
        count += scaled
        expected = 0.02 / (2 * layers) ** 0.5 if scaled else 0.02
        error = 4 * expected / (2 * parameter.numel()) ** 0.5
        assert parameter.std().item() == pytest.approx(expected, abs=error), name
        assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name
    assert count == 2 * layers


def test_a_parameter_depends_only_on_seed_and_name() -> None:
    model, deeper, tied = built("gpt2"), built("gpt2", layers=3), built("gpt2", tied=False)
    torch.manual_seed(123)  # torch's global generator has no effect
    again = built("gpt2")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
    assert torch.equal(model.get_parameter("wte.weight"), deeper.get_parameter("wte.weight"))
    assert torch.equal(model.get_parameter("wte.weight"), tied.get_parameter("wte.weight"))
    assert not torch.equal(tied.get_parameter("wte.weight"), tied.get_parameter("lm_head.weight"))
    other = built("gpt2", seed=2)
    assert not torch.equal(model.get_parameter("wte.weight"), other.get_parameter("wte.weight"))


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig("gpt2", 1, 1, 8))
    with pytest.raises(ValueError, match=r"'wte\.weight'.*\bmeta device\b.*model\.to_empty\("):
        initialise(model, seed=1)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_starts_as_a_plain_one(one_rank: None) -> None:
    plain = built("llama")
    with torch.device("meta"):
        model = build_model(plain.config)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.to_empty(device="cpu")
    initialise(model, seed=1)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name
    assert os.environ.get("WORLD_SIZE") is None
