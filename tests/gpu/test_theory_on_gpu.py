"""The theory measured on a GPU agrees with the CPU."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "theory"))
from theory_models import V, small_model, windows

from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.theory.checkpoint_measures import measure_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tied", [True, False])
def test_theory_on_the_gpu_agrees_with_the_cpu(tied):
    torch.set_float32_matmul_precision("high")  # as after a training
    model, batches, counts = small_model(tied=tied), [windows(6, seed) for seed in range(3)], np.arange(1, V - 1)
    on_cpu, on_gpu = (
        measure_checkpoint(
            copy.deepcopy(model).to(device), batches, OptimizerSection(lr=1.0), counts, step=6, tokens_seen=432
        )
        for device in ("cpu", "cuda")
    )
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    for name, expected in vars(on_cpu[1]).items():
        np.testing.assert_allclose(getattr(on_gpu[1], name), expected, rtol=1e-3, atol=1e-12)
    for found, expected in zip(on_gpu[0].updates, on_cpu[0].updates, strict=True):
        assert found.total == pytest.approx(expected.total, rel=1e-2, abs=1e-5)
    assert max(on_gpu[0].gradient_sums["output"]) < 1e-5
    assert on_gpu[0].identity_error < 1e-12


def test_bf16_on_the_gpu_is_close():
    model, batches, counts = small_model().cuda(), [windows(6)], np.arange(1, V - 1)
    numbers, _ = measure_checkpoint(
        model, batches, OptimizerSection(lr=1.0), counts, step=6, tokens_seen=432, bf16=True
    )
    assert max(numbers.gradient_sums["output"]) < 0.05
