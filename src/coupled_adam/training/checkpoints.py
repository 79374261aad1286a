"""Checkpoints of a training run: saved while training goes on, whole or not at all, loaded on any number of ranks.

`CheckpointWriter.save` copies the state to host memory and returns; a thread writes it with
torch.distributed.checkpoint and renames the folder into place when everything is on the disk. `newest_good` finds the
checkpoint to continue from, `load` fills the tensors in place. The files are described in checkpoint_record.
"""

import errno
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.tables_file import TABLES_FILE
from coupled_adam.training.checkpoint_files import first_cause, in_words, save_folder, write_tables_of
from coupled_adam.training.checkpoint_loading import damage, load, newest_good
from coupled_adam.training.checkpoint_ranks import Agreement, background_group
from coupled_adam.training.checkpoint_record import (
    Record,
    StoredFile,
    checkpoints_in,
    folder_of_step,
    put_in_place,
    remove_leftovers,
    remove_old,
    temporary_name,
    write_record,
)
from coupled_adam.training.checkpoint_staging import Staged, StagedPlanner, Staging
from coupled_adam.training.checkpoint_state import make_optimizer_state, training_tensors

__all__ = ["CheckpointWriter", "Tables", "damage", "load", "make_optimizer_state", "newest_good", "training_tensors"]


@dataclass(frozen=True)
class Tables:
    """Which parameters of the model go into `tables.safetensors`."""

    input: str
    """Name of the parameter that is the input table (V, H)."""
    output: str
    """Name of the output table; the same when they are tied."""
    vocabulary_size: int
    """Rows from this one on are padding."""


class CheckpointWriter:
    """Writes the checkpoints of one run; all ranks make it together, and save together.

    Making it deletes what a killed run left half-written in the folder; make it before `newest_good` is asked. Call
    :meth:`wait` before the process group is destroyed.

    Args:
        folder: where the checkpoints lie; made if it is missing.
        keep: how many of the last ones stay, besides milestones.
        process_group: the ranks that save; default all. Messages travel in a gloo group of the writer's own, beside
            those of the training.

    Example:
        >>> import tempfile, torch
        >>> folder, weight = Path(tempfile.mkdtemp()), torch.ones(2, 3)
        >>> writer = CheckpointWriter(folder, keep=2)
        >>> writer.save(300, {"model.weight": weight}, {"tokens": 6000})
        >>> weight = weight.zero_()  # training goes on
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
        """Save the state of a run. Returns when it is copied to host memory; the files are written by a thread.

        Waits for the save before this one, and raises what went wrong in it (see :meth:`wait`); then nothing is saved.

        Args:
            step: steps taken so far; names the checkpoint, and replaces one of the same step.
            tensors: by name, as from :func:`training_tensors`; plain tensors are taken to be the same on every rank.
            state: everything else that a resumed run needs, as JSON can hold it.
            tables: the vocabulary tables, if `tables.safetensors` is wanted.
            milestone: keep this checkpoint for ever.
        """
        if step < 0:
            raise UserError(f"step is {step}, expected 0 or more")
        _check_tables(tables, tensors)
        copied_state = _as_json(state)
        self.wait()
        staged = self._staging.stage(tensors, self._ranks.rank, self._ranks.size)
        self._writing = self._thread.submit(self._write, staged, step, copied_state, tables, milestone)

    def wait(self) -> None:
        """Wait until everything saved is on the disk.

        Raises:
            OSError: on every rank, when a file of the last save could not be written. What was saved before is still
                there, and the next `save` may work.
            RuntimeError: likewise, for any other reason.
        """
        if self._writing is None:
            return
        try:
            self._writing.result()
        finally:
            if self._writing.done():  # not after a Ctrl-C
                self._writing = None

    def poll(self) -> None:
        """Raise as `wait` does if the last save has failed meanwhile; never waits."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(
                f"{self.folder}: this is not a folder, but checkpoints are to be written into it; move it away, then "
                "run the same command again"
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
                shutil.rmtree(temporary, ignore_errors=True)  # on a full disk, at once
            raise self._explained(error, step) from error

    def _explained(self, error: BaseException, step: int) -> Exception:
        """The error of a save as the caller sees it, alike on all ranks."""
        cause = first_cause(error)
        found = [path.name for path in checkpoints_in(self.folder)]
        kept = f"on the disk are {', '.join(found)}" if found else "no other checkpoint is on the disk"
        remedy = "; free some space, or keep fewer checkpoints" if _is_full(cause) else ""
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
            raise UserError(f"table {name!r}: there is no tensor 'model.{name}' among those to save")
        if table.ndim != 2 or not 0 < tables.vocabulary_size <= table.shape[0]:
            raise UserError(f"table {name!r} has shape {tuple(table.shape)}, expected (V, H) for {tables}")


def _as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the state as it will be read back."""
    try:
        copied = json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError) as error:
        raise UserError(f"the state of the run cannot be written as JSON: {error}") from None
    assert isinstance(copied, dict)
    return copied


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
