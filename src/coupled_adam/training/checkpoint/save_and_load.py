"""Save checkpoints atomically in the background, and load them on any number of ranks.

`CheckpointWriter.save` copies the state to host memory and returns. A thread then writes it with
torch.distributed.checkpoint, and renames the folder once everything is on disk. `newest_good` finds the checkpoint to
resume from, and `load` fills the tensors in place. `checkpoint_folder` describes the files.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from coupled_adam.base.errors import UserError, is_full_disk
from coupled_adam.base.text import some_of
from coupled_adam.optimizer.sharding import local_part, row_moment_like
from coupled_adam.tables_file import TABLES_FILE
from coupled_adam.training.checkpoint.checkpoint_folder import (
    Record,
    StoredFile,
    checkpoints_in,
    file_times,
    folder_of_step,
    is_checked,
    put_in_place,
    read_record,
    remember_checked,
    remove_leftovers,
    remove_old,
    step_of,
    stored_file,
    temporary_name,
    write_record,
    wrong_sizes,
)
from coupled_adam.training.checkpoint.dcp_files import (
    first_cause,
    in_words,
    read_metadata,
    read_tensors,
    save_folder,
    write_tables_of,
)
from coupled_adam.training.checkpoint.training_state import RNG, Staged, StagedPlanner, Staging, restore_generators
from coupled_adam.training.parallel import Agreement, background_group

STARTS = {"row_avg_sq": "row moments start at the mean of the column moments", "exp_avg": "first moments start at 0"}
"""How state starts that a checkpoint lacks, by suffix: only coupled tables with a row exponent other than 0 have row
moments, and those with a beta1 of 0 have no first moments."""


@dataclass(frozen=True)
class Tables:
    """The parameters that are written to `tables.safetensors`."""

    input: str
    """Parameter name of the input table (V, H)."""
    output: str
    """Parameter name of the output table; the same for a tied model."""
    vocabulary_size: int
    """Number of rows before the padding."""


class CheckpointWriter:
    """Write the checkpoints of a run. All ranks create the writer together and save together.

    Creating it deletes partial checkpoints of a killed run, so create it before calling `newest_good`. Call
    :meth:`wait` before the process group is destroyed.

    Args:
        folder: folder of the checkpoints, created if missing.
        keep: number of latest checkpoints to keep, in addition to milestones.
        process_group: the ranks that save; all by default. The writer communicates in its own gloo group.

    Example:
        >>> import tempfile, torch
        >>> folder, weight = Path(tempfile.mkdtemp()), torch.ones(2, 3)
        >>> writer = CheckpointWriter(folder, keep=2)
        >>> writer.save(300, {"model.weight": weight}, {"tokens": 6000})
        >>> weight = weight.zero_()  # training continues
        >>> writer.wait()
        >>> load(newest_good(folder, on_skip=print), {"model.weight": weight})
        {'step': 300, 'tokens': 6000}
        >>> weight.sum().item()
        6.0
    """

    def __init__(self, folder: Path, keep: int, process_group: Any = None) -> None:
        if keep < 1:
            raise UserError(f"keep is {keep}, expected at least 1: the last checkpoint is needed to resume")
        self.folder = folder
        self.keep = keep
        self._group = background_group(process_group)
        self._ranks = Agreement(self._group)
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._ranks.first_does(self._prepare_folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        tables: Tables | None = None,
        milestone: bool = False,
    ) -> None:
        """Save the state of a run. Returns once the state is copied to host memory; a thread writes the files.

        First waits for the previous save. If that failed, its error is raised (see :meth:`wait`) and nothing is saved.

        Args:
            step: number of steps taken; a checkpoint of the same step is replaced.
            tensors: tensors by name, from :func:`training_tensors`; plain tensors must be equal on all ranks.
            state: everything else that a resumed run needs, as JSON values.
            tables: the vocabulary tables, to write `tables.safetensors`.
            milestone: never delete this checkpoint.
        """
        if step < 0:
            raise UserError(f"step is {step}, expected 0 or more")
        _check_tables(tables, tensors)
        copied_state = _as_json(state)
        self.wait()
        staged = self._staging.stage(tensors, self._ranks.rank, self._ranks.size)
        self._writing = self._thread.submit(self._write, staged, step, copied_state, tables, milestone)

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            OSError: on every rank, if a file of the last save could not be written. Earlier checkpoints are intact, and
                the next `save` may succeed.
            RuntimeError: on every rank, if the last save failed for another reason.
        """
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            if self._writing.done():  # not after a Ctrl-C
                self._writing = None

    def poll(self) -> None:
        """Raise the error of the last save if it has already failed, as `wait` does, but without waiting."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(
                f"{self.folder}: not a folder, but checkpoints must be written there; move it away, then run the "
                "command again"
            ) from None
        remove_leftovers(self.folder)

    def _write(self, staged: Staged, step: int, state: dict[str, Any], tables: Tables | None, milestone: bool) -> None:
        final = folder_of_step(self.folder, step)
        temporary = temporary_name(final)

        def complete(files: dict[str, StoredFile]) -> None:
            if tables is not None:
                files[TABLES_FILE] = write_tables_of(temporary, files, **asdict(tables))
            write_record(temporary, Record(step, milestone, state, files))
            put_in_place(temporary, final)
            remove_old(self.folder, self.keep, newest=final)

        try:
            save_folder(temporary, StagedPlanner(staged), self._group, complete)
        except BaseException as error:
            if self._ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # frees space on a full disk
            raise self._explained(error, step) from error

    def _explained(self, error: BaseException, step: int) -> Exception:
        """Build the error for the caller, the same on all ranks."""
        cause = first_cause(error)
        found = [path.name for path in checkpoints_in(self.folder)]
        kept = f"existing checkpoints: {', '.join(found)}" if found else "there is no other checkpoint"
        remedy = "; free some space, or keep fewer checkpoints" if is_full_disk(cause) else ""
        message = (
            f"the checkpoint of step {step} could not be written to {self.folder}: {in_words(cause)}; {kept}{remedy}"
        )
        if isinstance(cause, OSError) and cause.errno is not None:
            return OSError(cause.errno, message)
        return RuntimeError(message)


def _check_tables(tables: Tables | None, tensors: Mapping[str, Tensor]) -> None:
    if tables is None:
        return
    for name in (tables.input, tables.output):
        table = tensors.get(f"model.{name}")
        if table is None:
            raise UserError(f"table {name!r}: no tensor 'model.{name}' among the tensors to save")
        if table.ndim != 2 or not 0 < tables.vocabulary_size <= table.shape[0]:
            raise UserError(f"table {name!r} has shape {tuple(table.shape)}, expected (V, H) for {tables}")


def _as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the state by converting it to JSON and back."""
    try:
        copied = json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of the run cannot be written as JSON: {error}") from None
    assert isinstance(copied, dict)
    return copied


