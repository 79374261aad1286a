"""Write a folder atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.training.checkpoint.checkpoint_folder import put_in_place


def require_free(folder: Path, *, overwrite: bool) -> None:
    """Raise ValueError unless `folder` is new, empty, or an existing model to overwrite."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is a {'link' if folder.is_symlink() else 'file'}; pass a new folder")
    if not folder.is_dir():
        return
    if folder.samefile(Path.cwd()):
        raise UserError(f"{folder} is the current folder; pass a new folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{folder} is not empty; pass a new folder, or replace this one with --overwrite")
    # An exported model has only plain files; never delete anything else.
    strange = [path.name for path in folder.iterdir() if path.is_dir()]
    if strange or not (folder / "config.json").is_file():
        why = f"it has the folder {strange[0]}" if strange else "config.json is missing"
        raise UserError(
            f"{folder} is not an exported model ({why}), so --overwrite does not replace it; pass a new folder"
        )


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, which is synced to disk and renamed unless an exception is raised.

    An existing folder is removed only when the new one is complete. Errors name `folder`, not the temporary one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        put_in_place(temporary, folder)
    except UserOSError as error:
        raise UserOSError(str(error).replace(str(temporary), str(folder))) from error
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(str(temporary), str(folder))
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
