"""Fixtures for the tests of the chunked loss."""

import pytest

from coupled_adam.models import loss as loss_module


@pytest.fixture(params=["one chunk", "chunks of 8 rows"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the logits at once, or in several chunks, the last one not full."""
    if request.param != "one chunk":
        monkeypatch.setattr(loss_module, "chunk_rows", lambda N, row_bytes, budget: 8)