def newest_good(
    folder: Path, *, on_skip: Callable[[str], None], last_step: int | None = None, process_group: Any = None
) -> Path | None:
    """Find the newest checkpoint without :func:`damage`; the same on all ranks.

    Args:
        folder: folder of the checkpoints; may be missing.
        on_skip: called on every rank with a message about each damaged checkpoint that is skipped.
        last_step: last step of the run, if known; checkpoints of later steps do not belong to it.
        process_group: the ranks that check together, each its share of the files; all by default.

    Returns:
        The folder of the checkpoint, or None if no checkpoint is intact.
    """
    for path in reversed(Agreement(process_group).from_first(checkpoints_in(folder))):
        problem = damage(path, process_group)
        if problem is None and last_step is not None and step_of(path) > last_step:
            problem = f"its step is after {last_step}, the last step of the run"
        if problem is None:
            return path
        on_skip(f"checkpoint {path} is damaged and skipped: {problem}")
    return None


def damage(path: Path, process_group: Any = None) -> str | None:
    """Describe what is wrong with a checkpoint; None if every file is intact. The same on all ranks.

    The files are read completely once, and not again while they are unchanged (see `file_times`).

    Args:
        path: folder of the checkpoint.
        process_group: the ranks that check together, each its share of the files; all by default.
    """
    ranks = Agreement(process_group)
    problem, times, is_known = None, None, False
    try:
        record = read_record(path)
        problem = wrong_sizes(path, record.files)
        if problem is None:
            times = file_times(path, record)
            is_known = is_checked(path, times)
            problem = None if is_known else _wrong_content(path, record, ranks)
        if problem is None:
            read_metadata(path, record.files)
    except (ValueError, OSError) as error:
        problem = str(error)
    problem = ranks.first_not_none(problem)
    if problem is None and ranks.rank == 0 and not is_known:
        assert times is not None
        remember_checked(path, times)
    return problem


