"""Parameter counts of the paper's models, costs computed by hand, and invalid configs."""

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
def test_the_papers_models_have_the_nominal_sizes(
    architecture: str, layers: int, heads: int, width: int, context: int, nominal: float
) -> None:
    config = ModelConfig(architecture, layers, heads, width, context)
    assert parameter_count(config) == pytest.approx(nominal, rel=0.03)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "layers", "heads", "width", "context", "bias"),
    [(*paper[:5], False) for paper in PAPER] + [("gpt2", 3, 2, 20, 7, True), ("llama", 1, 3, 12, 9, False)],
)
def test_the_parameter_count_equals_that_of_the_module(
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


def test_flops_follow_palms_formula() -> None:
    config = ModelConfig("gpt2", layers=12, heads=12, width=768)
    matmul_parameters = 12 * 12 * 768**2 + 25 * 768 + 50304 * 768  # blocks, norms, and the table as head
    assert flops_per_token(config) == 6 * matmul_parameters + 12 * 12 * 768 * 1024
    # A second table that is only used for lookups costs nothing.
    assert flops_per_token(ModelConfig("gpt2", 12, 12, 768, tied=False)) == flops_per_token(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gpt3"}, "architecture.*'gpt3'.*'gpt2'.*'llama'"),
        ({"layers": 0}, r"layers\b.* 0\b.* 1\b"),
        ({"vocabulary_size": -1}, r"vocabulary_size\b.* -1\b"),
        ({"context": 1.5}, r"context\b.* 1\.5\b"),
        ({"heads": 5}, r"heads\b.* 5\b.*width 64\b"),
        ({"architecture": "llama", "heads": 64}, r"heads\b.* 64\b.*width 1\b.*RoPE\b.*width / heads\b"),
        ({"architecture": "llama", "bias": True}, r"bias\b.* True\b.*bias = false"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    values = {"architecture": "gpt2", "layers": 2, "heads": 4, "width": 64} | changes
    with pytest.raises(ValueError, match=named):
        ModelConfig(**values)  # type: ignore[arg-type]
