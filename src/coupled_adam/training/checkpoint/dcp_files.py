"""Write and read a checkpoint's tensors and `.metadata` with torch.distributed.checkpoint (DCP).

DCP plans which rank writes what, and tells every rank if one fails. In addition, this module hashes every file while it
is written, flushes it to disk, and renames the folder once it is complete.

`.metadata` records the position of every tensor. It is a pickle file, and a pickle can call any function of any module.
Valid metadata contains only a few DCP classes, so the unpickler here admits those and rejects everything else before
any code runs. It also rejects objects that are not tensors, because DCP would unpickle them without restrictions.
"""

import contextlib
import hashlib
import io
import math
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import require_regular_file
from coupled_adam.tables_file import TABLES_FILE, write_tables
from coupled_adam.training.checkpoint.checkpoint_folder import StoredFile, stored_file

BUFFER_BYTES = 2**20
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


def save_folder(
    temporary: Path, planner: SavePlanner, group: Any, complete: Callable[[dict[str, StoredFile]], None]
) -> None:
    """Write the tensors of all ranks to a new folder.

    Args:
        temporary: the folder; existing content is deleted.
        planner: plans what this rank writes.
        group: the ranks that write together; None for a single process.
        complete: called on the first rank with all files once they are on disk.

    Raises:
        CheckpointException: on every rank, if any rank failed.
    """
    _quiet_about_one_process()
    writer = _FolderWriter(temporary, complete)
    dcp_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read_tensors(
    folder: Path, metadata: Metadata, tensors: Mapping[str, Tensor], group: Any, *, alone: bool = False
) -> None:
    """Fill tensors in place, each rank its own parts, regardless of how they were sharded when saved.

    Args:
        folder: the checkpoint.
        metadata: from `read_metadata`.
        tensors: tensors with the stored names, shapes and dtypes.
        group: the ranks that read together; None for the default group, if any.
        alone: read on this rank only, without the other ranks.
    """
    _quiet_about_one_process()
    dcp_load(
        dict(tensors),
        storage_reader=_FolderReader(folder, metadata),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        no_dist=alone,
    )


