"""The files of a model folder that are copied as they are: everything but weights, and nothing from outside.

A folder from a stranger can hold a link to any file of this machine. Copying it would put that file into a folder which
is perhaps published, so links must stay inside the folder, or lead to the files of the Hugging Face cache it lies in.
"""

import re
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import kind_of_file

# Weights in other formats, and of other programs. They would still be those of the model before.
OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|onnx|onnx_data|h5|msgpack|ot|mlmodel)|pytorch_model.*\.bin|consolidated\..*"
    r"|.*\.(safetensors|bin|h5|msgpack)\.index\.json"
)
# Of version control and downloads.
LEFT_OUT = (".git", ".cache")


def files_to_copy(folder: Path, weights: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The files that are copied, and the weights that are left out, relative to the folder.

    Args:
        folder: the model.
        weights: the files of the weights themselves, which are neither.
    """
    copied: list[Path] = []
    left_out: list[Path] = []
    for path in _files_in(folder, folder):
        relative = path.relative_to(folder)
        if str(relative) in weights:
            continue
        (left_out if OTHER_WEIGHTS.fullmatch(path.name) else copied).append(relative)
    return copied, left_out


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of the model's folder, and what is no file."""
    target = path.resolve()
    root = folder.resolve()
    # A model in the cache: models--org--name/snapshots/<commit>/config.json -> ../../blobs/<hash>
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise UserError(
            f"{path}: is a link to {target}, outside the folder of the model; put a copy of that file in its place"
        )
    mode = target.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: this is {kind_of_file(mode)}, expected a file; remove it from the folder")


def copy_files(folder: Path, target: Path, files: Collection[Path]) -> None:
    """Copy files with their content, times and permissions."""
    for relative in files:
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / relative, target / relative)


def _files_in(place: Path, folder: Path) -> Iterator[Path]:
    for path in sorted(place.iterdir()):
        if path.name in LEFT_OUT:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files_in(path, folder)
        else:
            require_inside(path, folder)
            yield path
