"""The training loop: take steps; log, measure, validate and checkpoint when due; stop such that the run can resume.

Other modules implement the parts: the step (train_step), learning rate and annealing (schedule), ranks (parallel),
batches (rank_batches), files (checkpoint, logbook, run_folder), the progress line (display), measures (validation).

The loop waits for the device only to save, validate or measure the embeddings, and every 100 steps if nothing is
logged. On a GPU, logged numbers are read one step later, when the device already works on the next step.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coupled_adam.base.text import duration
from coupled_adam.config.run_config import Config
from coupled_adam.metrics import logged_key
from coupled_adam.training import devices
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, newest_good
from coupled_adam.training.checkpoint.training_state import training_tensors
from coupled_adam.training.display import TrainingDisplay
from coupled_adam.training.interruption import Interruption
from coupled_adam.training.logbook import Logbook
from coupled_adam.training.optimizers import EmbeddingOptimizers
from coupled_adam.training.parallel import Ranks
from coupled_adam.training.rank_batches import RankBatches
from coupled_adam.training.throughput import Throughput
from coupled_adam.training.train_step import TrainStep
from coupled_adam.training.validation import Measures

# Maximum number of steps whose losses stay on the device unread.
MOST_UNREAD_STEPS = 100
# Devices that run asynchronously.
READ_LATER = frozenset({"cuda"})
# Retry the final save for ten minutes, so that the user can free space on a full disk.
LAST_ATTEMPTS, SECONDS_BETWEEN_ATTEMPTS = 21, 30.0


class TrainingStopped(RuntimeError):
    """The run cannot continue; the message names the step, the cause and a remedy."""


@dataclass(frozen=True)
class Unread:
    """A step whose numbers are still on the device."""

    step: int
    lr: float
    row_exponent: float | None
    """None if it is not annealed."""
    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True)
class PendingNumbers:
    """Numbers of steps that are being copied from the device."""

    steps: list[Unread]
    values: Tensor  # (2, steps) float32 on the host: losses, gradient norms
    arrived: torch.cuda.Event | None
    """On a GPU: the event after the copy."""

    def wait(self) -> list[tuple[Unread, float, float]]:
        """Wait for the copy; return each step with its loss and gradient norm."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(zip(self.steps, *self.values.tolist(), strict=True))


@dataclass(frozen=True)
class Saving:
    """The contents of a checkpoint, and its writer."""

    writer: CheckpointWriter
    model: torch.nn.Module
    optimizers: EmbeddingOptimizers
    tables: Tables
    state: Mapping[str, Any]


