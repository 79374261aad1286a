"""A disk that is full for some files: fsync fails."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[Path], bool]) -> None:
    """Let fsync fail as on a full disk.

    Args:
        monkeypatch: restores fsync.
        is_full: called with the path of every file that is synced.
    """
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to know which file a descriptor is")
    fsync = os.fsync

    def fail_when_full(descriptor: int) -> None:
        if is_full(Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_when_full)
