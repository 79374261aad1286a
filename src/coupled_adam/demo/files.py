"""Writing a file that is either there as a whole or not at all."""

import errno
import os
import tempfile
from pathlib import Path


def require_writable(path: Path) -> None:
    """Make the folder of `path`; an OSError says now, and not after the work, that `path` cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_whole(path: Path, text: str) -> None:
    """Write `text` under a temporary name beside `path`, bring it to the disk, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
