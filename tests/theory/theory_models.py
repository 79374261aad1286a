"""Small models and runs for the theory tests. Letters: V rows, H width, B samples, T context."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import small_config, train, write_corpus

from coupled_adam.models.initial import initialise
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

V, H, T = 48, 8, 12


def small_model(*, tied: bool = True, architecture: str = "gpt2") -> LanguageModel:
    """A model of V x H in float32, with tables large enough that its predictions differ."""
    config = ModelConfig(architecture, layers=1, heads=2, width=H, context=T, vocabulary_size=V, tied=tied)
    model = build_model(config)
    initialise(model, 3)
    with torch.no_grad():
        for name in {model.input_table_name, model.output_table_name}:
            model.get_parameter(name).mul_(20)
    return model


def windows(B: int, seed: int = 0) -> Tensor:
    """(B, T + 1) tokens, low ones more often than high ones; the last ones never occur."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(B, T + 1, generator=generator).square() * (V - 4)).long()


def milestone_run(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run of 12 steps of 8 x 16 tokens, with milestones after 6 and 12."""
    corpus = folder / "corpus"
    if not corpus.is_dir():
        write_corpus(corpus)
    sections = {"checkpoints": {"every": None, "milestones": 2, "keep": 1}, **sections}
    train(small_config(corpus, **sections), folder / "run")
    return folder / "run"
