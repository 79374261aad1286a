"""Small models, a tokenizer, a corpus and a run for the export tests.

Letters: V vocabulary rows, T context.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from coupled_adam.config.run_config import load_config, to_toml
from coupled_adam.data.corpus import Corpus, open_corpus
from coupled_adam.data.manifest import Manifest, write_manifest
from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables
from coupled_adam.training.checkpoint.training_state import make_optimizer_state, training_tensors

TEXT = (
    "The quick brown fox can't jump; it's 1234 metres to the lazy dogs' kennel, and they've barked 56 times.\n\n"
    "    Größe, naïveté and 日本語 are words too — 🙂.\tThe end of the  text\r\n"
)
END = "<|endoftext|>"
TOKENS, ROWS = 300, 320


def small_config(architecture: str = "gpt2", **changes: int | bool) -> ModelConfig:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 32, "vocabulary_size": ROWS}
    return ModelConfig(architecture, **(sizes | changes))


def trained_model(config: ModelConfig, seed: int = 1) -> LanguageModel:
    """A model without default parameter values: no bias is 0, no norm is 1."""
    model = build_model(config)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def some_tokens(config: ModelConfig, batch: int = 2, highest: int = TOKENS) -> torch.Tensor:
    return torch.randint(highest, (batch, config.context), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_of(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)


def write_tokenizer_json(path: Path, end: str = END) -> Tokenizer:
    """A byte-level BPE of 300 tokens; the first one is `end`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.save(str(path))
    return tokenizer


def write_corpus(folder: Path, tokenizer: str | None = "tokenizer.json", separator: int | None = 0) -> Corpus:
    """A corpus of one shard, with a tokenizer.json if requested."""
    folder.mkdir(parents=True)
    tokens = np.arange(64, dtype=np.uint16)
    tokens.tofile(folder / "train.bin")
    if tokenizer == "tokenizer.json":
        write_tokenizer_json(folder / tokenizer)
    manifest = {
        "tokenizer": tokenizer,
        "vocabulary_size": TOKENS,
        "dtype": "uint16",
        "separator": separator,
        "splits": {"train": {"tokens": 64, "shards": [{"file": "train.bin", "tokens": 64}]}},
    }
    write_manifest(folder / "manifest.json", Manifest.model_validate(manifest))
    return open_corpus(folder)


def write_run(folder: Path, corpus: Path, steps: Sequence[int] = (10,), overrides: Sequence[str] = ()) -> LanguageModel:
    """Write a run with a checkpoint of each step, all with different weights, and return the last model."""
    settings = [
        "name=small",
        "model.layers=2",
        "model.heads=2",
        "model.width=16",
        "model.context=32",
        f"model.vocabulary_size={ROWS}",
        f"data.folder={json.dumps(str(corpus))}",
        "data.source=none",
        "data.tokenizer=bpe:300",
        "training.tokens=100k",
        "training.batch_size=4",
    ]
    config = load_config("tiny", [*settings, *overrides])
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    state = {"data": open_corpus(corpus).fingerprint} if corpus.is_dir() else {}
    writer = CheckpointWriter(folder / "checkpoints", keep=len(steps))
    for step in steps:
        model = trained_model(config.to_model_config(), seed=step)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tables = Tables(model.input_table_name, model.output_table_name, TOKENS)
        make_optimizer_state([optimizer])
        writer.save(step, training_tensors(model, [optimizer]), state, tables=tables)
    writer.wait()
    return model
