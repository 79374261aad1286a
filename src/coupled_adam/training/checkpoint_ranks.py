"""Ranks that save and load together, and agree on what they saw. Without a process group, the one process is all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# The fastest rank waits for the slowest to write its files.
TIMEOUT = timedelta(hours=1)


def background_group(process_group: Any) -> Any:
    """A gloo group of its own, so that messages of a thread never mix with those of the training; None without ranks.

    All ranks of the run must call it together.
    """
    if not _has_ranks():
        return None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    return dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)


class Agreement:
    """The ranks of a process group (default: all), each of which calls the same methods in the same order."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self._alone = not _has_ranks()
        self.rank = 0 if self._alone else dist.get_rank(process_group)
        self.size = 1 if self._alone else dist.get_world_size(process_group)

    def from_first(self, value: T) -> T:
        """The value of the first rank."""
        return self._gather(value)[0]

    def first_not_none(self, value: T | None) -> T | None:
        """The value of the lowest rank that has one."""
        return next((found for found in self._gather(value) if found is not None), None)

    def first_does(self, action: Callable[[], None]) -> None:
        """Let the first rank do something while the others wait; what it raises is raised on all."""
        failure: Exception | None = None
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = error
        failure = self.first_not_none(failure)
        if failure is not None:
            raise failure

    def _gather(self, value: T) -> list[T]:
        if self._alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()
