"""Hash of the settings that determine what a run computes, and the list of those that differ."""

import hashlib
import json
from pathlib import Path
from typing import Any

from coupled_adam.config.run_config import MATTERS_FOR_RESUME, Config, differences, values_by_key, with_rows
from coupled_adam.config.schema import all_keys

_KEYS_OF_0_1_0 = {
    "model": ("architecture", "layers", "heads", "width", "context", "vocabulary_size", "tied", "bias"),
    "data": ("tokenizer", "order"),
    "optimizer": (
        *("embeddings", "lr", "couple", "scale_exponent", "sgd_factor", "sgd_momentum", "centre"),
        *("beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "z_loss"),
    ),
    "schedule": ("kind", "warmup", "final_fraction", "decay"),
    "training": ("tokens", "batch_size", "precision"),
}
HASHED_SINCE_0_1_0 = {"seed", *(f"{section}.{key}" for section, keys in _KEYS_OF_0_1_0.items() for key in keys)}
"""Keys that `config_hash` covers since version 0.1.0."""


def config_hash(config: Config) -> str:
    """Hash the settings that determine what a run computes, as twelve hex digits.

    Names, logging, checkpoints and location (device, threads, data folder) do not count: the same run on another
    machine has the same hash.

    Example:
        >>> from coupled_adam.config.run_config import load_config
        >>> a, b, c = (load_config("tiny", [change]) for change in ("seed=1", "training.threads=2", "seed=2"))
        >>> config_hash(a) == config_hash(b), config_hash(a) == config_hash(c)
        (True, False)
    """
    given = values_by_key(with_rows(config))
    values = {key: value for key, value in given.items() if key in MATTERS_FOR_RESUME and _is_hashed(key, value)}
    values["data"] = _text_name(config)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _is_hashed(key: str, value: Any) -> bool:
    """Whether a key counts. Keys added after 0.1.0 count only if set, so runs of 0.1.0 keep their hashes."""
    return key in HASHED_SINCE_0_1_0 or value != all_keys(Config)[key].default


def settings_that_differ(a: Config, b: Config) -> list[str]:
    """List the settings that give two configs different hashes.

    Example:
        >>> from coupled_adam.config.run_config import load_config
        >>> settings_that_differ(load_config("tiny"), load_config("tiny", ["seed=2", "training.threads=2"]))
        ['seed']
    """
    counting = set(MATTERS_FOR_RESUME)
    if _text_name(a) != _text_name(b):
        counting.add("data.source" if a.data.source != b.data.source else "data.folder")
    return [key for key in differences(with_rows(a), with_rows(b)) if key in counting]


def _text_name(config: Config) -> str:
    """Name of a run's text: its source, or the name of its folder if there is no source."""
    return config.data.source or Path(config.data.folder).name
