"""`.metadata`, in which torch.distributed.checkpoint says which tensor lies where: a pickle, read without trust.

A pickle can name any function of any module and have it called. Ours holds a few of DCP's own classes and nothing else,
so the unpickler here looks up those and refuses the rest before anything runs. Objects that are not tensors are
refused too, because DCP would unpickle them with everything allowed.
"""

import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import require_regular_file
from coupled_adam.training.checkpoint_record import StoredFile

METADATA_FILE = ".metadata"
ADMITTED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint of ours needs; do not trust it")


def read_metadata(folder: Path, files: dict[str, StoredFile]) -> Metadata:
    """Read and check the metadata of a checkpoint.

    Args:
        folder: the checkpoint.
        files: the files it consists of.

    Returns:
        Metadata of tensors only, each of which lies completely inside these files.
    """
    try:
        require_regular_file(folder / METADATA_FILE)
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        problem = _problem(metadata, files)
    except Exception as error:  # a damaged pickle can raise anything
        problem = str(error) or type(error).__name__
    if problem is not None:
        raise UserError(f"{METADATA_FILE} is not the metadata of a checkpoint of ours: {problem}")
    assert isinstance(metadata, Metadata)
    return metadata


def _problem(metadata: object, files: dict[str, StoredFile]) -> str | None:
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            return f"{name!r} is not a tensor"
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            file = files.get(place.relative_path)
            if file is None:
                return f"{name!r} lies in {place.relative_path!r}, which is not a file of this checkpoint"
            if place.offset < 0 or place.length < 0 or place.offset + place.length > file.bytes:
                return f"{name!r} lies beyond the end of {place.relative_path}"
            if getattr(place, "transform_descriptors", None):
                return f"{name!r} is stored in a form we do not write"
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            return f"{name!r} is not complete"
    return None
