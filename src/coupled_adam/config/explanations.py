"""Turn pydantic's validation errors into messages about the user's file: key, value, expected value."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from coupled_adam.config.field_types import expected
from coupled_adam.config.schema import all_keys, entries_of, keys_of, section_at
from coupled_adam.config.toml_writing import toml_value

CLOSE = 0.7
"""Minimum similarity at which a name counts as a typo of another; 1 means equal."""
# Names of settings in other programs.
SYNONYMS = {
    name: key
    for key, names in {
        "seed": "random_seed rng_seed",
        "model.architecture": "arch type model_type",
        "model.layers": "n_layer n_layers num_layers num_hidden_layers depth blocks",
        "model.heads": "n_head n_heads num_heads num_attention_heads attention_heads",
        "model.width": "n_embd d_model dim hidden hidden_size hidden_dim embed_dim embedding_size model_dim size",
        "model.context": "block_size seq_len seqlen sequence_length context_length max_length max_seq_len n_ctx "
        "n_positions window",
        "model.vocabulary_size": "vocab vocab_size n_vocab padded_vocab_size vocabulary rows",
        "model.tied": "tie tie_embeddings tie_word_embeddings tie_weights weight_tying tied_embeddings untied",
        "data.folder": "path dir data_dir data_path dataset_dir",
        "data.source": "dataset dataset_name text corpus",
        "data.order": "shuffle",
        "optimizer.embeddings": "optim optimizer_name coupled adamw adam sgd name kind",
        "optimizer.matrices": "muon hidden hidden_matrices",
        "optimizer.tables.lr_factor": "embedding_lr embedding_lr_factor table_lr_factor",
        "optimizer.muon.lr_factor": "muon_lr muon_lr_factor",
        "optimizer.muon.momentum": "muon_momentum",
        "optimizer.muon.weight_decay": "muon_weight_decay muon_wd",
        "optimizer.lr": "learning_rate max_lr peak_lr base_lr rate",
        "optimizer.beta1": "betas adam_beta1 b1",
        "optimizer.beta2": "adam_beta2 b2",
        "optimizer.eps": "epsilon adam_epsilon adam_eps",
        "optimizer.weight_decay": "wd l2",
        "optimizer.max_grad_norm": "clip grad_clip clip_grad clip_grad_norm clip_norm gradient_clip gradient_clipping "
        "gradient_clip_val max_norm clipping",
        "optimizer.mean_free": "meanfree mean_free_updates zero_mean",
        "optimizer.anneal": "annealing anneal_steps row_exponent_anneal",
        "optimizer.row_exponent_start": "row_exponent_initial initial_row_exponent start_row_exponent",
        "optimizer.state_dtype": "optimizer_dtype moment_dtype exp_avg_dtype",
        "optimizer.centre": "center centering centring",
        "schedule.kind": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
        "schedule.warmup": "warmup_steps warmup_iters warmup_ratio warm_up",
        "schedule.final_fraction": "min_lr final_lr min_lr_ratio",
        "training.tokens": "steps max_steps total_steps num_steps iterations iters max_iters max_tokens total_tokens "
        "epochs num_train_epochs",
        "training.batch_size": "batch bs train_batch_size global_batch_size",
        "training.micro_batch_size": "micro_batch per_device_train_batch_size device_batch_size gradient_accumulation "
        "gradient_accumulation_steps grad_accum",
        "model.residual_dtype": "residual residual_stream residual_precision",
        "training.precision": "dtype amp mixed_precision bf16 fp16 float32",
        "training.parallel": "fsdp ddp strategy gpus world_size",
        "checkpoints.every": "save_every save_steps save_interval checkpoint_every checkpoint_interval",
        "checkpoints.keep": "save_total_limit keep_last",
        "log.every": "log_every log_interval logging_steps",
        "log.val_every": "eval_every eval_interval eval_steps val_interval val_check_interval",
        "log.val_batches": "eval_batches eval_iters",
        "log.wandb": "wandb_project project",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class _Place:
    """Location of a mistake in a config."""

    key: str
    """Dotted key; empty for a conflict between keys."""
    field: FieldInfo | None
    model: type[BaseModel]
    """The class that has the key."""
    table: str = ""
    """Prefix that names the table of an array, such as "[[models]] number 2: "."""


def explain(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield a pair (dotted key, message) for each mistake; the key is empty for a conflict between keys.

    Args:
        error: raised by `model.model_validate`.
        model: the class of the whole config.
    """
    seen = set()
    for details in error.errors(include_url=False):
        place = _locate(details["loc"], model)
        key = place.table + place.key
        if key and key in seen:
            continue  # a union reports each of its members
        seen.add(key)
        for line in _lines(place.key, place.field, details, place.model):
            yield key, place.table + line


