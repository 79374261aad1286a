"""Provenance of a page, for its last table."""

import platform
import shlex
import sys
from datetime import datetime

from coupled_adam import __version__
from coupled_adam.base.text import counted, duration, printable


def page_facts(seconds: float) -> dict[str, str]:
    """Return the command, date, duration, machine and versions that produced a page."""
    import torch

    return {
        "command": printable(shlex.join(["coupled-adam", *sys.argv[1:]])),
        "date": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "took": duration(seconds),
        "machine": f"{platform.machine()}, {counted(torch.get_num_threads(), 'thread')}",
        "versions": f"coupled-adam {__version__}, torch {torch.__version__}",
    }
