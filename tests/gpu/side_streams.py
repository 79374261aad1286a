"""Warming up before a CUDA graph is captured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the body on a stream of its own, after all earlier work and before all later work of the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