class Trainer:
    """The training loop of a run on one rank, from the first or the last saved step to the end."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        start_step: int,
        batches: RankBatches,
        train_step: TrainStep,
        measures: Measures,
        saving: Saving,
        logbook: Logbook,
        display: TrainingDisplay,
        throughput: Throughput,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.step = start_step
        self.batches = batches
        self.train_step = train_step
        self.measures = measures
        self.saving = saving
        self.logbook = logbook
        self.display = display
        self.throughput = throughput
        self.latest: dict[str, float | None] = {}
        """Last logged value of every metric, by the keys of `coupled_adam.metrics`."""
        self._unread: list[Unread] = []
        self._logging: PendingNumbers | None = None
        """Numbers to log next, which are still being copied."""
        self._saved_step: int | None = start_step or None
        self._last_save = time.monotonic()
        milestones = config.checkpoints.milestones
        self._milestones = {math.ceil(config.total_steps * i / milestones) for i in range(1, milestones + 1)}

    def run(self, interruption: Interruption) -> None:
        """Train until all steps are taken or a signal stops the run, then save and wait until it is on disk."""
        while self.step < self.config.total_steps:
            stop, save = self._stop_or_save(interruption)
            if stop:
                self.display.message("Saving a checkpoint, then stopping. Press Ctrl-C again to stop immediately.")
                break
            if save:
                self._save()
            self._take_step()
            self._do_what_is_due()
        self._read_losses()
        self._save_at_the_end(interruption)

    def _save_at_the_end(self, interruption: Interruption) -> None:
        """Save and wait until it is on disk; retry on errors such as a full disk."""
        for attempt in range(1, LAST_ATTEMPTS + 1):
            try:
                self._save()
                self.saving.writer.wait()
                return
            except OSError as error:
                if attempt == LAST_ATTEMPTS or self.ranks.any_of(bool(interruption))[0]:
                    raise
                self._saved_step = None
                self.display.message(
                    f"{error.strerror or error}. Retrying in {duration(SECONDS_BETWEEN_ATTEMPTS)}; press Ctrl-C to "
                    "give up"
                )
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)

    def _stop_or_save(self, interruption: Interruption) -> list[bool]:
        """Whether to stop, and whether a timed save is due; the same on every rank."""
        minutes = self.config.checkpoints.minutes
        is_due = minutes is not None and time.monotonic() - self._last_save > 60 * minutes
        return self.ranks.any_of(bool(interruption), is_due and self.ranks.is_first)

    def _take_step(self) -> None:
        lr, row_exponent = self.config.learning_rate(self.step), self.config.row_exponent(self.step)
        loss, grad_norm = self.train_step(self.batches.micro_batches(self.step), lr, row_exponent)
        self.step += 1
        self._unread.append(Unread(self.step, lr, row_exponent, loss, grad_norm))
        self.display.update(self.step)

    def _do_what_is_due(self) -> None:
        """Log, measure, validate and checkpoint when due."""
        log = self.config.log
        is_last = self.step == self.config.total_steps

        def is_due(every: int | None) -> bool:
            return is_last or (every is not None and self.step % every == 0)

        self._finish_log()  # of the previous step: the device already works on this one
        if is_due(log.every):
            self._logging = self._start_reading()
            if self.ranks.device.type not in READ_LATER:
                self._finish_log()
        elif len(self._unread) >= MOST_UNREAD_STEPS:
            self._read_losses()
        if is_due(log.measure_every):
            with self._beside_training():
                self._write("embeddings", self.measures.full())
        elif is_due(log.monitor_every):
            with self._beside_training():
                self._write("embeddings", self.measures.light())
        if self.measures.can_validate and is_due(log.val_every):
            with self._beside_training():
                self._write("val", {"loss": self.measures.validation_loss()})
        every = self.config.checkpoints.every
        if self.step in self._milestones or (every is not None and self.step % every == 0):
            self._save()

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        """Wait for and check all steps, then exclude the time inside this context from the training speed."""
        self._read_losses()
        with self.throughput.paused():
            yield

    def _finish_log(self) -> None:
        """Log the pending numbers, if any; waits for the device."""
        reading, self._logging = self._logging, None
        if reading is None:
            return
        try:
            self.saving.writer.poll()
        except OSError as error:
            self.display.message(f"{error.strerror or error}. Training continues")
        last, loss, grad_norm = self._checked(reading)
        self.throughput.mark(last.step)
        values = {
            "tokens": last.step * self.config.tokens_per_step,
            "loss": loss,
            "lr": last.lr,
            **({} if last.row_exponent is None else {"row_exponent": last.row_exponent}),
            "grad_norm": grad_norm,
            "tokens_per_second": self.throughput.tokens_per_second,
            "mfu": self.throughput.mfu,
            "memory_bytes": devices.peak_memory(self.ranks.device),
        }
        self.logbook.write("train", last.step, values)
        self.latest |= {logged_key("train", name): value for name, value in values.items()}
        seconds_left = self.throughput.seconds_left(self.config.total_steps)
        self.display.update(last.step, values | {"seconds_left": seconds_left})

    def _write(self, kind: str, values: Mapping[str, float | None]) -> None:
        self.logbook.write(kind, self.step, values)
        self.latest |= {logged_key(kind, name): value for name, value in values.items()}
        if ratio := values.get("mu_norm_ratio"):
            self.display.update(self.step, {"mu_norm_ratio": ratio})

    def _read_losses(self) -> None:
        """Wait for all steps, and stop the run if a loss or gradient norm is not finite."""
        self._finish_log()
        if self._unread:
            self._checked(self._start_reading())

    def _start_reading(self) -> PendingNumbers:
        """Start copying the numbers of all unread steps from the device, without waiting."""
        steps, self._unread = self._unread, []
        losses = self.ranks.mean(torch.stack([unread.loss.detach().float() for unread in steps]))
        norms = torch.stack([unread.grad_norm for unread in steps])
        values = torch.stack([losses, norms]).to("cpu", non_blocking=True)
        arrived = None
        if self.ranks.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return PendingNumbers(steps, values, arrived)

    def _checked(self, reading: PendingNumbers) -> tuple[Unread, float, float]:
        """Return the last step with its loss and gradient norm; stop the run if any number is not finite."""
        read = reading.wait()
        for unread, loss, norm in read:
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise TrainingStopped(self._why_not_finite(unread.step, loss, norm))
        return read[-1]

    def _why_not_finite(self, step: int, loss: float, grad_norm: float) -> str:
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
        with suppress(OSError, RuntimeError):  # a failed save left no checkpoint, and only existing ones matter here
            self.saving.writer.wait()
        newest = newest_good(self.saving.writer.folder, on_skip=self.display.message, last_step=self.config.total_steps)
        last_good = f"the last good checkpoint is {newest}" if newest else "no checkpoint was saved"
        clipping = "lower" if self.config.optimizer.max_grad_norm else "set"
        return (
            f"step {step}: {what}, so the run stopped; {last_good}. In a new run (another --out), lower optimizer.lr, "
            f"lengthen schedule.warmup or {clipping} optimizer.max_grad_norm; with bf16, try "
            "training.precision=float32 to see whether the precision is the cause"
        )

    def _save(self) -> None:
        """Save this step, unless it is already saved; a failed write does not stop the run before its end."""
        if self.step in (0, self._saved_step):
            return
        with self._beside_training():
            self._save_this_step()

    def _save_this_step(self) -> None:
        self.logbook.sync()
        saving = self.saving
        tensors = training_tensors(saving.model, saving.optimizers.optimizers)
        state = {**saving.state, "tokens": self.step * self.config.tokens_per_step}
        for attempt in (1, 2):  # the first may raise the error of the previous save
            try:
                saving.writer.save(
                    self.step, tensors, state, tables=saving.tables, milestone=self.step in self._milestones
                )
                break
            except OSError as error:
                self.display.message(f"{error.strerror or error}. Training continues")
                if attempt == 2:
                    return
        self._saved_step = self.step
        self._last_save = time.monotonic()
