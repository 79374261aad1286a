"""Special files in place of a regular one, for tests of code that reads users' files."""

import os
import stat
from pathlib import Path


def make_special_file(path: Path, kind: str) -> None:
    """Create a special file on which a careless reader would block or never finish.

    Args:
        path: its path, which must not exist.
        kind: "fifo", "device" (endless), "socket" or "folder".
    """
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        {"fifo": os.mkfifo, "folder": Path.mkdir, "socket": _make_socket}[kind](path)


def _make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)
