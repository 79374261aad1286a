"""The trainable parameters of the model of an optimizer file: names and order, without weights.

torch's optimizers store numbers instead of parameter names, so the names come from the model. It is built from its
config.json or by a user function, on the meta device, which allocates nothing. Or its state dict provides the names.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import read_json
from coupled_adam.conversion.optimizer_files import OptimizerFile, load_harmless
from coupled_adam.optimizer.inventory import plain_name
from coupled_adam.optimizer.state_dicts import StateDict

FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class ModelParameters:
    """The parameters of a model that an optimizer may have."""

    named: dict[str, nn.Parameter]
    """The trainable parameters, on the meta device, in the order of `named_parameters()` if `in_order`."""
    module: nn.Module | None
    """The model on the meta device, if it could be built."""
    in_order: bool
    origin: str
    """The source of this information, for messages."""


def read_model_parameters(
    model: str | Path | None, source: Path, file: OptimizerFile, frozen: Sequence[str]
) -> ModelParameters:
    """Find the parameters of the model of an optimizer file.

    Args:
        model: the model that the user passed: a folder with config.json, that file, a PyTorch file of the model, or
            "module:function" for a function that returns the model; else None.
        source: the checkpoint folder or file to convert.
        file: the optimizer in it.
        frozen: name patterns of parameters or buffers that were not trained.
    """
    path = None if model is None else Path(model)
    if path is not None and not path.exists():
        if FUNCTION.fullmatch(str(model)):
            return _from_module(_called(str(model)), str(model), frozen)
        raise UserError(f"--model {model}: no such file or folder; pass one, or module:function")
    config = _config_of(path, source)
    if config is not None:
        return _from_module(_configured(config), str(config.parent), frozen)
    if path is not None:
        state = OptimizerFile(path, load_harmless(path), ()).model_state()
        if state is None:
            raise UserError(f"{path}: no model in this file; pass a folder with config.json, or a model's state dict")
        return _from_state(state, str(path), frozen)
    state, names = file.model_state(), saved_names(file.state_dict)
    if state is not None and (names is None or set(names) <= set(map(plain_name, state))):
        wanted = {name: tensor for name, tensor in state.items() if names is None or plain_name(name) in names}
        return _from_state(wanted, f"the model in {file.path}", frozen)
    if names is not None:
        return _from_names(file.state_dict, names, str(file.path))
    raise UserError(
        f"{file.path}: the parameters have no names, only numbers; pass the model with --model, a folder with "
        "config.json or module:function"
    )


def saved_names(state_dict: StateDict) -> list[str] | None:
    """Return the parameter names in an optimizer file, in its order, or None if it has none."""
    groups = state_dict["param_groups"]
    if not all("param_names" in group for group in groups):
        return None
    return [plain_name(name) for name in chain.from_iterable(group["param_names"] for group in groups)]


def _config_of(model: Path | None, source: Path) -> Path | None:
    path = model or source
    if path.name == "config.json":
        return path
    folder = path if path.is_dir() else path.parent
    # A config.json next to a model file that the user passed may belong to something else.
    if (folder / "config.json").is_file() and (path.is_dir() or model is None):
        return folder / "config.json"
    if model is not None and model.is_dir():
        raise UserError(f"--model {model}: no config.json in this folder; pass the folder of the model")
    return None


def _configured(config: Path) -> nn.Module:
    """Build the model of a config.json."""
    try:
        architecture = read_json(config)["architectures"][0]
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"{config}: has no model class under 'architectures'; pass --model module:function") from None
    require("transformers", "hf", f"to build the model of {config}")
    import transformers

    model_class = getattr(transformers, str(architecture), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise UserError(
            f"{config}: transformers {transformers.__version__} has no model class {architecture}; pass --model "
            "module:function, with a function that returns the model"
        )
    try:
        config_class = model_class.config_class or transformers.PreTrainedConfig
        with torch.device("meta"):
            # Not AutoConfig, which would offer to run code next to the config.
            return model_class(config_class.from_pretrained(str(config.parent), local_files_only=True))
    except Exception as error:  # a config that does not match its class can raise anything
        raise UserError(f"{config}: cannot build {architecture} from it ({_first_line(error)})") from None


def _called(function: str) -> nn.Module:
    """Call the user's "module:function" and return its model. Modules are found as by `python -m`."""
    module_name, _, name = function.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        build = getattr(importlib.import_module(module_name), name)
        with torch.device("meta"):
            model = build()
    except Exception as error:  # user code can raise anything
        raise UserError(f"--model {function}: {type(error).__name__}: {_first_line(error)}") from None
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {function}: returns a {type(model).__name__}, not a torch.nn.Module")
    if not all(parameter.is_meta for parameter in model.parameters()):
        model.to("meta")  # a function may move its model, or load weights into it
    return model


def _from_module(module: nn.Module, origin: str, frozen: Sequence[str]) -> ModelParameters:
    _require_matches(frozen, [name for name, _ in module.named_parameters()], origin)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not _matches(name, frozen))
    named = {plain_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    return ModelParameters(named, module, in_order=True, origin=origin)


def _from_state(state: dict[str, Tensor], origin: str, frozen: Sequence[str]) -> ModelParameters:
    """Read the parameters from a model's state dict. It has the order of named_parameters(), and repeats tied ones."""
    named: dict[str, nn.Parameter] = {}
    seen = set()
    for name, tensor in state.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.is_floating_point() and place not in seen and not _matches(plain_name(name), frozen):
            named[plain_name(name)] = _parameter(tensor)
        seen.add(place)
    _require_matches(frozen, list(map(plain_name, state)), origin)
    return ModelParameters(named, None, in_order=True, origin=origin)


def _from_names(state_dict: StateDict, names: Sequence[str], origin: str) -> ModelParameters:
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    states = [state_dict["state"].get(saved_id) for saved_id in ids]
    empty = torch.empty(0)
    # A coupled table with beta1 = 0 has no first moment. Its conversion to AdamW needs a model in any case.
    firsts = [state.get("exp_avg", empty) if state else empty for state in states]
    named = {name: _parameter(first) for name, first in zip(names, firsts, strict=True)}
    return ModelParameters(named, None, in_order=False, origin=origin)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(tensor, device="meta"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(patterns: Sequence[str], names: Sequence[str], origin: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"--frozen {pattern}: matches no parameter of {origin}; its parameters are {', '.join(names[:4])}, ..."
            )
