"""Run a training from a config: build all parts on this rank, train, and write the results to the run folder."""

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from coupled_adam.base.cpu import limit_instructions
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.base.text import counted, setting
from coupled_adam.config.cross_checks import residual_without_bf16
from coupled_adam.config.optimizer_names import member_parts
from coupled_adam.config.run_config import Config, load_config, with_rows
from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import Corpus
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import flops_per_token
from coupled_adam.training import devices
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load, newest_good
from coupled_adam.training.checkpoint.training_state import make_optimizer_state, training_tensors
from coupled_adam.training.display import TrainingDisplay
from coupled_adam.training.interruption import watching_signals
from coupled_adam.training.logbook import Logbook, open_logbook
from coupled_adam.training.optimizers import EmbeddingOptimizers, build_optimizers
from coupled_adam.training.parallel import Ranks, build, ranks_of_run
from coupled_adam.training.rank_batches import RankBatches
from coupled_adam.training.run_folder import RunFolder, environment
from coupled_adam.training.run_tokens import Say, is_prepared, note_on_unused_rows, prepare_tokens, require_rows
from coupled_adam.training.throughput import Throughput
from coupled_adam.training.train_step import TrainStep
from coupled_adam.training.trainer import Saving, Trainer, TrainingStopped
from coupled_adam.training.validation import Measures, build_measures


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    folder: Path
    step: int
    total_steps: int
    signal: str | None
    """The signal that stopped the run early, if any."""
    seconds: float
    values: dict[str, float | None]
    """Last logged value of every metric, by the keys of `coupled_adam.metrics`."""
    start_step: int = 0
    """The step from which the run was resumed."""

    @property
    def is_finished(self) -> bool:
        """Whether all steps were taken."""
        return self.step == self.total_steps


@dataclass(frozen=True)
class RunParts:
    """Batches, model, optimizers and measures of a run."""

    batches: RankBatches
    module: nn.Module
    """The module to call, possibly wrapped in DDP."""
    model: LanguageModel
    optimizers: EmbeddingOptimizers
    precision: Callable[[], AbstractContextManager[Any]]
    """Autocast, or nothing."""
    measures: Measures
    uses_graphs: bool
    uses_bf16: bool


def run_training(config: Config, folder: Path, *, resume: bool = False, console: Console | None = None) -> Outcome:
    """Train from the start or from the newest intact checkpoint, until the end or until a signal stops the run.

    Args:
        config: the config of the run.
        folder: the run folder.
        resume: continue the run in the folder. Without it, a folder that contains a run is an error.
        console: output for progress; standard output by default.

    Raises:
        ValueError, OSError, ImportError: config, folder or data are invalid; raised on every rank.
        TrainingStopped: the loss is no longer finite.
    """
    started = time.monotonic()
    console = console or Console(highlight=False)
    device = devices.pick_device(config.training.device)
    devices.prepare_device(device, deterministic=config.training.deterministic, threads=config.training.threads)
    with ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_run(config.training.parallel, device))
        say = speaker(console, ranks)
        run = RunFolder(folder)
        # Both raise for settings that cannot work here, before anything is written.
        config.micro_batch_size(ranks.size)
        uses_bf16(config, device)
        ranks.first_does(lambda: run.check(config, resume=resume))
        ranks.first_does(lambda: stack.enter_context(run.locked()))
        corpus = _prepare_tokens(config, ranks, say)
        config = _with_rows(config, run, resume=resume)
        require_rows(config, corpus)
        # Not earlier: Ctrl-C must stop the data preparation immediately.
        interruption = stack.enter_context(watching_signals())
        parts = _build_parts(config, corpus, ranks)
        say(_summary(config, corpus, ranks, parts))
        if ranks.is_first and (note := note_on_unused_rows(config, corpus)):
            say(f"Note: {note}")
        writer = CheckpointWriter(run.checkpoints, config.checkpoints.keep)
        state = {"data": corpus.fingerprint, "precision": "bf16" if parts.uses_bf16 else "float32"}
        start_step = _restore(parts, run, config.total_steps, state, say) if resume else None
        if start_step == config.total_steps:
            say(f"Nothing left to do: {folder} finished at step {start_step}.")
        # Trackers may fail (missing package, no login), so the config is written after them.
        logbook = stack.enter_context(
            ranks.first_does(lambda: _open_logbook(config, run, start_step, say)) or Logbook()
        )
        ranks.first_does(lambda: run.begin(config))
        display = stack.enter_context(
            TrainingDisplay(console, config.total_steps, start_step or 0, shown=ranks.is_first)
        )
        saving = Saving(writer, parts.model, parts.optimizers, _tables(parts.model, corpus), state)
        trainer = _trainer(config, ranks, parts, saving, logbook, display, start_step or 0)
        if config.log.val_every and not parts.measures.can_validate:
            say(f"{corpus.folder} has no validation text, or too little; the validation loss is not measured.")
        where = environment(devices.device_name(ranks.device), ranks.size, ranks.mode)
        before = run.seconds_so_far() if start_step else 0.0
        # A finished run keeps the record of its training: its time, its device and its versions.
        was_finished = start_step == config.total_steps and ranks.all_get(run.is_finished())
        if not was_finished:
            ranks.first_does(lambda: run.write_state(status="running", diverged=False, **where))
        status, problem, diverged = "failed", None, False
        try:
            trainer.run(interruption)
            status = "finished" if trainer.step == config.total_steps else "stopped"
        except Exception as error:
            problem, diverged = str(error), isinstance(error, TrainingStopped)
            raise
        finally:
            seconds = before + (0.0 if was_finished else time.monotonic() - started)
            end = {"status": status, "step": trainer.step, "total_steps": config.total_steps, "seconds": seconds}
            if not was_finished:
                _write_end(run, ranks, say, **end, problem=problem, diverged=diverged)
        signal_name = interruption.signal_name or (None if status == "finished" else "A signal on another rank")
        return Outcome(
            folder, trainer.step, config.total_steps, signal_name, seconds, dict(trainer.latest), start_step or 0
        )


