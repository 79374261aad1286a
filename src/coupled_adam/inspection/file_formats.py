"""File formats by suffix, and their readers."""

from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import install_command
from coupled_adam.base.files import require_regular_file
from coupled_adam.inspection.numpy_files import open_npy, open_npz
from coupled_adam.inspection.safetensors_files import open_safetensors
from coupled_adam.inspection.stored import Stored
from coupled_adam.inspection.torch_files import open_torch


def open_file(path: Path) -> Stored:
    """Open one file of tensors."""
    open_format = SUFFIXES.get(path.suffix.lower())
    if open_format is None:
        raise UserError(f"{path}: unknown file format; expected a name that ends in {', '.join(SUFFIXES)}")
    require_regular_file(path)
    return open_format(path)


def _open_gguf(path: Path) -> Stored:
    try:
        from coupled_adam.inspection.gguf_files import open_gguf
    except ModuleNotFoundError:
        raise UserError(f"{path}: GGUF files require another package: {install_command('gguf')}") from None
    return open_gguf(path)


SUFFIXES = {
    ".safetensors": open_safetensors,
    ".npy": open_npy,
    ".npz": open_npz,
    ".gguf": _open_gguf,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), open_torch),
}
