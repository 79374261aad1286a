"""`theory_of_run`: the theory on the checkpoints of a run, each measured once and stored in the run folder."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.base.text import setting
from coupled_adam.config.optimizer_names import is_coupled_adam, member_name
from coupled_adam.config.run_config import Config
from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import Corpus, open_known_corpus
from coupled_adam.evaluation.weights import find_checkpoint, load_weights, model_with, require_trained_on, run_config
from coupled_adam.models.model_config import parameter_count
from coupled_adam.theory.checkpoint_measures import fits_of, measure_checkpoint
from coupled_adam.theory.fits import has_scikit_learn, summarise
from coupled_adam.theory.record import CheckpointTheory, Optimizer, RunTheory
from coupled_adam.theory.theory_folder import Counts, Origin, TheoryFolder
from coupled_adam.training.checkpoint.checkpoint_folder import Record, checkpoints_in, folder_of_step, read_record
from coupled_adam.training.devices import pick_device
from coupled_adam.training.run_folder import RunFolder

FORMAT = 1
"""Changes with the definition of the measurements, so that outdated ones are repeated."""
PRECISIONS = ("float32", "bf16")

OnProgress = Callable[[int, int, int], None]
"""Called with (batches done, batches of all checkpoints to measure, step of the checkpoint)."""


def theory_of_run(
    run: Path,
    *,
    checkpoints: Sequence[int] | None = None,
    batches: int = 20,
    device: str | None = None,
    precision: str | None = None,
    on_progress: OnProgress | None = None,
    fresh: bool = False,
) -> RunTheory:
    """Measure the theory on checkpoints of a run and write it to `RUN/theory`.

    Finished measurements are read from there, so a stopped call can be resumed. Once all are finished, neither the
    weights nor the tokens are needed.

    Args:
        run: the run folder.
        checkpoints: steps; None for all milestones, or the newest checkpoint if there are none.
        batches: K of the pseudo-training, the batches after the checkpoint in the run's own order.
        device: "cpu", "cuda" or "auto" (the default).
        precision: of the forward pass, "float32" (the default) or "bf16".
        on_progress: see `OnProgress`; called once before the first batch and after each batch.
        fresh: repeat finished measurements.

    Returns:
        The measurements of these checkpoints, which are also in `theory.json`.
    """
    config = run_config(run)
    _require_plain_loss(config)
    precision = precision or PRECISIONS[0]
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if batches < 1:
        raise UserError(f"batches is {batches}; expected 1 or more; the paper uses 20")
    folder = TheoryFolder(run)
    steps, notes = _default_steps(run, folder) if checkpoints is None else (sorted(set(checkpoints)), [])
    origins = {step: _origin(run, step, batches, precision) for step in steps}
    stored = {} if fresh else {step: _stored_numbers(folder, run, origins[step], step) for step in steps}
    known = {step: numbers for step, numbers in stored.items() if numbers is not None}
    missing = [step for step in steps if step not in known]
    tokens = TrainingTokens(config)
    done = 0

    def report(step: int, finished: int) -> None:
        nonlocal done
        done += finished
        if on_progress is not None:
            on_progress(done, batches * len(missing), step)

    for step in missing:
        report(step, 0)
        measurement = Measurement(run, config, tokens, step, batches, precision, origins[step])
        known[step] = measurement.take(device or "auto", on_batch=partial(report, step, 1))
    measured = [_complete(folder, known[step]) for step in steps]
    theory = RunTheory(
        run=config.name,
        optimizer=config.optimizer.embeddings,
        parameters=parameter_count(config.to_model_config()),
        vocabulary_size=len(folder.read_unigram()),
        rows=config.rows,
        width=config.model.width,
        tied=config.model.tied,
        corpus=config.data.folder,
        batches=batches,
        tokens_per_batch=config.tokens_per_step,
        precision=precision,
        checkpoints=measured,
        summary=summarise(measured),
        notes=[*notes, *_notes(config, precision, measured)],
        own=own_of(config),
        member=member_name(config.optimizer.model_dump()) if own_of(config) == "own" else "",
    )
    folder.write_run(theory)
    return theory


@dataclass(frozen=True)
class TrainingTokens:
    """The tokens of a run, opened and counted once for all checkpoints, on first use."""

    config: Config

    @cached_property
    def corpus(self) -> Corpus:
        """The corpus that the run was trained on."""
        folder = user_path(self.config.data.folder)
        if not folder.is_dir():
            raise UserError(
                f"{self.config.data.folder}: the training tokens of the run {self.config.name!r} are missing. Prepare "
                "them again with `coupled-adam data prepare`; a relative folder is relative to the current one"
            )
        return open_known_corpus(folder)

    @cached_property
    def unigram(self) -> Counts:
        """Token counts of the training split; if unigram.npy is missing, all tokens are read."""
        return self.corpus.unigram()[: self.config.rows]


@dataclass(frozen=True)
class Measurement:
    """One checkpoint to measure."""

    run: Path
    config: Config
    tokens: TrainingTokens
    step: int
    batches: int
    precision: str
    origin: Origin

    def take(self, device: str, on_batch: Callable[[], None]) -> CheckpointTheory:
        """Measure the checkpoint and write the results to the run folder."""
        config = self.config
        path = find_checkpoint(self.run, self.step, on_skip=lambda sentence: None)
        corpus = self.tokens.corpus
        require_trained_on(corpus, read_record(path))
        unigram = self.tokens.unigram
        weights = load_weights(config.to_model_config(), path, pick_device(device))
        size = config.training.batch_size
        order = Batches(corpus.tokens("train"), config.model.context, size, config.seed, config.data.order)
        numbers, arrays = measure_checkpoint(
            model_with(config.to_model_config(), weights),
            (order.samples(self.step + number, 0, size) for number in range(self.batches)),
            config.optimizer,
            unigram,
            step=self.step,
            tokens_seen=self.step * config.tokens_per_step,
            row_exponent=config.row_exponent(self.step),
            bf16=self.precision == "bf16",
            on_batch=on_batch,
        )
        folder = TheoryFolder(self.run)
        folder.write_unigram(unigram)
        folder.write_checkpoint(numbers, arrays, self.origin)
        return numbers


def own_of(config: Config) -> Optimizer:
    """The optimizer that trained the output table of a run, among those whose updates are summed."""
    optimizer = config.optimizer
    if optimizer.embeddings == "adamw" or (optimizer.couple == "input" and not config.model.tied):
        return "adam"
    if optimizer.embeddings == "sgd":
        return "sgd"
    return "coupled" if is_coupled_adam(optimizer.model_dump()) else "own"


def _default_steps(run: Path, folder: TheoryFolder) -> tuple[list[int], list[str]]:
    """Steps of the milestones, or of the newest complete checkpoint, with notes about it."""
    try:
        return milestones(run, folder), []
    except UserError:
        if not checkpoints_in(RunFolder(run).checkpoints):
            raise
    notes: list[str] = []
    step = read_record(find_checkpoint(run, None, on_skip=notes.append)).step
    notes.append(
        f"the run has no milestones, so only its newest checkpoint is measured, step {step:,}. For the course of the "
        "training, train it again in another folder with --set checkpoints.milestones=10 --out FOLDER"
    )
    return [step], notes


def milestones(run: Path, folder: TheoryFolder) -> list[int]:
    """Steps of a run's milestones: those that still exist, and those already measured. UserError if there are none."""
    records = [record for path in checkpoints_in(RunFolder(run).checkpoints) if (record := _record(path)) is not None]
    steps = {record.step for record in records if record.milestone}
    steps |= {step for step, origin in folder.origins().items() if origin.get("milestone")}
    if not steps:
        remedy = "train it again in another folder with --set checkpoints.milestones=10 --out FOLDER"
        raise UserError(f"{run}: no milestones to measure; {remedy}")
    return sorted(steps)


