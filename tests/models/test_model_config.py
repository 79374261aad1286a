"""Sizes against the names of the paper's models, costs by hand, and what a config refuses."""

import pytest
import torch

from coupled_adam.models.model_config import ModelConfig, build_model, flops_per_token, parameter_count

# Tabs. model_architecture and model_sizes: name, architecture, layers, heads, width, context, nominal size.
PAPER = [
    ("gpt2", 12, 12, 768, 1024, 125e6),
    ("gpt2", 24, 16, 1024, 1024, 355e6),
    ("gpt2", 24, 16, 1536, 1024, 760e6),
    ("llama", 24, 32, 2048, 2048, 1.3e9),
    ("llama", 32, 32, 2560, 2048, 2.6e9),
]


@pytest.mark.parametrize(("architecture", "layers", "heads", "width", "context", "nominal"), PAPER)
def test_the_papers_models_have_the_sizes_in_their_names(
    architecture: str, layers: int, heads: int, width: int, context: int, nominal: float
) -> None:
    config = ModelConfig(architecture, layers, heads, width, context)
    assert parameter_count(config) == pytest.approx(nominal, rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "layers", "heads", "width", "context", "bias"),
    [(*paper[:5], False) for paper in PAPER] + [("gpt2", 3, 2, 20, 7, True), ("llama", 1, 3, 12, 9, False)],
)
def test_the_count_is_that_of_the_module(
    architecture: str, layers: int, heads: int, width: int, context: int, bias: bool, tied: bool
) -> None:
    config = ModelConfig(architecture, layers, heads, width, context, tied=tied, bias=bias)
    with torch.device("meta"):
        model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert not list(model.buffers())
    names = dict(model.named_parameters())
    assert names[model.input_table_name].shape == names[model.output_table_name].shape == (50304, width)
    assert (model.input_table_name == model.output_table_name) == tied


@pytest.mark.parametrize(("width", "expected"), [(2048, 5632), (2560, 6912), (384, 1024), (768, 2048), (770, 2304)])
def test_the_swiglu_width_is_eight_thirds_rounded_up_to_256(width: int, expected: int) -> None:
    assert ModelConfig("llama", 1, 1, width).mlp_width == expected


def test_flops_are_palms_count() -> None:
    config = ModelConfig("gpt2", layers=12, heads=12, width=768)
    matmul_parameters = 12 * 12 * 768**2 + 25 * 768 + 50304 * 768  # blocks, norms, the table as a head
    assert flops_per_token(config) == 6 * matmul_parameters + 12 * 12 * 768 * 1024
    # A second table that is only looked up in costs nothing.
    assert flops_per_token(ModelConfig("gpt2", 12, 12, 768, tied=False)) == flops_per_token(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt3"}, "Invalid architecture: 'gpt3'; expected 'gpt2' or 'llama'"),
        ({"layers": 0}, "Invalid layers: 0; expected a whole number of at least 1"),
        ({"vocabulary_size": -1}, "Invalid vocabulary_size: -1"),
        ({"context": 1.5}, "Invalid context: 1.5"),
        ({"heads": 5}, "Invalid heads: 5 do not divide the width 64; choose a divisor"),
        ({"architecture": "llama", "heads": 64}, "RoPE turns pairs of numbers; choose heads so that width / heads"),
        ({"architecture": "llama", "bias": True}, "Invalid bias: True; the Llama-style model has none"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    values = {"architecture": "gpt2", "layers": 2, "heads": 4, "width": 64} | changes
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)  # type: ignore[arg-type]
