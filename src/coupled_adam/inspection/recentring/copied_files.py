"""Files of a model folder to copy unchanged: everything except weights, and nothing from outside the folder.

An untrusted folder can contain a link to any file on this machine. Copying it would put that file into a folder that
may be published, so links must stay inside the folder or in the Hugging Face cache that contains it.
"""

import re
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import kind_of_file

# Weights in other formats, which would still be those of the original model.
OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|onnx|onnx_data|h5|msgpack|ot|mlmodel)|pytorch_model.*\.bin|consolidated\..*"
    r"|.*\.(safetensors|bin|h5|msgpack)\.index\.json"
)
# Version control and downloads.
LEFT_OUT = (".git", ".cache")


def files_to_copy(folder: Path, weights: Collection[str]) -> tuple[list[Path], list[Path]]:
    """List the files to copy, and the weights in other formats to skip, relative to the folder.

    Args:
        folder: the model.
        weights: the weight files to rewrite, which are in neither list.
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
    """Raise for a link out of the model folder, and for anything that is not a regular file."""
    target = path.resolve()
    root = folder.resolve()
    # A model in the cache: models--org--name/snapshots/<commit>/config.json -> ../../blobs/<hash>
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise UserError(f"{path}: is a link to {target}, outside the model folder; replace it with a copy of that file")
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
