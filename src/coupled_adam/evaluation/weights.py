"""The weights of a run's checkpoint, in our own model or by name; the optimizer's state is not read."""

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
    """The model of a run, as one of its checkpoints has it.

    Args:
        run: the folder that training wrote.
        checkpoint: the step of the checkpoint; None: the newest that is whole. A warning names those that are not.
        device: where to.

    Returns:
        The model, in float32 and in evaluation mode; the config of the run; and its corpus, None where the folder of
        the corpus is gone (a relative one is looked for from the current directory).
    """
    config = run_config(run)
    path = find_checkpoint(run, checkpoint, on_skip=warnings.warn)
    corpus = run_corpus(config, read_record(path))
    weights = load_weights(config.to_model_config(), path, device)
    return model_with(config.to_model_config(), weights), config, corpus


def run_config(run: Path) -> Config:
    """The config of a run."""
    file = RunFolder(run).config
    if not file.is_file():
        # The folder of a study, and a checkpoint, are what one gives by mistake.
        around = [path.parent for path in (run, run.parent) if path.name == RunFolder(run).checkpoints.name]
        near = [path for path in (*around, *sorted(run.glob("runs/*/seed-*"))) if RunFolder(path).config.is_file()]
        remedy = f"that of a run, such as {near[0]}" if near else "a folder that `coupled-adam train` wrote"
        raise UserError(f"{run}: not a run, it has no {file.name}; give {remedy}")
    return load_config(str(file))


def run_corpus(config: Config, checkpoint: Record) -> Corpus | None:
    """The corpus of a run; None where its folder is gone. One that has changed since is a ValueError."""
    folder = user_path(config.data.folder)
    if not folder.is_dir():
        return None
    corpus = open_known_corpus(folder)
    require_trained_on(corpus, checkpoint)
    return corpus


def require_trained_on(corpus: Corpus, checkpoint: Record) -> None:
    """Refuse a corpus that has changed since a checkpoint was written."""
    if checkpoint.state.get("data", corpus.fingerprint) != corpus.fingerprint:
        raise UserError(
            f"{corpus.folder} holds other tokens now than the run was trained on; prepare them again as they were"
        )


def find_checkpoint(run: Path, step: int | None, on_skip: Callable[[str], None]) -> Path:
    """The folder of a run's checkpoint, whole.

    Args:
        run: the folder that training wrote.
        step: None: the newest whole one.
        on_skip: called with a sentence about each damaged one that is passed over.
    """
    folder = RunFolder(run).checkpoints
    if step is None:
        newest = newest_good(folder, on_skip=on_skip, last_step=run_config(run).total_steps)
        if newest is None:
            raise UserError(f"{run}: has no whole checkpoint; train it with `coupled-adam train`")
        return newest
    path = folder_of_step(folder, step)
    if not path.is_dir():
        steps = ", ".join(str(step_of(found)) for found in checkpoints_in(folder))
        raise UserError(f"{run}: has no checkpoint of step {step}; it has {steps or 'none'}")
    problem = damage(path)
    if problem is not None:
        raise UserError(f"checkpoint {path} is damaged: {problem}; give another step, or none for the newest whole one")
    return path


def load_weights(config: ModelConfig, checkpoint: Path, device: str | torch.device = "cpu") -> dict[str, nn.Parameter]:
    """The parameters of a model by name, a tied table once, as a checkpoint has them."""
    with torch.device("meta"):
        expected = dict(build_model(config).named_parameters())
    weights = {
        name: nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
        for name, parameter in expected.items()
    }
    load(checkpoint, {f"model.{name}": weight.detach() for name, weight in weights.items()})
    return weights


def model_with(config: ModelConfig, weights: dict[str, nn.Parameter]) -> LanguageModel:
    """The model that has these parameters, not copies of them, in evaluation mode."""
    with torch.device("meta"):
        model = build_model(config)
    tied = {"lm_head.weight": weights[model.input_table_name]} if config.tied else {}
    model.load_state_dict(weights | tied, assign=True)
    return model.eval()
