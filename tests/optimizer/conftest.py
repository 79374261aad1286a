"""Send the tests through every implementation of the coupled update."""

import importlib
from types import ModuleType

import pytest
import torch

from coupled_adam.optimizer import blockwise, step

on_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")


@pytest.fixture(params=["blockwise", pytest.param("triton_kernels", marks=on_gpu)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One implementation for all tensors; without a GPU the Triton kernels run in Triton's interpreter."""
    if request.param == "triton_kernels":
        pytest.importorskip("triton")
    kernels = importlib.import_module(f"coupled_adam.optimizer.{request.param}")
    monkeypatch.setattr(step, "kernels_for", lambda tensor: kernels)
    # Small blocks, so that a small table has many of them and a last one that is not full.
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 400)
    return kernels
