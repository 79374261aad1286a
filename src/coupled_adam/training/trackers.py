"""Rows of metrics for TensorBoard and for Weights & Biases. Both come with the extra `track`.

A number is called `kind/key` there: `train/loss`, `val/loss`, `embeddings/mu_norm_ratio`.
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
    """The numbers of a row by the names that trackers give them; neither shows text.

    Example:
        >>> numbers("train", {"loss": 8.25, "note": "text", "grad_norm": None})
        {'train/loss': 8.25}
    """
    return {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}


def require_packages(tensorboard: bool, wandb_project: str | None) -> None:
    """Refuse a config whose trackers are not installed.

    Args:
        tensorboard: whether it asks for TensorBoard.
        wandb_project: the Weights & Biases project it asks for.
    """
    from coupled_adam.base.extras import require

    if tensorboard:
        require("tensorboard", "track", "for log.tensorboard = true")
    if wandb_project is not None:
        require("wandb", "track", f"for log.wandb = {wandb_project!r}")


class TensorBoard:
    """Event files of TensorBoard in a folder."""

    name = "TensorBoard's event file"

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        require_packages(tensorboard=True, wandb_project=None)
        from torch.utils.tensorboard import SummaryWriter

        # It hides what an earlier process wrote from this step on. A new run has step 0 too.
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
    """A run of Weights & Biases. Its id lies in the run folder, so that a resumed run goes on in the same charts."""

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
                # Its own lines and its copy of ours would tear the progress bar apart.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"log.wandb = {project!r}: Weights & Biases does not start ({error}). Log in with `wandb login`, or "
                "set WANDB_MODE=offline to keep the run on this machine"
            ) from error
        # Its own count of steps only goes up, and would refuse the rows that a resumed run writes again.
        self._run.define_metric("*", step_metric="step", step_sync=True)
        where = f"offline, in {folder / 'wandb'}" if self._run.offline else self._run.url
        say(f"Weights & Biases: {where}")

    def write(self, kind: str, step: int, values: Values) -> None:
        if row := numbers(kind, values):
            self._run.log({"step": step, **row})

    def sync(self) -> None:
        """Its own process writes and sends."""

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def run_id(folder: Path, resume_step: int | None) -> str:
    """The id in the run folder; a new one for a run that starts, or that was not tracked before."""
    path = folder / ID_FILE
    if resume_step is None or not path.is_file():
        write_whole(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()
