"""Convert a checkpoint folder or an optimizer file, atomically.

A folder is copied completely, with the optimizer and the scheduler converted, so that a framework can resume from the
copy. A file keeps everything but the optimizer and its schedulers, which are converted.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from coupled_adam.base.errors import OF_A_FULL_DISK, UserError
from coupled_adam.base.files import replacing, require_writable
from coupled_adam.conversion.adamw_groups import Cut, layout_of, names_by_position
from coupled_adam.conversion.model_parameters import ModelParameters, read_model_parameters, saved_names
from coupled_adam.conversion.optimizer_files import (
    SCHEDULER_BESIDE,
    Keys,
    OptimizerFile,
    find_optimizer_file,
    is_coupled,
    load_harmless,
    moment_bytes,
    read_optimizer_file,
)
from coupled_adam.conversion.switch import ConvertedTable, Switched, switch_scheduler, to_adamw, to_coupled
from coupled_adam.evaluation.whole_folder import replacing_folder
from coupled_adam.optimizer.state_dicts import without_common_prefix

Kind = Literal["coupled", "adamw"]


@dataclass(frozen=True)
class Conversion:
    """Summary of a conversion."""

    tables: Sequence[ConvertedTable]
    groups: Sequence[dict[str, Any]]
    """The groups in the new file, with their options."""
    bytes_before: int
    bytes_after: int
    schedulers: int
    has_modules: bool
    """Whether the new groups are those of `CoupledAdamW(model)`. Otherwise they are the old ones without the tables."""
    is_trainer_checkpoint: bool
    optimizer_keys: Keys
    """Where in the new file the optimizer's state dict is; empty if the file is the state dict."""


def convert_checkpoint(
    source: Path,
    out: Path,
    to: Kind,
    *,
    model: str | Path | None = None,
    couple: str | Sequence[str] | None = None,
    adamw_groups: Cut | None = None,
    frozen: Sequence[str] = (),
    overwrite: bool = False,
) -> Conversion:
    """Convert the optimizer in `source` to the other kind, and write the result to `out`.

    Args:
        source: a checkpoint folder with optimizer.pt or optimizer.bin, or a file that contains an optimizer.
        out: the folder or file to write.
        to: the kind of optimizer that will load `out`.
        model: the model, if `source` does not have it: a folder with config.json, a file with the model's state dict,
            or "module:function" for a function that returns the model.
        couple: which tables to couple, as in CoupledAdamW; default "output". Only for `to="coupled"`.
        adamw_groups: how AdamW's parameters are split into groups, in `source` or in `out`.
        frozen: name patterns of parameters that were not trained.
        overwrite: replace an existing checkpoint or file.

    Returns:
        The converted tables, the new groups and their sizes.
    """
    if to == "adamw" and couple is not None:
        raise UserError("--couple is only for --to coupled; --to adamw converts every coupled table in the file")
    path = find_optimizer_file(source)
    _require_free(source, out, overwrite=overwrite)
    file = read_optimizer_file(path)
    if is_coupled(file.state_dict) == (to == "coupled"):
        has = "was written by CoupledAdamW" if to == "coupled" else "has no coupled table"
        raise UserError(f"{path}: nothing to convert with --to {to}; this file {has}")
    is_trainer_checkpoint = source.is_dir() and (source / "trainer_state.json").is_file()
    parameters = read_model_parameters(model, source, file, frozen)
    names = saved_names(file.state_dict)
    if names is None:
        names = names_by_position(file.state_dict, parameters, adamw_groups, path)
    names = without_common_prefix(names, list(parameters.named))
    if to == "coupled":
        switched = to_coupled(file.state_dict, names, parameters, couple or "output")
    else:
        cut: Cut = adamw_groups or ("trainer" if is_trainer_checkpoint else "single")
        switched = to_adamw(file.state_dict, names, parameters, _adamw_layout(cut, parameters))

    before = moment_bytes(file.state_dict)
    schedulers = _write(source, out, file, switched)
    groups = switched.state_dict["param_groups"]
    after = moment_bytes(switched.state_dict)
    has_modules = parameters.module is not None
    return Conversion(switched.tables, groups, before, after, schedulers, has_modules, is_trainer_checkpoint, file.keys)


def _adamw_layout(cut: Cut, parameters: ModelParameters) -> Any:
    layout = layout_of(cut, parameters)
    if layout is None or not parameters.in_order:
        raise UserError(
            f"AdamW's files depend on the order of the parameters, which is not in {parameters.origin} for "
            f"--adamw-groups {cut}; pass the model with --model, a folder with config.json or module:function"
        )
    return layout


def _require_free(source: Path, out: Path, *, overwrite: bool) -> None:
    if out.exists() and out.samefile(source):
        raise UserError(f"{out}: is the input itself; choose another name")
    if out.is_symlink():
        raise UserError(f"{out}: is a link; choose a new {'folder' if source.is_dir() else 'file'}")
    if not source.is_dir():
        if out.exists() and not out.is_dir() and not overwrite:
            raise UserError(f"{out}: exists; choose another name, or replace it with --overwrite")
        with _saying_what_failed(out):
            require_writable(out)
        return
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out}: is inside the input; choose a folder outside of {source}")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file, but the input is a folder; choose a new folder")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"{out}: is not empty; choose a new folder, or replace this one with --overwrite")
        if source.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out}: contains the input; choose a new folder")
        if not any((out / name).is_file() for name in SCHEDULER_BESIDE):
            raise UserError(f"{out}: is not a checkpoint, so --overwrite does not replace it; choose a new folder")


def _write(source: Path, out: Path, file: OptimizerFile, switched: Switched) -> int:
    """Write the converted file or folder, and return the number of converted schedulers."""
    groups_before = len(file.state_dict["param_groups"])
    document = file.document
    inside = file.schedulers()
    for keys, scheduler in inside:
        document = _replaced(document, keys, switch_scheduler(scheduler, switched, groups_before))
    document = _replaced(document, file.keys, switched.state_dict)
    with _saying_what_failed(out):
        if not source.is_dir():
            with replacing(out) as temporary:
                _save(document, temporary)
            return len(inside)
        beside = SCHEDULER_BESIDE[file.path.name]
        converted = {file.path.name: document}
        if (source / beside).is_file():
            scheduler = load_harmless(source / beside)
            converted[beside] = switch_scheduler(scheduler, switched, groups_before)
        with replacing_folder(out) as temporary:
            ignore = shutil.ignore_patterns(*converted)
            shutil.copytree(source, temporary, dirs_exist_ok=True, ignore=ignore)
            for name, content in converted.items():
                _save(content, temporary / name)
    return len(inside) + len(converted) - 1


def _replaced(value: Any, keys: Keys, new: Any) -> Any:
    if not keys:
        return new
    changed = value.copy()
    changed[keys[0]] = _replaced(value[keys[0]], keys[1:], new)
    return changed


def _save(content: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)


@contextmanager
def _saying_what_failed(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = str(getattr(cause, "strerror", None) or cause)
        if isinstance(error, shutil.Error):  # from copytree: a list of (source, copy, reason)
            reason = str(error.args[0][0][2])
        full = any(os.strerror(number) in reason for number in OF_A_FULL_DISK)
        remedy = "free some space, or write to another disk" if full else "choose another location"
        line = reason.split("\n")[0]
        raise UserError(f"{out}: cannot be written ({line}); {remedy}. No partial output was left behind") from error
