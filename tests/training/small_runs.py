"""Small corpora and configs for the tests of complete runs."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from coupled_adam.config.run_config import Config
from coupled_adam.data.manifest import MANIFEST_FILE, Manifest, Shard, Split, write_manifest
from coupled_adam.training.checkpoint import save_and_load as checkpoints
from coupled_adam.training.run import Outcome, run_training

VOCABULARY = 61  # of 64 rows: three are padding
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TIMES = {"tokens_per_second", "mfu", "memory_bytes"}


def write_corpus(folder: Path, seed: int = 0, train_tokens: int = 4000) -> Path:
    """A learnable text: token i is mostly followed by one of three others."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    successors = generator.integers(0, VOCABULARY, (VOCABULARY, 3))
    splits = {}
    for name, length in (("train", train_tokens), ("val", 513)):
        tokens = np.zeros(length, np.uint16)
        for i in range(1, length):
            tokens[i] = successors[tokens[i - 1], generator.integers(3)]
        (folder / f"{name}.bin").write_bytes(tokens.tobytes())
        if name == "train":
            np.save(folder / "unigram.npy", np.bincount(tokens, minlength=VOCABULARY))
        splits[name] = Split(tokens=length, shards=[Shard(file=f"{name}.bin", tokens=length)])
    write_manifest(folder / MANIFEST_FILE, Manifest(vocabulary_size=VOCABULARY, dtype="uint16", splits=splits))
    return folder


def small_values(corpus: Path) -> dict[str, dict[str, Any]]:
    """A config in the form of TOML: 12 steps of 8 samples."""
    return {
        "model": {"layers": 2, "heads": 2, "width": 16, "context": 16, "vocabulary_size": 64},
        "data": {"folder": str(corpus)},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": 2},
        "training": {"tokens": 12 * 8 * 16, "batch_size": 8, "device": "cpu"},
        "checkpoints": {"every": 4, "keep": 2},
        "log": {"every": 1, "monitor_every": 3},
    }


def small_config(corpus: Path, **sections: dict[str, Any]) -> Config:
    values = small_values(corpus)
    for section, changes in sections.items():
        values[section] = {**values[section], **changes}
    return Config.model_validate({"name": "small", **values})


def train(config: Config, folder: Path, *, resume: bool = False) -> tuple[Outcome, str]:
    """Run a config in this process; return the outcome and the output."""
    text = io.StringIO()
    outcome = run_training(config, folder, resume=resume, console=Console(file=text, width=200))
    return outcome, text.getvalue()


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without values that depend on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def saved_tensors(run: Path, step: int | None = None) -> dict[str, Tensor]:
    """The contents of a checkpoint of a run, by default the last one."""
    folder = run / "checkpoints"
    path = folder / f"step-{step:09d}" if step is not None else checkpoints.newest_good(folder, on_skip=print)
    assert path is not None
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    generator = torch.get_rng_state()
    checkpoints.load(path, tensors)
    torch.set_rng_state(generator)
    return tensors


def assert_same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{different} differ"


def run_on_two_ranks(worker: Path, corpus: Path, folder: Path) -> Path:
    """Let a worker fork two ranks that communicate through gloo; return the folder with the runs."""
    command = [sys.executable, str(worker), str(corpus), str(folder)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
