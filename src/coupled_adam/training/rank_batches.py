"""Micro-batches of this rank on the device; the next step is read while the device works on the current one.

Letters: B samples, T context.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from coupled_adam.data.batches import Batches
from coupled_adam.training.parallel import Ranks

MicroBatch = tuple[Tensor, Tensor]  # tokens (B, T), targets (B, T), both int64


class RankBatches:
    """Split global batches into this rank's micro-batches."""

    def __init__(self, batches: Batches, ranks: Ranks, micro_batch_size: int) -> None:
        self.share = batches.batch_size // ranks.size
        assert self.share * ranks.size == batches.batch_size, "the config has checked this"
        assert self.share % micro_batch_size == 0, "the config has checked this"
        self.micro_batch_size = micro_batch_size
        self.batches = batches
        self.first_sample = ranks.rank * self.share
        self.device = ranks.device
        self._reader = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[int, Future[list[Tensor]]] | None = None

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, a pure function of the step; start reading the next step."""
        ahead, self._ahead = self._ahead, None
        windows = ahead[1].result() if ahead and ahead[0] == step else self._read(step)
        if self.device.type == "cpu":  # a read takes microseconds, and a thread would only compete for cores
            return [(window[:, :-1], window[:, 1:]) for window in windows]
        self._ahead = step + 1, self._reader.submit(self._read, step + 1)
        on_device = [window.to(self.device, non_blocking=True) for window in windows]
        return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in on_device]

    def _read(self, step: int) -> list[Tensor]:
        """Read windows (micro batch size, T + 1) to the host, pinned if the device is a GPU."""
        window = self.batches.samples(step, self.first_sample, self.first_sample + self.share)
        parts = window.split(self.micro_batch_size)
        return [part.pin_memory() if self.device.type == "cuda" else part for part in parts]
