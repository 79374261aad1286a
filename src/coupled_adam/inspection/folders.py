"""Tables from folders: a run or checkpoint, a Hugging Face model (one file or shards), a hub model.

A Hugging Face model is read through `fetch`, which returns the path of a file by name, or None. Folders and the hub
differ only in `fetch`, and of a sharded model only the shards with the tables are fetched.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json
from coupled_adam.inspection.file_formats import SUFFIXES, open_file
from coupled_adam.inspection.hub import fetch_from_hub
from coupled_adam.inspection.stored import Shape, Stored
from coupled_adam.tables_file import TABLES_FILE

Fetch = Callable[[str], Path | None]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER = "tokenizer.json"
MOST_NAMED_RUNS = 3


def open_folder(folder: Path) -> Stored:
    """Open a run or checkpoint, a Hugging Face model, or the only model file in the folder."""
    tables = newest_tables(folder)
    if tables is not None:
        return open_file(tables)

    def fetch(file: str) -> Path | None:
        return folder / file if (folder / file).is_file() else None

    stored = open_model(fetch)
    if stored is not None:
        tokenizer = fetch(TOKENIZER)
        return replace(stored, tokenizer=(lambda: str(tokenizer)) if tokenizer else None)
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if len(files) == 1:
        return open_file(files[0])
    if files:
        raise UserError(f"{folder}: several model files; pass one of them: {', '.join(file.name for file in files)}")
    runs = runs_inside(folder)
    if runs:
        raise UserError(
            f"{folder}: contains runs, not one model; pass runs, such as: coupled-adam inspect "
            + shlex.join(str(run) for run in runs)
        )
    raise UserError(
        f"{folder}: no model in this folder; expected {TABLES_FILE}, checkpoints/step-<number>/{TABLES_FILE}, "
        f"{' or '.join(WEIGHTS)}, or one file that ends in {', '.join(SUFFIXES)}"
    )


def runs_inside(folder: Path) -> list[Path]:
    """One run of each cell of a study, or the runs in a folder of runs; a few of them."""
    of_study = {run.parent: run for run in sorted(folder.glob("runs/*/seed-*"), reverse=True) if newest_tables(run)}
    runs = sorted(of_study.values()) or sorted(run for run in folder.glob("*") if newest_tables(run))
    return runs[:MOST_NAMED_RUNS]


def open_hub_model(name: str) -> Stored:
    """Open a model on the Hugging Face hub, such as "gpt2" or "org/name"."""

    def fetch(file: str) -> Path | None:
        return fetch_from_hub(name, file)

    def fetch_tokenizer() -> str:
        path = fetch(TOKENIZER)
        if path is None:
            raise UserError(f"{name}: no {TOKENIZER} on the hub; pass a tokenizer with --tokenizer")
        return str(path)

    stored = open_model(fetch)
    if stored is None:
        raise UserError(f"{name}: this hub model has neither {' nor '.join(WEIGHTS)}")
    return replace(stored, tokenizer=fetch_tokenizer)


def newest_tables(folder: Path) -> Path | None:
    """The `tables.safetensors` of a checkpoint folder, or of the newest checkpoint of a run."""
    if (folder / TABLES_FILE).is_file():
        return folder / TABLES_FILE
    steps = {}
    for tables in folder.glob(f"checkpoints/step-*/{TABLES_FILE}"):
        number = tables.parent.name.removeprefix("step-")
        if number.isdecimal():
            steps[int(number)] = tables
    return steps[max(steps)] if steps else None


def open_model(fetch: Fetch) -> Stored | None:
    """Open a Hugging Face model from its files; None without weights."""
    for weights in WEIGHTS:
        if index := fetch(f"{weights}.index.json"):
            stored = open_shards(index, fetch)
        elif whole := fetch(weights):
            stored = open_file(whole)
        else:
            continue
        config = fetch("config.json")
        return replace(stored, tied=_tied_in_config(read_json_object(config))) if config else stored
    return None


def open_shards(index: Path, fetch: Fetch) -> Stored:
    """Open a sharded model; a shard is opened when one of its tensors is used."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: weight_map is missing, so it is not the index of a sharded model")

    @cache
    def open_shard(file: str) -> Stored:
        # An untrusted index must not point outside its folder.
        path = fetch(file) if re.fullmatch(r"[\w.-]+", file) else None
        if path is None:
            raise UserError(f"{index}: the shard {file!r} is missing; download the model again")
        return open_file(path)

    def shape(name: str) -> Shape:
        return shard_of(name).shape(name)

    def shard_of(name: str) -> Stored:
        shard = open_shard(str(weight_map[name]))
        if name not in shard.names:
            raise UserError(f"{index}: {name!r} should be in {weight_map[name]!r}, but is missing there")
        return shard

    return Stored(names=list(weight_map), shape=shape, read=lambda name: shard_of(name).read(name), in_shards=True)


def _tied_in_config(config: dict[str, Any]) -> bool | None:
    text_config = config.get("text_config")  # in multimodal models
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a model folder."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{error}; copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