def load(
    path: Path,
    tensors: Mapping[str, Tensor],
    process_group: Any = None,
    *,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Fill tensors from a checkpoint in place, for any number of ranks and any parallelism it was saved with.

    Every tensor must be in the checkpoint with its shape and dtype. The model and the optimizers are each loaded
    completely or not at all: pass only `model.` tensors to evaluate or export. The random number generators are set to
    `rng.cpu` and `rng.cuda` if both the checkpoint and `tensors` have them. Coupled tables are an exception: as in
    CoupledAdamW, their missing row moments start at the mean of the column moments, and their missing first moments at
    0; those that the run does not need are not read.

    Args:
        path: an intact checkpoint, from :func:`newest_good`.
        tensors: tensors or DTensors by name, from :func:`training_tensors`.
        process_group: the ranks that load together; all by default.
        on_note: called on every rank with a message if row moments or first moments are missing.

    Returns:
        The state passed to `save`, and the step.
    """
    ranks = Agreement(process_group)
    problem = None
    try:
        record = read_record(path)
        metadata = read_metadata(path, record.files)
        problem = _mismatch(metadata, tensors)
    except ValueError as error:
        problem = str(error)
    if problem := ranks.first_not_none(problem):
        raise UserError(f"checkpoint {path}: {problem}")
    wanted = {name: tensor for name, tensor in tensors.items() if name in metadata.state_dict_metadata}
    try:
        read_tensors(path, metadata, wanted, process_group)
    except CheckpointException as error:
        cause = first_cause(error)
        raise UserError(f"checkpoint {path} cannot be read: {in_words(cause)}") from error
    restore_generators(wanted)
    for key, start in STARTS.items():
        if fresh := sorted(name for name in tensors.keys() - wanted.keys() if name.endswith(f".{key}")):
            for name in fresh:
                _start_moments(tensors, name)
            on_note(f"{path} has no {some_of(fresh, 3)}: {start}.")
    return {"step": record.step} | {key: value for key, value in record.state.items() if key != "step"}


def _wrong_content(path: Path, record: Record, ranks: Agreement) -> str | None:
    """Describe the first damaged file in this rank's share; None if all are intact."""
    largest_first = sorted(record.files, key=lambda name: (-record.files[name].bytes, name))
    for name in largest_first[ranks.rank :: ranks.size]:
        if stored_file(path / name) != record.files[name]:
            return f"{name} was changed or damaged (its sha256 differs)"
    return None


def _mismatch(metadata: Metadata, tensors: Mapping[str, Tensor]) -> str | None:
    """Describe why these tensors cannot be loaded; None if they can."""
    stored = {name: tensor for name, tensor in metadata.state_dict_metadata.items() if not name.startswith(RNG)}
    live = {name: tensor for name, tensor in tensors.items() if not name.startswith(RNG)}
    stored_shapes = {name: tensor.size for name, tensor in stored.items() if isinstance(tensor, TensorStorageMetadata)}
    live_shapes = {name: tensor.shape for name, tensor in live.items()}
    families = {name.partition(".")[0] for name in live}
    other = "it was saved by another model or other optimizers"
    if missing := sorted(name for name in live.keys() - stored.keys() if not _is_optional(name, stored_shapes)):
        return f"has no {some_of(missing, 3)}; {other}"
    of_families = (name for name in stored.keys() - live.keys() if name.partition(".")[0] in families)
    if unused := sorted(name for name in of_families if not _is_optional(name, live_shapes)):
        return f"has {some_of(unused, 3)}, which this run does not have; {other}"
    for name, tensor in live.items():
        if name not in stored:
            continue
        found = stored[name]
        assert isinstance(found, TensorStorageMetadata)
        if tensor.is_meta:
            return f"cannot be loaded into {name}, which is on the meta device; call to_empty on the model first"
        if found.size != tensor.shape or found.properties.dtype != tensor.dtype:
            return (
                f"{name} is {tuple(found.size)} {found.properties.dtype}, "
                f"but this run has {tuple(tensor.shape)} {tensor.dtype}; {other}"
            )
    return None


def _is_optional(name: str, others: Mapping[str, torch.Size]) -> bool:
    """Whether only one of checkpoint and run needs a tensor; `others` are the shapes on the other side.

    Only state of a coupled table is optional. Its second moment is (1, H).
    """
    state, _, key = name.rpartition(".")
    second_moment = others.get(f"{state}.exp_avg_sq", ())
    return key in STARTS and len(second_moment) == 2 and second_moment[0] == 1


def _start_moments(tensors: Mapping[str, Tensor], name: str) -> None:
    """Initialise the row moments of one table from its column moments, or its first moments with 0; in place."""
    state, _, key = name.rpartition(".")
    if key == "exp_avg":
        local_part(tensors[name]).zero_()
        return
    parameter = state.removeprefix("optimizer.")
    start = row_moment_like(tensors[f"model.{parameter}"], tensors[f"{state}.exp_avg_sq"])
    local_part(tensors[name]).copy_(local_part(start))
