"""Open a run for recentring, and write the recentred run.

OUT is a run folder with the newest complete checkpoint and the log, for `eval`, `inspect`, `export` and `theory`.
Unless a table is added, the optimizer state is kept and training can be resumed, because the gradients do not change.

Legend: V vocabulary rows, H hidden size.
"""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import Config, to_toml
from coupled_adam.data.corpus import is_corpus, open_without_shards
from coupled_adam.evaluation.run_tokenizer import run_tokenizer
from coupled_adam.evaluation.weights import find_checkpoint, load_weights, model_with, run_config
from coupled_adam.inspection.recentring.finished_model import NO_POSITIONS, FinishedModel
from coupled_adam.inspection.safetensors_files import open_safetensors
from coupled_adam.tables_file import TABLES_FILE
from coupled_adam.tokenizer import Tokenizer
from coupled_adam.training.checkpoint.checkpoint_folder import Record, read_record
from coupled_adam.training.checkpoint.dcp_files import read_metadata, read_tensors
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables
from coupled_adam.training.logbook import METRICS_FILE
from coupled_adam.training.run_folder import RunFolder

HEAD = "lm_head.weight"
OPTIMIZER = "optimizer."


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return RunFolder(folder).config.is_file()


def open_run(folder: Path) -> FinishedModel:
    """Open a run at its newest complete checkpoint."""
    config = run_config(folder)
    checkpoint = find_checkpoint(folder, None, on_skip=warnings.warn)
    record = read_record(checkpoint)
    shape = config.to_model_config()
    module = model_with(shape, load_weights(shape, checkpoint)).double()
    # `double` keeps a tied table tied, with a new tensor.
    has_positions = shape.architecture == "gpt2"

    def write(temporary: Path, tensors: Mapping[str, Tensor], *, untied: bool, dtype: torch.dtype | None) -> None:
        if dtype not in (None, torch.float32):
            raise UserError(f"a run is stored in float32, not {dtype}; remove --dtype, or export the run first")
        _write_run(folder, temporary, config, checkpoint, record, tensors, untied=untied)

    def tokenizer() -> Tokenizer:
        place = user_path(config.data.folder)
        return run_tokenizer(config, open_without_shards(place) if is_corpus(place) else None)

    return FinishedModel(
        path=folder,
        module=module,
        logits=module,
        table_names=[module.output_table_name],
        new_head_name=HEAD,
        positions=module.get_parameter("wpe.weight") if has_positions else None,
        positions_name="wpe.weight" if has_positions else None,
        no_positions="" if has_positions else NO_POSITIONS,
        rows=_vocabulary_size(checkpoint) or shape.vocabulary_size,
        context=shape.context,
        dtypes=dict.fromkeys((module.output_table_name, HEAD, "wpe.weight"), torch.float32),
        bytes=sum(parameter.numel() for parameter in module.parameters()) * torch.float32.itemsize,
        write=write,
        reopen=open_run,
        tokenizer=tokenizer,
    )


def _vocabulary_size(checkpoint: Path) -> int | None:
    tables = checkpoint / TABLES_FILE
    return open_safetensors(tables).vocabulary_size if tables.is_file() else None


def _write_run(
    folder: Path,
    target: Path,
    config: Config,
    checkpoint: Path,
    record: Record,
    tensors: Mapping[str, Tensor],
    *,
    untied: bool,
) -> None:
    source, new = RunFolder(folder), RunFolder(target)
    for path in (source.config, source.state, folder / METRICS_FILE):
        if path.is_file():
            shutil.copy2(path, target / path.name)
    if untied:
        changed = config.model_copy(update={"model": config.model.model_copy(update={"tied": False})})
        new.config.write_text(to_toml(changed), encoding="utf-8", newline="\n")
    stored = _stored_tensors(checkpoint, record)
    if untied:  # the new head has no optimizer state
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(OPTIMIZER)}
    for name, tensor in tensors.items():
        stored[f"model.{name}"] = tensor.to(torch.float32)
    known = open_safetensors(checkpoint / TABLES_FILE) if (checkpoint / TABLES_FILE).is_file() else None
    tables = None
    if known is not None and known.input and known.output and known.vocabulary_size:
        tables = Tables(known.input, HEAD if untied else known.output, known.vocabulary_size)
    writer = CheckpointWriter(new.checkpoints, keep=1)
    state = {key: value for key, value in record.state.items() if key != "step"}
    writer.save(record.step, stored, state, tables=tables, milestone=record.milestone)
    writer.wait()


def _stored_tensors(checkpoint: Path, record: Record) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint by name."""
    metadata = read_metadata(checkpoint, record.files)
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    read_tensors(checkpoint, metadata, tensors, None)
    return tensors