def _write_end(run: RunFolder, ranks: Ranks, say: Say, **state: Any) -> None:
    if ranks.is_first:
        try:
            run.write_state(**state)
        except OSError as error:  # must not hide why the run ended
            say(f"{run.state} could not be written: {error}")


def speaker(console: Console, ranks: Ranks) -> Say:
    """Make a function that prints a message on the first rank."""

    def say(text: str) -> None:
        if ranks.is_first:
            console.print(text, markup=False, soft_wrap=True)

    return say


def _prepare_tokens(config: Config, ranks: Ranks, say: Say) -> Corpus:
    """Open the training data, and prepare it first if it is missing and the config has a source."""
    folder = user_path(config.data.folder)
    if ranks.size > 1 and not is_prepared(config):  # the other ranks would wait for hours and time out
        raise UserError(
            f"{folder} is not prepared yet; prepare it first with one process: coupled-adam data prepare "
            f"{config.data.source} --tokenizer {config.data.tokenizer} --out {folder}"
        )
    return prepare_tokens(config, say)


def _with_rows(config: Config, run: RunFolder, *, resume: bool) -> Config:
    """Resolve the number of rows: a resumed run keeps its own, a new run gets it from its data."""
    if config.model.vocabulary_size == "auto" and resume and run.has_begun():
        stored = load_config(str(run.config))
        return config.model_copy(update={"model": with_rows(stored).model})
    return with_rows(config)


def uses_bf16(config: Config, device: torch.device) -> bool:
    """Resolve the precision of a run on a device: bf16 autocast or float32.

    Raises:
        UserError: precision "auto" is float32 on this device, and the residual stream needs bf16.
    """
    precision = config.training.precision
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    if config.model.residual_dtype != "float32" and not bf16:
        raise UserError(residual_without_bf16(config.model.residual_dtype))
    return bf16


def _build_parts(config: Config, corpus: Corpus, ranks: Ranks) -> RunParts:
    """Build the batches, the initialised model, its optimizers and its measures on the device."""
    settings = config.training
    batches = Batches(corpus.tokens("train"), config.model.context, settings.batch_size, config.seed, config.data.order)
    is_cuda = ranks.device.type == "cuda"
    bf16 = uses_bf16(config, ranks.device)
    if (bf16 or config.optimizer.matrices == "muon") and not is_cuda:  # Muon multiplies in bfloat16
        limit_instructions()  # for scripts that call run_training; the command line has already called it
    compile = is_cuda if settings.compile == "auto" else settings.compile
    can_capture = is_cuda and ranks.mode == "none"
    if settings.cuda_graphs is True and not can_capture:
        raise UserError('training.cuda_graphs = true needs one CUDA device and no parallelism; set it to "auto"')
    uses_graphs = can_capture if settings.cuda_graphs == "auto" else settings.cuda_graphs
    counts = ranks.first_does(corpus.unigram)
    unigram = None if config.model.output_bias == "none" else ranks.all_get(counts)
    module, model = build(config.to_model_config(), config.seed, ranks, bf16=bf16, compile=compile, unigram=unigram)
    optimizers = build_optimizers(
        model,
        config.optimizer,
        capturable=uses_graphs,
        vocabulary_size=corpus.vocabulary_size,
        seed=config.seed,
    )
    # Create the state now, so that the first step is the same in a new and a resumed run.
    make_optimizer_state(optimizers.optimizers)
    precision = functools.partial(torch.autocast, ranks.device.type, torch.bfloat16) if bf16 else nullcontext
    return RunParts(
        batches=RankBatches(batches, ranks, config.micro_batch_size(ranks.size)),
        module=module,
        model=model,
        optimizers=optimizers,
        precision=precision,
        measures=build_measures(config, corpus, counts, ranks, module, model, precision),
        uses_graphs=uses_graphs,
        uses_bf16=bf16,
    )


