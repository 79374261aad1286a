"""TensorBoard and Weights & Biases as sinks of the logbook. The extra `track` installs both.

Metrics are named `kind/key`: `train/loss`, `val/loss`, `embeddings/mu_norm_ratio`.
"""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import write_whole
from coupled_adam.training.logbook import Values

ID_FILE = "wandb_id"


def numbers(kind: str, values: Values) -> dict[str, float]:
    """The numbers of a row by their names in trackers, without texts and missing values.

    Example:
        >>> numbers("train", {"loss": 8.25, "note": "text", "grad_norm": None})
        {'train/loss': 8.25}
    """
    return {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}


def require_packages(tensorboard: bool, wandb_project: str | None) -> None:
    """Raise an error if a requested tracker is not installed.

    Args:
        tensorboard: whether TensorBoard is requested.
        wandb_project: the requested Weights & Biases project, if any.
    """
    from coupled_adam.base.extras import require

    if tensorboard:
        require("tensorboard", "track", "for log.tensorboard = true")
    if wandb_project is not None:
        require("wandb", "track", f"for log.wandb = {wandb_project!r}")


class TensorBoard:
    """Sink that writes TensorBoard event files."""

    name = "TensorBoard's event file"

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        require_packages(tensorboard=True, wandb_project=None)
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what an earlier process wrote from this step on.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, kind: str, step: int, values: Values) -> None:
        for name, number in numbers(kind, values).items():
            self._writer.add_scalar(name, number, step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sink that sends rows to Weights & Biases. The run folder stores the run's id, so a resumed run continues it."""

    name = "Weights & Biases"

    def __init__(
        self,
        folder: Path,
        project: str,
        run_name: str,
        config: Mapping[str, Any],
        resume_step: int | None,
        say: Callable[[str], None],
    ) -> None:
        require_packages(tensorboard=False, wandb_project=project)
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=run_name or None,
                id=run_id(folder, resume_step),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                allow_val_change=True,
                # Its console output would break the progress line.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"log.wandb = {project!r}: Weights & Biases failed to start ({error}). Log in with `wandb login`, or "
                "set WANDB_MODE=offline to keep the run on this machine"
            ) from error
        # Its built-in step counter only increases, and would reject the rows that a resumed run repeats.
        self._run.define_metric("*", step_metric="step", step_sync=True)
        where = f"offline, in {folder / 'wandb'}" if self._run.offline else self._run.url
        say(f"Weights & Biases: {where}")

    def write(self, kind: str, step: int, values: Values) -> None:
        if row := numbers(kind, values):
            self._run.log({"step": step, **row})

    def sync(self) -> None:
        """Do nothing: wandb's own process writes and sends."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def run_id(folder: Path, resume_step: int | None) -> str:
    """The id stored in the run folder, or a new id for a run that starts or was not tracked before."""
    path = folder / ID_FILE
    if resume_step is None or not path.is_file():
        write_whole(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()
