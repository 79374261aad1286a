"""User errors and internal errors: a command prints a user error in one line, an internal error with its traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# System errors about a disk, a path or a permission. Any other system error is an internal error.
OF_THE_MACHINE = {
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST"),
        *("ENOTEMPTY", "ENAMETOOLONG", "ELOOP", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EBUSY", "ETXTBSY"),
    )
    if hasattr(errno, name)
}
# The disk is full, the user's quota is exceeded, or a file has reached its maximum size.
OF_A_FULL_DISK = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


class UserError(ValueError):
    """An error that the user can fix. The message names the thing, the value and the remedy."""


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


class UserOSError(UserError, OSError):
    """A disk, a network or a process failed."""


class UserConnectionError(UserError, ConnectionError):
    """A download failed."""


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for lack of disk space."""
    return isinstance(error, OSError) and error.errno in OF_A_FULL_DISK


@contextmanager
def blaming_user() -> Iterator[None]:
    """Turn ValueErrors into UserErrors, around a call that raises them for invalid user input."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def as_user_error(error: BaseException) -> UserError | None:
    """Convert an error to a UserError if the user can fix it; None for an internal error.

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