def _restore(parts: RunParts, run: RunFolder, last_step: int, expected: dict[str, str], say: Say) -> int | None:
    """Load the newest intact checkpoint of a run of `last_step` steps; None if there is no checkpoint."""
    damaged: list[str] = []
    path = newest_good(run.checkpoints, on_skip=damaged.append, last_step=last_step)
    if path is None and damaged:
        raise UserError(
            "; ".join(damaged) + f". No intact checkpoint is left to resume from; restore one, or remove "
            f"{run.checkpoints} to start again"
        )
    for problem in damaged:
        say(problem)
    if path is None:
        say(f"No checkpoint in {run.checkpoints}: starting from the beginning.")
        return None
    tensors = training_tensors(parts.model, parts.optimizers.optimizers)
    state = load(path, tensors, on_note=say)
    if state.get("data") != expected["data"]:
        raise UserError(f"{path} was trained on other tokens than data.folder contains now; restore the old tokens")
    if state.get("precision") != expected["precision"]:
        say(f"Precision changes from {state.get('precision')} to {expected['precision']}.")
    say(f"Resuming from {path}.")
    return int(state["step"])


def _open_logbook(config: Config, run: RunFolder, start_step: int | None, say: Say) -> Logbook:
    return open_logbook(
        run.path,
        tensorboard=config.log.tensorboard,
        wandb_project=config.log.wandb,
        config=config.model_dump(),
        run_name=run.path.name,
        resume_step=start_step,
        say=say,
    )


def _tables(model: LanguageModel, corpus: Corpus) -> Tables:
    return Tables(model.input_table_name, model.output_table_name, corpus.vocabulary_size)


def _trainer(
    config: Config,
    ranks: Ranks,
    parts: RunParts,
    saving: Saving,
    logbook: Logbook,
    display: TrainingDisplay,
    start_step: int,
) -> Trainer:
    peak_flops = devices.peak_flops(ranks.device)
    return Trainer(
        config,
        ranks,
        start_step=start_step,
        batches=parts.batches,
        train_step=TrainStep(
            parts.module,
            parts.optimizers,
            precision=parts.precision,
            z_loss=config.optimizer.z_loss,
            mu_loss=config.optimizer.mu_loss,
            token_count=parts.measures.vocabulary_size,
            cuda_graphs=parts.uses_graphs,
        ),
        measures=parts.measures,
        saving=saving,
        logbook=logbook,
        display=display,
        throughput=Throughput(
            config.tokens_per_step,
            flops_per_token=flops_per_token(config.to_model_config()),
            peak_flops=None if peak_flops is None else peak_flops * ranks.size,
            start_step=start_step,
        ),
    )


def _summary(config: Config, corpus: Corpus, ranks: Ranks, parts: RunParts) -> str:
    model, optimizer = config.model, config.optimizer
    parameters = sum(parameter.numel() for parameter in parts.model.parameters() if parameter.requires_grad)
    bias = "" if model.output_bias == "none" else f", output bias {model.output_bias}"
    details = {
        "adamw": [],
        "coupled": member_parts(optimizer.model_dump()),
        "sgd": [f"f = {setting(optimizer.sgd_factor)}"] if optimizer.sgd_factor else [],
    }[optimizer.embeddings]
    extra = f" ({', '.join(details)})" if details else ""
    factor = optimizer.muon.lr_factor
    muon = "" if factor == 1.0 else f", learning rate times {setting(factor)}"
    where = devices.device_name(ranks.device) + (f", {ranks.size} ranks, {ranks.mode}" if ranks.size > 1 else "")
    return (
        f"{config.name}: {model.architecture}, {parameters:,} parameters, {counted(model.layers, 'layer')}, "
        f"{model.width} wide{bias}; embeddings: {optimizer.embeddings}{extra}{', centred' if optimizer.centre else ''}"
        f"{''.join(f'; {fact}' for fact in optimizer.table_facts(tied=model.tied))}"
        f"{f'; matrices: muon{muon}' if optimizer.matrices == 'muon' else ''}; seed {config.seed}\n"
        f"{len(corpus.tokens('train')):,} tokens in {corpus.folder}; {counted(config.total_steps, 'step')} of "
        f"{config.training.batch_size} x {model.context}; {where}"
    )
