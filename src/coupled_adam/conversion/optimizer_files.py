"""Find and read the optimizer in a checkpoint.

Files are read with `weights_only=True`, so no code in them runs. Everything else in the same file, such as the model or
a step count, is kept. Formats without whole AdamW moments are refused by name.
"""

import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.torch_files import refusing_bad_files
from coupled_adam.optimizer.sharding import is_distributed
from coupled_adam.optimizer.state_dicts import StateDict

# File names of the Hugging Face Trainer and of accelerate, each with its scheduler file.
SCHEDULER_BESIDE = {"optimizer.pt": "scheduler.pt", "optimizer.bin": "scheduler.bin"}
DEPTH = 3  # {"optimizer": ...}; Lightning's {"optimizer_states": [...]}; one more for wrappers
Keys = tuple[Any, ...]
MOMENTS = {"exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class OptimizerFile:
    """A file that contains one optimizer."""

    path: Path
    document: Any
    """The whole content of the file."""
    keys: Keys
    """Path to the optimizer in `document`; empty if the file is the optimizer's state dict."""

    @property
    def state_dict(self) -> StateDict:
        """The state dict of the optimizer."""
        value = self.document
        for key in self.keys:
            value = value[key]
        state_dict: StateDict = value
        return state_dict

    def schedulers(self) -> list[tuple[Keys, dict[str, Any]]]:
        """The learning-rate schedulers in the same file, with their paths."""
        return list(_found(self.document, _is_scheduler))

    def model_state(self) -> dict[str, Tensor] | None:
        """The model in the same file, if there is exactly one."""
        models = [value for _, value in _found(self.document, _is_model)]
        return models[0] if len(models) == 1 else None


def find_optimizer_file(source: Path) -> Path:
    """Return the optimizer file of a checkpoint folder, or the file itself. Raises UserError for other formats."""
    if source.is_dir():
        _refuse_other_folders(source)
        for name in SCHEDULER_BESIDE:
            if (source / name).is_file():
                return source / name
        inside = sorted(source.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
        advice = f"pass one of its checkpoints, such as {inside[-1]}" if inside else "pass the file of the optimizer"
        raise UserError(f"{source}: no optimizer.pt or optimizer.bin in this folder; {advice}")
    if not source.exists():
        raise UserError(f"{source}: no such file or folder")
    if source.name.endswith("_optim_states.pt"):
        _refuse_deepspeed(source)
    if source.suffix == ".distcp":
        _refuse_sharded(source)
    if source.suffix == ".safetensors":
        raise UserError(f"{source}: a safetensors file has a model but no optimizer; pass the file of the optimizer")
    return source


def read_optimizer_file(path: Path) -> OptimizerFile:
    """Read a file and find its optimizer."""
    document = load_harmless(path)
    if isinstance(document, Mapping) and {"ds_version", "ds_config"} & document.keys():
        _refuse_deepspeed(path)
    found = [keys for keys, _ in _found(document, _is_optimizer)]
    if not found:
        keys = list(document) if isinstance(document, Mapping) else []
        holds = f"its keys are {_listed(keys)}" if keys else f"it contains a {type(document).__name__}"
        raise UserError(f"{path}: no optimizer in this file ({holds}); pass the file with optimizer.state_dict()")
    if len(found) > 1:
        places = _listed([".".join(map(str, keys)) for keys in found])
        raise UserError(
            f"{path}: {len(found)} optimizers in this file ({places}); save the one to convert in its own file"
        )
    file = OptimizerFile(path, document, found[0])
    _require_adamw_moments(file)
    return file


def load_harmless(path: Path) -> Any:
    """Load a PyTorch file without running code in it. Tensors are memory-mapped if possible."""
    remedy = "if you trust it, load it in Python and save only the state dict of its optimizer"
    with refusing_bad_files(path, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Only the zip files that torch writes since 1.6 can be memory-mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def is_coupled(state_dict: StateDict) -> bool:
    """Whether a state dict has a table with one second moment for all rows."""
    return any(group.get("coupled") for group in state_dict["param_groups"]) or any(
        "exp_avg" not in state or state["exp_avg_sq"].shape != state["exp_avg"].shape
        for state in state_dict["state"].values()
        if state
    )


def moment_bytes(state_dict: StateDict) -> int:
    """Bytes of all tensors in the optimizer state."""
    return sum(
        value.numel() * value.itemsize
        for state in state_dict["state"].values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _found(value: Any, wanted: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if wanted(value):
        yield keys, value
    elif len(keys) < DEPTH and isinstance(value, (dict, list)) and not _is_optimizer(value):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _found(below, wanted, (*keys, key))


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and "state" in value and isinstance(value.get("param_groups"), list)


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, dict) and {"last_epoch", "_last_lr"} <= value.keys()


def _is_model(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _is_whole(state_dict: StateDict) -> bool:
    groups, states = state_dict["param_groups"], state_dict["state"]
    return (
        bool(groups)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(_has_a_name_each(group) for group in groups)
        and all(isinstance(group.get("lr"), (float, int, Tensor)) and "weight_decay" in group for group in groups)
        and isinstance(states, dict)
        and all(isinstance(state, dict) for state in states.values())
        and all(isinstance(state[key], Tensor) for state in states.values() for key in state if key in MOMENTS)
    )


def _has_a_name_each(group: dict[str, Any]) -> bool:
    """Whether a group has either no names or one name per parameter."""
    names = group.get("param_names", [""] * len(group["params"]))
    return len(names) == len(group["params"]) and all(isinstance(name, str) for name in names)


def _require_adamw_moments(file: OptimizerFile) -> None:
    path, state_dict = file.path, file.state_dict
    if not _is_whole(state_dict):
        raise UserError(f"{path}: its optimizer is not a state dict of torch.optim; save optimizer.state_dict() again")
    ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    if any(isinstance(saved_id, str) for saved_id in ids):
        _refuse_sharded(path)
    if not any(state_dict["state"].values()):
        raise UserError(f"{path}: this optimizer has not taken a step; start the new optimizer without a file")
    for state in state_dict["state"].values():
        if {"state1", "state2", "qmap1", "absmax1"} & state.keys() or any(
            str(key).startswith("__bnb") for key in state
        ):
            raise UserError(
                f"{path}: this file is from an 8-bit optimizer of bitsandbytes, whose moments are rounded to 8 bits; "
                "start the new optimizer without a file, or continue from a checkpoint of torch's AdamW"
            )
        if state and not state.keys() >= MOMENTS and not _has_no_first_moment(state):
            raise UserError(
                f"{path}: not a file of AdamW: its state has {_listed(state)} instead of exp_avg and exp_avg_sq; pass "
                "a file of torch.optim.AdamW or CoupledAdamW"
            )
        if any(is_distributed(value) for value in state.values() if isinstance(value, Tensor)):
            _refuse_sharded(path)


def _has_no_first_moment(state: dict[str, Any]) -> bool:
    """Whether a state is that of a coupled table with beta1 = 0."""
    second_moment = state.get("exp_avg_sq")
    return second_moment is not None and second_moment.ndim == 2 and second_moment.shape[0] == 1


def _refuse_other_folders(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    if {"run.json", "checkpoints"} <= names or {"state.json", "tables.safetensors"} <= names:
        raise UserError(
            f"{folder}: a run of `coupled-adam train`, which cannot change its optimizer; start a new run with "
            "--set optimizer.embeddings=coupled or adamw"
        )
    if {"latest", "zero_to_fp32.py"} & names or any(folder.glob("global_step*")):
        _refuse_deepspeed(folder)
    sharded = [path for path in folder.glob("optimizer_*") if path.is_dir()]
    if ".metadata" in names or sharded or any(folder.glob("rank*-of-*-optimizer.pt")):
        _refuse_sharded(folder)


def _refuse_deepspeed(path: Path) -> None:
    raise UserError(
        f"{path}: a checkpoint of DeepSpeed, which flattens the moments of all parameters and splits them over ranks; "
        "CoupledAdamW does not work with DeepSpeed's optimizers: use DDP or FSDP2"
    )


def _refuse_sharded(path: Path) -> None:
    raise UserError(
        f"{path}: a sharded optimizer, saved under FSDP; convert it on the training ranks, see 'From a sharded AdamW "
        "checkpoint' in docs/coupledadamw-reference.md"
    )


def _listed(keys: Any, limit: int = 6) -> str:
    words = [str(key) for key in keys]
    return ", ".join(words[:limit]) + (", ..." if len(words) > limit else "")
