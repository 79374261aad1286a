"""What can lie where a regular file is expected: for tests of everything that reads files of a user."""

import os
import stat
from pathlib import Path


def make_special_file(path: Path, kind: str) -> None:
    """Make something that is no regular file, and that a careless reader would wait for or never come to an end of.

    Args:
        path: its name; nothing is there yet.
        kind: "fifo", "device" (endless), "socket" or "folder".
    """
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        {"fifo": os.mkfifo, "folder": Path.mkdir, "socket": _make_socket}[kind](path)


def _make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)
