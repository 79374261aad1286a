"""A folder that is either there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.training.checkpoint.checkpoint_folder import put_in_place


def require_free(folder: Path, *, overwrite: bool) -> None:
    """A ValueError unless a model can be put at `folder`: it is new, empty, or an older model to be replaced."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is a {'link' if folder.is_symlink() else 'file'}; give the name of a new folder")
    if not folder.is_dir():
        return
    if folder.samefile(Path.cwd()):
        raise UserError(f"{folder} is the folder you are in; give the name of a new folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{folder} is not empty; give the name of a new folder, or replace this one with --overwrite")
    # An exported model is a handful of plain files; anything else in there would be lost with it.
    strange = [path.name for path in folder.iterdir() if path.is_dir()]
    if strange or not (folder / "config.json").is_file():
        why = f"has the folder {strange[0]}" if strange else "has no config.json"
        raise UserError(
            f"{folder} is not an exported model, it {why}: --overwrite leaves it alone; give the name of a new folder"
        )


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` to write to; brought to the disk and renamed if nothing was raised.

    What was there before goes only when the new folder is whole. Errors name `folder`, which the user knows.
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
