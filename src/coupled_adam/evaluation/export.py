"""Export a trained model as a folder that `transformers`, lm-eval and other programs can load.

    config.json  generation_config.json     what the model is
    model.safetensors                       its weights; above 5 GB in shards, with model.safetensors.index.json
    tokenizer.json  tokenizer_config.json  special_tokens_map.json
    README.md                               the model card

Needs only torch and safetensors. Writes to a temporary folder, which is renamed when complete.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from coupled_adam.base.errors import UserError, UserOSError
from coupled_adam.base.text import size_text
from coupled_adam.evaluation.hugging_face import hugging_face_config, hugging_face_name, hugging_face_weights
from coupled_adam.evaluation.model_card import Training, model_card
from coupled_adam.evaluation.whole_folder import replacing_folder, require_free
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9
WEIGHTS = "model.safetensors"


def export_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    end_of_text: int | None = None,
    vocabulary_size: int | None = None,
    dtype: str = "float32",
    training: Training | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as a Hugging Face folder, atomically.

    Args:
        config: the model.
        weights: its parameters, as in `model.named_parameters()`.
        tokenizer: its tokenizer; None to write no tokenizer files.
        folder: to write; new, empty, or with `overwrite` an existing exported model.
        end_of_text: id of the token between documents; None for the tokenizer's.
        vocabulary_size: later rows are padding; a tokenizer's size takes precedence. None if unknown.
        dtype: of the stored weights, "float32" or "bfloat16".
        training: for the model card.
        overwrite: replace an existing model.

    Example:
        >>> import tempfile
        >>> config = ModelConfig("gpt2", layers=1, heads=2, width=8, context=16, vocabulary_size=32)
        >>> folder = Path(tempfile.mkdtemp()) / "model"
        >>> export_model(config, dict(build_model(config).named_parameters()), None, folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'config.json', 'generation_config.json', 'model.safetensors']
    """
    if dtype not in DTYPES:
        raise UserError(f"Invalid dtype: {dtype!r}; expected {' or '.join(DTYPES)}")
    tokens = None if tokenizer is None else tokenizer.size
    if tokenizer is not None and end_of_text is None:
        end_of_text = tokenizer.separator
    _check_tokens(config, tokens, end_of_text)
    if vocabulary_size is not None and not 0 < vocabulary_size <= config.vocabulary_size:
        raise UserError(
            f"Invalid vocabulary_size: {vocabulary_size}; expected 1 to the rows of the model's table, "
            f"{config.vocabulary_size}"
        )
    require_free(folder, overwrite=overwrite)
    tensors = hugging_face_weights(config, weights)
    with replacing_folder(folder) as temporary:
        _require_space(temporary, tensors, DTYPES[dtype])
        write_json(temporary / "config.json", hugging_face_config(config, dtype, end_of_text))
        # Only pads generated batches; transformers would choose the same token, with a warning.
        special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
        write_json(temporary / "generation_config.json", special)
        card = model_card(config, training, tokens)
        (temporary / "README.md").write_text(card, encoding="utf-8", newline="\n")
        if tokenizer is not None:
            write_tokenizer(temporary, tokenizer, config.context)
        _write_weights(temporary, tensors, DTYPES[dtype], _table_header(config, tokens or vocabulary_size))


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Args:
        folder: to write to.
        tokenizer: to write.
        context: T, the longest input of the model.
    """
    named = {
        "bos_token": tokenizer.separator_token,
        "eos_token": tokenizer.separator_token,
        "unk_token": tokenizer.unknown_token,
        # Pads texts of a batch to the same length; the attention mask hides it.
        "pad_token": tokenizer.separator_token,
    }
    special = {name: token for name, token in named.items() if token is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": context,
        "padding_side": "left",  # so that generation continues right after each text of a batch
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_bytes(tokenizer.json_file)
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as `transformers` does: keys sorted, two spaces."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


def _check_tokens(config: ModelConfig, tokens: int | None, end_of_text: int | None) -> None:
    rows = config.vocabulary_size
    if tokens is not None and tokens > rows:
        raise UserError(
            f"the tokenizer has {tokens} tokens, but the model's table has {rows} rows: it belongs to another model; "
            "pass the tokenizer that this model was trained with"
        )
    if end_of_text is not None and not 0 <= end_of_text < rows:
        raise UserError(f"Invalid end_of_text: {end_of_text}; expected a row of the model's table, 0 to {rows - 1}")


def _table_header(config: ModelConfig, vocabulary_size: int | None) -> dict[str, str]:
    """The same header as in `tables.safetensors`, so that `inspect` skips the padding rows here too."""
    if vocabulary_size is None:
        return {}
    with torch.device("meta"):
        model = build_model(config)
    return {
        "input": hugging_face_name(config, model.input_table_name),
        "output": hugging_face_name(config, model.output_table_name),
        "tied": "true" if config.tied else "false",
        "vocabulary_size": str(vocabulary_size),
    }


def _require_space(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise before writing if the disk is too full."""
    needed, free = _size(tensors, dtype), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder.parent}: the model needs {size_text(needed)}, but only {size_text(free)} are free "
            f"({size_text(needed - free)} too few); free disk space, or use a folder on another disk"
        )


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, header: dict[str, str]) -> None:
    shards = _shards(tensors, dtype)
    if len(shards) == 1:
        _write_shard(folder / WEIGHTS, shards[0], dtype, header)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        # No header, because the tables it names may be in another shard.
        _write_shard(folder / file, shard, dtype, {})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": _size(tensors, dtype)}, "weight_map": weight_map}
    write_json(folder / f"{WEIGHTS}.index.json", index)


def _shards(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Split the tensors, in order, into files of at most SHARD_BYTES."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _size(shards[-1], dtype) + _size({name: tensor}, dtype) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _size(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Stored size of the tensors in bytes."""
    return sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize


def _write_shard(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, header: dict[str, str]) -> None:
    # Transpose and convert here, to copy one shard at a time and never the whole model.
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    try:
        save_file(stored, path, metadata={"format": "pt"} | header)
    except SafetensorError as error:  # for example a full disk
        raise UserOSError(f"{path}: cannot be written ({error}); free disk space or use another folder") from error
    # safetensors makes files that only their owner can read; use the mode of the other files.
    shutil.copymode(path.with_name("config.json"), path)
