"""Fixtures for tests on a GPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Float32 products without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
