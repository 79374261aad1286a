"""The residual stream in bfloat16 on a real GPU: through the kernels, compiled, recorded, and close to float64."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models import fused
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.train_step import TrainStep

pytestmark = pytest.mark.gpu
V, T = 1000, 128
AUTOCAST = functools.partial(torch.autocast, "cuda", torch.bfloat16)


def model_of(architecture: str, residual_dtype: str) -> LanguageModel:
    shape: dict[str, Any] = {"layers": 3, "heads": 4, "width": 256, "context": T, "vocabulary_size": V}
    model = build_model(ModelConfig(architecture, residual_dtype=residual_dtype, **shape)).cuda()
    initialise(model, seed=1)
    return model


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, V, (4, T + 1), generator=generator).square().remainder(V).cuda()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: LanguageModel, *, autocast: bool, compiled: bool = False) -> dict[str, Tensor]:
    function = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = function(*batch())
    loss.backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_gradients_are_those_of_float64_up_to_rounding(
    architecture: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = gradients(model_of(architecture, "float32").double(), autocast=False)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        return {name: ((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()}

    ours = errors(gradients(model_of(architecture, "bfloat16"), autocast=True, compiled=compiled))
    with monkeypatch.context() as patch:  # torch's operations instead of the kernels
        patch.setattr(fused, "HAS_TRITON", False)
        plain = errors(gradients(model_of(architecture, "bfloat16"), autocast=True))
    for name, error in ours.items():
        assert error < 0.05, name
        assert error < 1.3 * plain[name] + 1e-3, name


def test_the_kernels_get_and_return_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    from coupled_adam.models import fused_kernels

    dtypes = []
    forward, backward = fused_kernels.add_norm, fused_kernels.add_norm_backward

    def seen_forward(x: Tensor, *arguments: Any) -> None:
        dtypes.append(x.dtype)
        forward(x, *arguments)

    def seen_backward(grad_total: Tensor, *arguments: Any) -> None:
        dtypes.append(grad_total.dtype)
        backward(grad_total, *arguments)

    monkeypatch.setattr(fused_kernels, "add_norm", seen_forward)
    monkeypatch.setattr(fused_kernels, "add_norm_backward", seen_backward)
    gradients(model_of("gpt2", "bfloat16"), autocast=True)
    assert dtypes == 2 * 5 * [torch.bfloat16]  # all sums of three blocks but the first, which has nothing to add


def test_a_recorded_run_learns_as_with_float32() -> None:
    losses = {}
    for dtype in ("float32", "bfloat16"):
        model = model_of("gpt2", dtype)
        model.compile(dynamic=False)
        optimizers = build_optimizers(model, OptimizerSection(lr=1e-3), capturable=True)
        step = TrainStep(model, optimizers, precision=AUTOCAST, cuda_graphs=True)
        losses[dtype] = torch.stack([step([batch(i)], 1e-3 * min(1.0, (i + 1) / 20))[0] for i in range(40)])
        torch.compiler.reset()
    assert losses["bfloat16"][-1] < losses["bfloat16"][0] - 0.5
    assert (losses["bfloat16"] - losses["float32"]).abs().max() < 0.03
