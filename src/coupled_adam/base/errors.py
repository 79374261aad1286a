"""What a user can mend, and what only we can: a command prints the first in a line, the second with its traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# What the system says of a disk, a path or a permission. Anything else it says has its cause in our code.
OF_THE_MACHINE = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST"),
        *("ENOTEMPTY", "ENAMETOOLONG", "ELOOP", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EBUSY", "ETXTBSY"),
    )
    if hasattr(errno, name)
}
# The disk is full, or the user's part of it, or a file is as large as it may be.
OF_A_FULL_DISK = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


class UserError(ValueError):
    """Something that the user can mend. Its text names the thing, the value and the remedy."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


class UserOSError(UserError, OSError):
    """A disk, a network or a process that did not do its part."""


class UserConnectionError(UserError, ConnectionError):
    """Something could not be downloaded."""


def is_full_disk(error: BaseException) -> bool:
    """Whether something could not be written for lack of room."""
    return isinstance(error, OSError) and error.errno in OF_A_FULL_DISK


@contextmanager
def blaming_user() -> Iterator[None]:
    """Around a call whose ValueErrors are about what the user gave: they become UserErrors."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def as_user_error(error: BaseException) -> UserError | None:
    """The error as one that the user can mend; None for everything else.

    Example:
        >>> as_user_error(FileNotFoundError(2, "No such file or directory", "model.npy"))
        UserError('model.npy: No such file or directory')
        >>> as_user_error(KeyError("a bug")) is None
        True
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        reason = error.strerror or str(error)
        return UserError(f"{error.filename}: {reason}" if error.filename else reason)
    return None
