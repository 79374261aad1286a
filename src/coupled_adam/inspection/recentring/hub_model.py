"""Open a Hugging Face folder for recentring, and write the recentred folder.

transformers gets only the config and the tensors, never the folder, so it cannot load code, pickles or adapters from
it. The tensors are read by our own safetensors reader.

Legend: V vocabulary rows, H hidden size, T time.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.text import printable, some_of
from coupled_adam.inspection.recentring.copied_files import copy_files, files_to_copy
from coupled_adam.inspection.recentring.finished_model import NO_POSITIONS, FinishedModel
from coupled_adam.inspection.recentring.hub_refusals import gives_token_types, refuse_config, refuse_tied
from coupled_adam.inspection.recentring.hub_weights import (
    INDEX,
    WeightFiles,
    open_weights,
    read_object,
    write_json,
    write_weights,
)
from coupled_adam.tokenizer import open_tokenizer, read_tokenizer

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# Position tables, one row of which is added to every input embedding, by model_type.
POSITIONS = {
    "gpt2": "transformer.wpe.weight",
    "gpt_neo": "transformer.wpe.weight",
    "gpt_bigcode": "transformer.wpe.weight",
    "openai-gpt": "transformer.positions_embed.weight",
    "opt": "model.decoder.embed_positions.weight",
}


def open_hub_folder(folder: Path) -> FinishedModel:
    """Open a Hugging Face folder; raise with the reason if it cannot be recentred."""
    config = read_object(folder / CONFIG, folder)
    refuse_config(folder, config)
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder}: has an adapter (adapter_config.json); merge it into the model first")
    files = open_weights(folder)
    copied, left_out = files_to_copy(folder, [*files.names, *([INDEX] if files.index else [])])
    module, info = _build(folder, config, files)
    unused = {name for name in info["unexpected_keys"] if files.is_floating(name)}
    head, table = _table(folder, module.get_output_embeddings), _table(folder, module.get_input_embeddings)
    uses = [name for name, each in module.named_parameters(remove_duplicate=False) if each is head]
    stored = {name: _stored_name(files, name, module) for name in uses}
    table_names = [name for name in stored.values() if name is not None]
    is_tied = head is table
    if is_tied:
        refuse_tied(folder, config, files.file_of, unused)
        if len(uses) > 2:
            raise UserError(f"{folder}: the tied table is used in {len(uses)} places ({some_of(uses, 4)})")
    elif _says_tied(config, kind=type(module.config)):
        raise UserError(
            f"{folder}: tie_word_embeddings is true for this model, but the files have two different tables, and "
            'programs disagree on which to use; set "tie_word_embeddings": false in config.json, or remove the wrong '
            "table"
        )
    if not table_names:
        raise UserError(
            f"{folder}: no stored tensor is the output table that transformers builds ({uses[0]}), so there is nothing "
            "to rewrite"
        )
    positions_name, no_positions = _positions(folder, config, module, files) if is_tied else (None, "")
    positions = None if positions_name is None else module.get_parameter(positions_name)
    stored_positions = None if positions_name is None else _stored_name(files, positions_name, module)
    rewritable = [*table_names, *([stored_positions] if stored_positions else [])]
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_file() else None
    head_name = _head_name(module)
    notes = [f"not copied, because it has the original weights: {printable(str(path))}" for path in left_out]

    def write(temporary: Path, tensors: Mapping[str, Tensor], *, untied: bool, dtype: torch.dtype | None) -> None:
        copy_files(folder, temporary, copied)
        changed = _changed_config(config, untied=untied, dtype=dtype)
        if changed != config:
            write_json(temporary / CONFIG, changed)
        head_dtype = dtype or files.dtype(table_names[0])
        write_weights(files, temporary, tensors, dtype, head_dtype, head_name if untied else None)

    def logits(tokens: Tensor) -> Tensor:
        return module(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]

    return FinishedModel(
        path=folder,
        module=module,
        logits=logits,
        table_names=table_names,
        new_head_name=head_name,
        positions=positions,
        positions_name=stored_positions,
        no_positions=no_positions,
        rows=_rows(files, tokenizer, len(head)),
        context=_context(config, module),
        dtypes={head_name: files.dtype(table_names[0])} | {name: files.dtype(name) for name in rewritable},
        bytes=sum((folder / name).stat().st_size for name in files.names),
        write=write,
        reopen=open_hub_folder,
        tokenizer=None if tokenizer is None else (lambda: open_tokenizer(tokenizer)),
        notes=notes,
    )


def _build(folder: Path, config: dict[str, Any], files: WeightFiles) -> tuple[Any, dict[str, Any]]:
    """Build the model in float64; return it with transformers' loading info."""
    transformers = require("transformers", "hf", f"to compare the probabilities of {folder} before and after")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if class_name is None:
        raise UserError(f"{folder}: model_type {kind!r} in config.json is not a causal language model in transformers")
    architectures = config.get("architectures") or [class_name]
    if architectures != [class_name]:
        raise UserError(
            f"{folder}: the architecture is {some_of(map(str, architectures), 2)}, expected {class_name}; whether its "
            "other heads use the tables cannot be checked"
        )
    state = files.read_all()
    with _quiet():
        try:
            # Without the config's choice of kernels, which could be downloaded code.
            built = CONFIG_MAPPING[str(kind)].from_dict(_without_kernels(config))
            module, info = getattr(transformers, class_name).from_pretrained(
                None,
                config=built,
                state_dict=state,
                dtype=torch.float64,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers has no common base class
            reason = str(error).strip().split("\n", maxsplit=1)[0]
            raise UserError(
                f"{folder}: transformers cannot build the model ({type(error).__name__}: {reason}); copy or download "
                "it again"
            ) from error
    if lacking := sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"]):
        raise UserError(f"{folder}: tensors are missing or have another shape: {some_of(lacking, 3)}")
    return module.eval(), info


def _without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    unwanted = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    return {
        key: _without_kernels(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in unwanted
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and reports of transformers."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _table(folder: Path, accessor: Callable[[], Any]) -> nn.Parameter:
    weight = getattr(accessor(), "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise UserError(f"{folder}: its class in transformers does not expose an embedding table")
    return weight


def _head_name(module: Any) -> str:
    layer = module.get_output_embeddings()
    return next(f"{name}.weight" for name, each in module.named_modules(remove_duplicate=False) if each is layer)


def _positions(folder: Path, config: Mapping[str, Any], module: Any, files: WeightFiles) -> tuple[str | None, str]:
    """Name of the position table; or None and the reason why the mean cannot be moved there."""
    kind = str(config["model_type"])
    name = POSITIONS.get(kind)
    if name is None or name not in dict(module.named_parameters()):
        return None, NO_POSITIONS
    if module.get_parameter(name).shape[1] != module.get_input_embeddings().weight.shape[1]:
        return None, "there is a projection between the table and the positions"  # OPT-350m
    if _stored_name(files, name, module) is None:
        return None, f"no stored tensor is {name}"
    settings = folder / "tokenizer_config.json"
    if kind != "opt" and settings.is_file() and gives_token_types(read_object(settings, folder)):
        return None, (
            "its tokenizer returns token_type_ids (model_input_names in tokenizer_config.json), which are looked up in "
            "the same table and added to the input"
        )
    return name, ""


def _stored_name(files: WeightFiles, parameter: str, module: nn.Module) -> str | None:
    """Name of the stored tensor of a parameter; files may omit or add a prefix of the name."""
    weight = dict(module.named_parameters(remove_duplicate=False))[parameter]
    for name in files.file_of:
        if f".{name}".endswith(f".{parameter}") or f".{parameter}".endswith(f".{name}"):
            stored = files.read(name)
            is_equal = stored.shape == weight.shape and torch.allclose(
                stored.double(), weight.detach(), rtol=0, atol=0, equal_nan=True
            )
            if is_equal:
                return name
    return None


def _rows(files: WeightFiles, tokenizer: Path | None, rows: int) -> int:
    sizes = [files.vocabulary_size, None if tokenizer is None else read_tokenizer(tokenizer).size]
    return next((size for size in sizes if size is not None and size <= rows), rows)


def _context(config: Mapping[str, Any], module: Any) -> int:
    found = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else 2**30


def _says_tied(config: Mapping[str, Any], kind: type) -> bool:
    """Whether config.json says that the model is tied, or if it is silent, the default of its class."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return any(each is True for each in said) if said else getattr(kind(), "tie_word_embeddings", False) is True


def _changed_config(config: dict[str, Any], *, untied: bool, dtype: torch.dtype | None) -> dict[str, Any]:
    changed = dict(config)
    if isinstance(changed.get("text_config"), dict):
        inner = _changed_config(changed["text_config"], untied=untied, dtype=dtype)
        changed["text_config"] = inner
    if untied:
        changed["tie_word_embeddings"] = False
    if dtype is not None:
        # transformers loads everything in this type; the old type would round the tables again.
        name = str(dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if key in changed] or ["dtype"]
        changed |= dict.fromkeys(keys, name)
    return changed