def write_tables_of(
    folder: Path, files: Mapping[str, StoredFile], *, input: str, output: str, vocabulary_size: int
) -> StoredFile:
    """Write `tables.safetensors` from the tensors in the folder, bit for bit and without gathering them.

    Args:
        folder: a checkpoint whose tensors and metadata are on disk.
        files: its files.
        input: parameter name of the input table.
        output: parameter name of the output table; the same for a tied model.
        vocabulary_size: number of rows before the padding.
    """
    metadata = read_metadata(folder, dict(files))
    tables = {}
    for name in {input, output}:
        stored = metadata.state_dict_metadata[f"model.{name}"]
        assert isinstance(stored, TensorStorageMetadata)
        tables[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    read_tensors(folder, metadata, {f"model.{name}": table for name, table in tables.items()}, None, alone=True)
    path = folder / TABLES_FILE
    try:
        write_tables(path, tables, input=input, output=output, vocabulary_size=vocabulary_size)
    except Exception as error:
        # safetensors raises its own exception for a full disk.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise
    return stored_file(path)


def first_cause(error: BaseException) -> BaseException:
    """The exception of the lowest failed rank, from DCP's collected exceptions."""
    while isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def in_words(error: BaseException) -> str:
    """Describe an error for the user."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


class _HashingFile(io.FileIO):
    """A file that hashes the written data, flushes to disk on close, and keeps the first OSError.

    torch.save turns an OSError into a RuntimeError about positions in a zip file; `failure` keeps the cause.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.sha256.update(memoryview(data).cast("B")[:count])
        self.size += count
        return count

    def close(self) -> None:
        try:
            if not self.closed and self.failure is None:
                os.fsync(self.fileno())
        except OSError as error:
            self.failure = error
            raise
        finally:
            super().close()


class _HashingFiles(FileSystem):
    """File system for DCP that records the size and hash of every file."""

    def __init__(self) -> None:
        self.written: dict[str, StoredFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file for writing."""
        assert mode == "wb", mode
        file = _HashingFile(Path(path))
        stream = io.BufferedWriter(file, BUFFER_BYTES)
        try:
            yield stream
            stream.close()
        except BaseException as error:
            with contextlib.suppress(OSError):
                stream.close()
            cause = file.failure or error
            if isinstance(cause, OSError) and cause.filename is None and cause.errno is not None:
                raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from None
            raise
        self.written[Path(path).name] = StoredFile(file.size, file.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _FolderWriter(FileSystemWriter):
    """DCP writer for one checkpoint folder. DCP calls `prepare_global_plan` and `finish` on the first rank only."""

    def __init__(self, temporary: Path, complete: Callable[[dict[str, StoredFile]], None]) -> None:
        # Nothing to copy ahead: everything is in host memory. Files are synced on close; DCP would sync before the
        # last bytes leave the buffer.
        super().__init__(temporary, sync_files=False, per_thread_copy_ahead=0)
        self.files = _HashingFiles()
        self.fs = self.files
        self.temporary = temporary
        self.complete = complete

    def storage_meta(self) -> None:
        """Return nothing: DCP would write paths of this machine to the metadata."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder before any rank writes."""
        if self.temporary.exists():
            shutil.rmtree(self.temporary)
        self.temporary.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; append its files to DCP's results, which go to the first rank."""
        results = super().write_data(plan, planner).value()
        files = [WriteResult(MetadataIndex(name), file.bytes, file) for name, file in self.files.written.items()]
        both: Future[list[WriteResult]] = Future()
        both.set_result(results + files)
        return both

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, then call `complete`."""
        everything = [result for of_rank in results for result in of_rank]
        files = {result.index.fqn: result.storage_data for result in everything if _is_file(result)}
        super().finish(metadata, [[result for result in everything if not _is_file(result)]])
        self.complete({**files, METADATA_FILE: self.files.written[METADATA_FILE]})


def _is_file(result: WriteResult) -> bool:
    return isinstance(result.storage_data, StoredFile)


class _FolderReader(FileSystemReader):
    """DCP reader that uses metadata from `read_metadata`, which was loaded safely."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata."""
        return self.metadata


def _quiet_about_one_process() -> None:
    # A filter rather than warnings.catch_warnings, which is not thread-safe.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no valid checkpoint needs; do not trust it")


def read_metadata(folder: Path, files: dict[str, StoredFile]) -> Metadata:
    """Read and validate the metadata of a checkpoint.

    Args:
        folder: the checkpoint.
        files: all files of the checkpoint.

    Returns:
        Metadata that contains only tensors, all completely inside these files.
    """
    try:
        require_regular_file(folder / METADATA_FILE)
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        problem = _problem(metadata, files)
    except Exception as error:  # a damaged pickle can raise anything
        problem = str(error) or type(error).__name__
    if problem is not None:
        raise UserError(f"{METADATA_FILE} is not valid checkpoint metadata: {problem}")
    assert isinstance(metadata, Metadata)
    return metadata


def _problem(metadata: object, files: dict[str, StoredFile]) -> str | None:
    if not isinstance(metadata, Metadata):
        return f"it contains a {type(metadata).__name__}"
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            return f"{name!r} is not a tensor"
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            file = files.get(place.relative_path)
            if file is None:
                return f"{name!r} is in {place.relative_path!r}, which is not a file of this checkpoint"
            if place.offset < 0 or place.length < 0 or place.offset + place.length > file.bytes:
                return f"{name!r} is beyond the end of {place.relative_path}"
            if getattr(place, "transform_descriptors", None):
                return f"{name!r} is stored in an unsupported form"
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            return f"{name!r} is not complete"
    return None
