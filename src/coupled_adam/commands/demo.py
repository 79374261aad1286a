"""`coupled-adam demo`."""

from pathlib import Path
from typing import Annotated

import typer

from coupled_adam.commands.study import run_and_report


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the study, made if it is missing.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train one small model with AdamW and with Coupled Adam, three seeds each, and compare.

    The same as `coupled-adam study run demo`. Takes about two minutes on two CPU cores and downloads nothing: the text
    is the documentation that comes with Python, torch and numpy. Stopped or killed, it goes on with the same command.

    Look at the **mean-embedding ratio**: the length of the mean embedding over the mean length of the embeddings.
    It is 0 when they are centred at the origin, and near 1 when they all point the same way.

    Then: `coupled-adam study list`
    """
    run_and_report("demo", out, again=["coupled-adam", "demo", f"--out={out}"])
