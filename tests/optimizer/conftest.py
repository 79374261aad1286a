"""Run the tests with every implementation of the coupled update."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from coupled_adam.optimizer import blockwise, family_blockwise, table_step

on_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, see tests/gpu")


@pytest.fixture(params=["blockwise", "numba", pytest.param("triton_kernels", marks=on_gpu)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Use one implementation for all tensors; without a GPU, Triton kernels run in Triton's interpreter."""
    kernels: ModuleType = blockwise
    family_kernels: ModuleType = family_blockwise
    if request.param == "triton_kernels":
        pytest.importorskip("triton")
        kernels = importlib.import_module("coupled_adam.optimizer.triton_kernels")
        family_kernels = importlib.import_module("coupled_adam.optimizer.family_triton")
        # The interpreter takes a millisecond per program; test_family_triton covers the tiles of a GPU.
        monkeypatch.setattr(family_kernels, "UPDATE_BLOCK_V", 16)
        monkeypatch.setattr(family_kernels, "REDUCE_PROGRAMS", 8)
    if request.param == "numba":
        request.getfixturevalue("numba_loops")
    monkeypatch.setattr(table_step, "kernels_for", lambda tensor: kernels)
    monkeypatch.setattr(table_step, "family_kernels_for", lambda tensor: family_kernels)
    # Small blocks, so that a small table has many of them and the last one is not full.
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 400)
    return kernels


@pytest.fixture
def numba_loops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Use the compiled loops for tables of any size, in several pieces, the last one not full."""
    pytest.importorskip("numba")
    numba_kernels = importlib.import_module("coupled_adam.optimizer.numba_kernels")
    family_numba = importlib.import_module("coupled_adam.optimizer.family_numba")
    monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", 1)
    monkeypatch.setattr(numba_kernels, "PIECE_ELEMENTS", 64)
    monkeypatch.setattr(numba_kernels, "SUM_PIECE_ROWS", 7)
    monkeypatch.setattr(family_numba, "FLOAT32_ROWS", 3)
    return numba_kernels


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