def _locate(location: tuple[int | str, ...], model: type[BaseModel]) -> _Place:
    """Locate a mistake, without the parts that pydantic adds for union members."""
    entry = entries_of(model.model_fields.get(str(location[0]))) if len(location) > 2 else None
    if entry is not None:
        name, number, *inner = location
        return replace(_locate(tuple(inner), entry), table=f"[[{name}]] number {int(number) + 1}: ")
    path: list[str] = []
    field: FieldInfo | None = None
    fields: dict[str, FieldInfo] | None = model.model_fields
    for part in map(str, location):
        if fields is None:
            break
        path.append(part)
        field = fields.get(part)
        fields = keys_of(field)
    return _Place(".".join(path), field, model)


def _lines(key: str, field: FieldInfo | None, details: Any, model: type[BaseModel]) -> list[str]:
    if not key:
        return str(details["ctx"]["error"]).splitlines()
    if field is None:
        return [f"{key}: {unknown_key(key, model)}"]
    keys = keys_of(field)
    if details["type"] == "missing" and keys:
        required = ", ".join(name for name, inner in keys.items() if inner.is_required())
        return [f"section [{key}] is missing: expected at least its keys {required}"]
    if details["type"] == "missing":
        return [f"{key} is missing: expected {expected(field)}"]
    value = toml_value(details["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    if keys:
        return [f"{key} = {value}: expected a section [{key}] with the keys {', '.join(keys)}"]
    entry = entries_of(field)
    if entry is not None:
        return [f"{key} = {value}: expected tables [[{key}]] with the keys {', '.join(entry.model_fields)}"]
    return [f"{key} = {value}: expected {expected(field)}"]


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """Suggest the closest known key, or list the known keys."""
    near = _closest_key(key, model)
    if near is not None:
        return f"unknown key; did you mean {near}?"
    parent = key.rpartition(".")[0]
    while section_at(model, parent) is None:
        parent = parent.rpartition(".")[0]
    section = section_at(model, parent) or model
    there = [
        f"[{parent}.{name}]".replace("[.", "[") if keys_of(field) else name
        for name, field in section.model_fields.items()
    ]
    return f"unknown key; expected one of: {', '.join(there)}"


def _closest_key(key: str, model: type[BaseModel]) -> str | None:
    known = all_keys(model)
    for parent in known:  # such as model.layers.x
        if key.startswith(f"{parent}."):
            return parent
    section, _, name = key.rpartition(".")
    by_name = {each.rpartition(".")[2]: each for each in reversed(known)}
    by_name |= {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    # Compare names without their section: a common "optimizer." would make any two keys similar.
    own = [each for each in by_name if by_name[each].rpartition(".")[0] == section]
    longer = sorted((each for each in own if section and each.startswith(f"{name}_")), key=len)
    if name in by_name:  # in the wrong section, or such as optimizer.tables.lr for optimizer.tables.lr_factor
        return by_name[longer[0] if longer else name]
    meant = SYNONYMS.get(name.lower().replace("-", "_"))
    if meant in known:
        beside = f"{section}.{meant.rpartition('.')[2]}"  # such as optimizer.tables.beta1 for optimizer.tables.betas
        return beside if beside in known else meant
    own += [each for each in model.model_fields if keys_of(model.model_fields[each])] if not section else []
    for names in (own, list(by_name)):
        for found in difflib.get_close_matches(name, names, n=1, cutoff=CLOSE):
            return by_name.get(found, found)
    return by_name[longer[0]] if longer else None