def _record(checkpoint: Path) -> Record | None:
    try:
        return read_record(checkpoint)
    except ValueError:
        return None


def _origin(run: Path, step: int, batches: int, precision: str) -> Origin:
    """Inputs that determine the numbers of a checkpoint; weights and tokens are unknown if the checkpoint is gone."""
    record = _record(folder_of_step(RunFolder(run).checkpoints, step))
    origin: dict[str, str | int | None] = {"format": FORMAT, "step": step, "batches": batches, "precision": precision}
    if record is not None:
        origin["weights"] = record.fingerprint
        origin["data"] = record.state.get("data")
        origin["milestone"] = record.milestone
    return origin


def _stored_numbers(folder: TheoryFolder, run: Path, origin: Origin, step: int) -> CheckpointTheory | None:
    """Earlier measurements of a checkpoint; version 0.1.0 used another hash of the weights."""
    found = folder.read_numbers(step, origin)
    record = _record(folder_of_step(RunFolder(run).checkpoints, step))
    if found is None and record is not None:
        hashes = {name: file.sha256 for name, file in record.files.items()}
        old = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:12]
        found = folder.read_numbers(step, {**origin, "weights": old})
    return found


def _complete(folder: TheoryFolder, numbers: CheckpointTheory) -> CheckpointTheory:
    """Add mutual information to the numbers of a checkpoint if it could not be estimated before."""
    if has_scikit_learn() and all(fit.mutual_information is None for fit in numbers.fits.values()):
        numbers = replace(numbers, fits=fits_of(folder.read_arrays(numbers.step), folder.read_unigram()))
        folder.write_numbers(numbers, folder.read_origin(numbers.step))
    return numbers


def _require_plain_loss(config: Config) -> None:
    """Raise for a loss whose gradient identity differs from the paper's."""
    if config.model.logit_cap is not None:
        raise UserError(
            f"the theory assumes plain logits, but the run has model.logit_cap = {setting(config.model.logit_cap)}, "
            "whose derivative enters every gradient; measure a run without it"
        )
    if config.optimizer.mu_loss:
        raise UserError(
            f"the theory assumes the cross-entropy, but the run has optimizer.mu_loss = "
            f"{setting(config.optimizer.mu_loss)}, which also moves the mean embedding; measure a run without it"
        )


def _notes(config: Config, precision: str, measured: Sequence[CheckpointTheory]) -> Iterator[str]:
    if not has_scikit_learn() and any(
        fit.mutual_information is None for numbers in measured for fit in numbers.fits.values()
    ):
        yield (
            "mutual information needs scikit-learn: install it and run the command again, on any machine with this "
            "folder; finished measurements are not repeated"
        )
    if precision == "bf16":
        yield "measured in bf16: sums that vanish do so up to its rounding, about 1e-3; float32 gives about 1e-7"
    if config.optimizer.z_loss:
        yield (
            f"the run's loss has z_loss = {setting(config.optimizer.z_loss)}, whose gradients do not sum to zero; the "
            "sums of gradients and updates and E[v] include it, X and the Theorem are for the cross-entropy only"
        )
