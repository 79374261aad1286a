"""Finding the newest whole checkpoint of a run, and filling tensors from it in place."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from coupled_adam.base.errors import UserError
from coupled_adam.optimizer.sharding import local_part, row_moment_like
from coupled_adam.training.checkpoint_files import first_cause, in_words, read_tensors
from coupled_adam.training.checkpoint_metadata import read_metadata
from coupled_adam.training.checkpoint_ranks import Agreement
from coupled_adam.training.checkpoint_record import checkpoints_in, read_record, step_of, stored_file, wrong_sizes
from coupled_adam.training.checkpoint_state import RNG, restore_generators

ROW_MOMENTS = ".row_avg_sq"
"""Of coupled tables, where their row exponent is not 0; checkpoints of other runs do not have them."""


def newest_good(
    folder: Path, *, on_skip: Callable[[str], None], last_step: int | None = None, process_group: Any = None
) -> Path | None:
    """The newest checkpoint that is whole, read completely to make sure; all ranks get the same.

    Args:
        folder: where the checkpoints lie; it may be missing.
        on_skip: called on every rank with a sentence about each damaged checkpoint that is passed over.
        last_step: of the run, where it is known: a checkpoint of a later one is not of this run.
        process_group: the ranks that look together, each at its share of the files; default all.

    Returns:
        The folder of the checkpoint, or None when there is no whole one.
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
    """What is wrong with a checkpoint; None when every file is as it was written. All ranks get the same answer.

    Args:
        path: the folder of the checkpoint.
        process_group: the ranks that look together, each at its share of the files; default all.
    """
    ranks = Agreement(process_group)
    return ranks.first_not_none(_damage_seen_by(ranks.rank, ranks.size, path))


def load(
    path: Path,
    tensors: Mapping[str, Tensor],
    process_group: Any = None,
    *,
    on_note: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Fill tensors from a checkpoint in place, whatever number of ranks and parallelism it was saved with.

    Every tensor must be in the checkpoint with its shape and dtype. Of the model and of the optimizers, all or nothing
    is loaded: `model.` tensors alone give the weights, to evaluate or export. Generators of random numbers are set to
    `rng.cpu` and `rng.cuda` where both sides have them. Row moments of coupled tables that the checkpoint lacks start
    at the mean of the column moments, as CoupledAdamW lets them; those that the run does not need are not read.

    Args:
        path: a whole checkpoint, as from :func:`newest_good`.
        tensors: by name, as from :func:`training_tensors`; plain tensors or DTensors.
        process_group: the ranks that load together; default all.
        on_note: called on every rank with a sentence where row moments start anew.

    Returns:
        The state given to `save`, and the step.
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
    if fresh := sorted(name for name in tensors.keys() - wanted.keys() if name.endswith(ROW_MOMENTS)):
        for name in fresh:
            _start_row_moments(tensors, name)
        on_note(f"{path} has no {_some(fresh)}: row moments start at the mean of the column moments.")
    return {"step": record.step} | {key: value for key, value in record.state.items() if key != "step"}


def _damage_seen_by(rank: int, ranks: int, path: Path) -> str | None:
    """What one of the ranks that share the hashing finds wrong."""
    try:
        record = read_record(path)
        problem = wrong_sizes(path, record.files)
        if problem is not None:
            return problem
        largest_first = sorted(record.files, key=lambda name: (-record.files[name].bytes, name))
        for name in largest_first[rank::ranks]:
            if stored_file(path / name) != record.files[name]:
                return f"{name} is not as it was written (its sha256 differs)"
        read_metadata(path, record.files)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _mismatch(metadata: Metadata, tensors: Mapping[str, Tensor]) -> str | None:
    """What keeps these tensors from being loaded."""
    stored = {name: tensor for name, tensor in metadata.state_dict_metadata.items() if not name.startswith(RNG)}
    live = {name: tensor for name, tensor in tensors.items() if not name.startswith(RNG)}
    families = {name.partition(".")[0] for name in live}
    other = "it was saved by another model or other optimizers"
    if missing := sorted(name for name in live.keys() - stored.keys() if not name.endswith(ROW_MOMENTS)):
        return f"has no {_some(missing)}; {other}"
    unused = sorted(
        name
        for name in stored.keys() - live.keys()
        if name.partition(".")[0] in families and not name.endswith(ROW_MOMENTS)
    )
    if unused:
        return f"has {_some(unused)}, which this run has not; {other}"
    for name, tensor in live.items():
        if name not in stored:
            continue
        found = stored[name]
        assert isinstance(found, TensorStorageMetadata)
        if tensor.is_meta:
            return f"cannot be loaded into {name}, which has no memory yet; call to_empty on the model first"
        if found.size != tensor.shape or found.properties.dtype != tensor.dtype:
            return (
                f"{name} is {tuple(found.size)} {found.properties.dtype}, "
                f"but this run has {tuple(tensor.shape)} {tensor.dtype}; {other}"
            )
    return None


def _start_row_moments(tensors: Mapping[str, Tensor], name: str) -> None:
    """Fill the row moments of one table in place from its column moments."""
    parameter = name.removeprefix("optimizer.").removesuffix(ROW_MOMENTS)
    start = row_moment_like(tensors[f"model.{parameter}"], tensors[f"optimizer.{parameter}.exp_avg_sq"])
    local_part(tensors[name]).copy_(local_part(start))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
