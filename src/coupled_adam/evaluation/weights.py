"""Load the weights of a run's checkpoint, without the optimizer state."""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.data.corpus import Corpus, open_known_corpus
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.training.checkpoint.checkpoint_folder import (
    Record,
    checkpoints_in,
    folder_of_step,
    read_record,
    step_of,
)
from coupled_adam.training.checkpoint.save_and_load import damage, load, newest_good
from coupled_adam.training.run_folder import RunFolder


def load_run(
    run: Path, checkpoint: int | None = None, device: str | torch.device = "cpu"
) -> tuple[LanguageModel, Config, Corpus | None]:
    """Load the model of a run from one of its checkpoints.

    Args:
        run: the run folder.
        checkpoint: step of the checkpoint; None for the newest complete one, with a warning for each damaged one.
        device: to load to.

    Returns:
        The model, in float32 and evaluation mode; the config of the run; and its corpus, None if its folder is missing
        (a relative folder is relative to the current directory).
    """
    config = run_config(run)
    path = find_checkpoint(run, checkpoint, on_skip=warnings.warn)
    corpus = run_corpus(config, read_record(path))
    weights = load_weights(config.to_model_config(), path, device)
    return model_with(config.to_model_config(), weights), config, corpus


def run_config(run: Path) -> Config:
    """Read the config of a run."""
    file = RunFolder(run).config
    if not file.is_file():
        # A study folder and a checkpoint are common mistakes.
        around = [path.parent for path in (run, run.parent) if path.name == RunFolder(run).checkpoints.name]
        near = [path for path in (*around, *sorted(run.glob("runs/*/seed-*"))) if RunFolder(path).config.is_file()]
        remedy = f"a run folder, such as {near[0]}" if near else "a folder written by `coupled-adam train`"
        raise UserError(f"{run}: not a run folder, {file.name} is missing; pass {remedy}")
    return load_config(str(file))


def run_corpus(config: Config, checkpoint: Record) -> Corpus | None:
    """Open the corpus of a run; None if its folder is missing, ValueError if it has changed."""
    folder = user_path(config.data.folder)
    if not folder.is_dir():
        return None
    corpus = open_known_corpus(folder)
    require_trained_on(corpus, checkpoint)
    return corpus


def require_trained_on(corpus: Corpus, checkpoint: Record) -> None:
    """Raise if a corpus has changed since a checkpoint was written."""
    if checkpoint.state.get("data", corpus.fingerprint) != corpus.fingerprint:
        raise UserError(
            f"{corpus.folder} has other tokens than the run was trained on; prepare the original data again"
        )


def find_checkpoint(run: Path, step: int | None, on_skip: Callable[[str], None]) -> Path:
    """Find the folder of a complete checkpoint.

    Args:
        run: the run folder.
        step: None for the newest complete one.
        on_skip: called with a message about each damaged checkpoint that is skipped.
    """
    folder = RunFolder(run).checkpoints
    if step is None:
        newest = newest_good(folder, on_skip=on_skip, last_step=run_config(run).total_steps)
        if newest is None:
            raise UserError(f"{run}: no complete checkpoint; train it with `coupled-adam train`")
        return newest
    path = folder_of_step(folder, step)
    if not path.is_dir():
        steps = ", ".join(str(step_of(found)) for found in checkpoints_in(folder))
        raise UserError(f"{run}: no checkpoint of step {step}; available steps: {steps or 'none'}")
    problem = damage(path)
    if problem is not None:
        raise UserError(f"checkpoint {path} is damaged: {problem}; pass another step, or none for the newest")
    return path


def load_weights(config: ModelConfig, checkpoint: Path, device: str | torch.device = "cpu") -> dict[str, nn.Parameter]:
    """Load the parameters of a model by name, a tied table once, from a checkpoint."""
    with torch.device("meta"):
        expected = dict(build_model(config).named_parameters())
    weights = {
        name: nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
        for name, parameter in expected.items()
    }
    load(checkpoint, {f"model.{name}": weight.detach() for name, weight in weights.items()})
    return weights


def model_with(config: ModelConfig, weights: dict[str, nn.Parameter]) -> LanguageModel:
    """Build the model with these parameters, without copying them, in evaluation mode."""
    with torch.device("meta"):
        model = build_model(config)
    tied = {"lm_head.weight": weights[model.input_table_name]} if config.tied else {}
    model.load_state_dict(weights | tied, assign=True)
    return model.eval()
