"""`coupled-adam train`."""

import os
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from coupled_adam.base.errors import as_user_error
from coupled_adam.base.progress import wide_enough
from coupled_adam.commands.data import preparation_bar
from coupled_adam.commands.refusal import refuse, user_errors

if TYPE_CHECKING:
    from coupled_adam.training.run import Outcome

# Metrics to print after training, if they were measured.
SHOWN = ("train_loss", "val_loss", "mu_norm_ratio", "input_mu_norm_ratio", "iso", "kappa", "rho_log", "r_cos")


def train(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Preset (see --list), TOML file or run folder.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting, such as `optimizer.embeddings=adamw`; may be repeated. --show explains all "
            "settings.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder.  [default: runs/NAME-EMBEDDINGS-seedSEED]"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint, if any.")
    ] = False,
    list_presets: Annotated[
        bool, typer.Option("--list", help="List the presets and their requirements, and exit.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the full config as TOML, each setting explained, and exit.")
    ] = False,
) -> None:
    """Train a language model as the paper does.

    Ctrl-C saves a checkpoint and exits. Resume with `coupled-adam train RUN --resume`

    For your own config: `coupled-adam train gpt2-125m --show > mine.toml`, edit the file,
    `coupled-adam train mine.toml`

    On several GPUs: `torchrun --nproc-per-node 8 -m coupled_adam train gpt2-125m`

    Exit codes: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (the terminal was closed), 1 if the loss is not
    finite.

    Try (15 seconds each on a laptop): `coupled-adam train tiny`,
    `coupled-adam train tiny --set optimizer.embeddings=adamw`, then
    `coupled-adam inspect runs/tiny-adamw-seed1 runs/tiny-coupled-seed1`
    """
    from coupled_adam.config.builtin_files import CONFIG_FILE, PRESETS
    from coupled_adam.config.run_config import load_config, to_toml

    console = Console(highlight=False)
    if list_presets:
        from coupled_adam.training.estimates import preset_table, this_machine

        with user_errors():  # a preset's corpus may have an unreadable manifest
            table = preset_table(this_machine())
        wide_enough(console, table).print(table)
        return
    if config is None:
        refuse("CONFIG is missing; pass a preset (see --list), a TOML file or a run folder, such as `train tiny`")
    with user_errors():
        resolved = load_config(config, settings or [])
    if show:
        typer.echo(to_toml(resolved), nl=False)
        return

    # As load_config reads it: a preset's name wins over a folder of that name.
    own_folder = Path(config) if config not in PRESETS and (Path(config) / CONFIG_FILE).is_file() else None
    kind = resolved.optimizer.embeddings + ("-muon" if resolved.optimizer.matrices == "muon" else "")
    folder = out or own_folder or Path("runs") / f"{resolved.name}-{kind}-seed{resolved.seed}"

    from coupled_adam.training.devices import pick_device
    from coupled_adam.training.interruption import NAMES, exit_code
    from coupled_adam.training.run import run_training, uses_bf16
    from coupled_adam.training.run_tokens import is_prepared, prepare_tokens
    from coupled_adam.training.trackers import require_packages
    from coupled_adam.training.trainer import TrainingStopped

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        # Fail before minutes of tokenizing, not after.
        uses_bf16(resolved, pick_device(resolved.training.device))
        require_packages(resolved.log.tensorboard, resolved.log.wandb)
        if os.environ.get("WORLD_SIZE", "1") == "1" and not is_prepared(resolved):
            with preparation_bar() as on_progress:
                prepare_tokens(resolved, typer.echo, on_progress)
        outcome = run_training(resolved, folder, resume=resume, console=console)
    except TrainingStopped as error:
        if is_first:
            typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        mendable = as_user_error(error)
        if mendable is None:
            raise
        if is_first:
            refuse(str(mendable))
        time.sleep(2)  # torchrun stops all ranks when one exits: let the first rank print its error
        if not getattr(error, "said_by_first_rank", False):
            refuse(f"rank {os.environ['RANK']}: {mendable}")
        raise typer.Exit(2) from None
    if is_first:
        with suppress(OSError):  # the terminal was closed
            _print_outcome(console, outcome)
    if not outcome.is_finished:  # so that `train && export` does not export half a model
        raise typer.Exit(exit_code(outcome.signal) if outcome.signal in NAMES else 1)


def _print_outcome(console: Console, outcome: "Outcome") -> None:
    from coupled_adam.base.text import duration
    from coupled_adam.metrics import METRICS

    if not outcome.is_finished:
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        command = (
            "coupled-adam" if is_alone else f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m coupled_adam"
        )
        saved = f"saved after step {outcome.step:,}" if outcome.step else "stopped before the first step"
        console.print(
            f"{outcome.signal}: {saved} of {outcome.total_steps:,}. Resume with: "
            f"{command} train {shlex.quote(str(outcome.folder))} --resume",
            markup=False,
            soft_wrap=True,
        )
        return
    table = Table("after training", Column("", justify="right"))
    for key in SHOWN:
        value = outcome.values.get(key)
        if value is not None:
            table.add_row(METRICS[key].label_with_arrow, METRICS[key].text(value))
    if table.row_count:
        console.print(table)
    # A run that was finished before has not been trained now, and has said so.
    is_new = outcome.start_step < outcome.step
    trained = f"Trained in {duration(outcome.seconds)}: {outcome.folder}\n" if is_new else ""
    console.print(
        f"{trained}Inspect the embeddings: coupled-adam inspect {shlex.quote(str(outcome.folder))}",
        markup=False,
        soft_wrap=True,
    )
