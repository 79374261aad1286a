"""`coupled-adam demo`."""

from pathlib import Path
from typing import Annotated

import typer

from coupled_adam.commands.study import run_and_report


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Study folder, created if missing.")] = Path("runs/demo"),
) -> None:
    """Train a small model with AdamW and with Coupled Adam, three seeds each, and compare them.

    Same as `coupled-adam study run demo`. Takes about two minutes on two CPU cores and downloads nothing: the text is
    the documentation that ships with Python, torch and numpy. Run the same command again to resume after an
    interruption.

    Look at the **mean-embedding ratio**: the norm of the mean embedding divided by the mean norm of the embeddings.
    It is 0 if they are centred at the origin and near 1 if they all point the same way.

    Try: `coupled-adam demo`, then `coupled-adam study list`
    """
    run_and_report("demo", out, again=["coupled-adam", "demo", f"--out={out}"])
