"""Whether bfloat16 products run on this CPU, found out before torch tries one.

Some sandboxes show Intel's AMX instructions and do not permit them. oneDNN, which multiplies bfloat16 matrices for
torch, trusts what the CPU shows, and the process dies of SIGILL without a message. So where AMX is shown, a child
process multiplies first. If it dies, oneDNN is limited to an older instruction set by its own environment variable,
which it reads at its first product. The answer is remembered: only the first command on a machine waits for the child.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from coupled_adam.base.files import read_json, write_whole

VARIABLE = "ONEDNN_MAX_CPU_ISA"
CPUINFO = Path("/proc/cpuinfo")
# "DEFAULT" is oneDNN's word for all that the CPU shows. The others are tried in this order when that dies.
INSTRUCTION_SETS = ("DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
# Several sizes: oneDNN chooses its kernels by shape.
PRODUCT = """
import torch
for size in (16, 64, 250, 512):
    ones = torch.ones(size, size, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones).sum().item()
"""


def limit_instructions() -> str | None:
    """Limit oneDNN to instructions that run here, if the CPU shows AMX and the user has not decided.

    Call it before torch multiplies anything. Child processes inherit the setting.

    Returns:
        A note for the user when a limit was found to be necessary; None when there is none, or when it was known.
    """
    if VARIABLE in os.environ or "amx_tile" not in (shown := _shown_instructions()).split():
        return None
    cache = _cache_file(shown)
    known = _remembered(cache)
    usable = known or next((isa for isa in INSTRUCTION_SETS if _multiplies(isa)), INSTRUCTION_SETS[-1])
    if known is None:
        _remember(cache, usable)
    if usable == "DEFAULT":
        return None
    os.environ[VARIABLE] = usable
    if known is not None:
        return None
    return (
        f"this CPU shows AMX instructions, but they are not permitted here; {VARIABLE}={usable} is set for this "
        f"and later commands, so that bfloat16 products run. Set {VARIABLE} yourself to choose another instruction set."
    )


def _shown_instructions() -> str:
    """The flags of the first CPU; empty where the system has no such file, and then no such sandbox either."""
    with suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line for line in lines if line.startswith("flags")), "")
    return ""


def _multiplies(instruction_set: str) -> bool:
    environment = {**os.environ, VARIABLE: instruction_set}
    command = [sys.executable, "-c", PRODUCT]
    try:
        # A child that cannot import torch says nothing about the CPU: only death by a signal counts.
        return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode >= 0
    except (OSError, subprocess.TimeoutExpired):
        return True


def _cache_file(shown: str) -> Path:
    """Where the answer is kept: one file per CPU, kernel and torch, since each of them can change it."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    key = "\n".join((shown, platform.node(), platform.release(), platform.version(), torch_version))
    # os.path: a user without a home folder, as in some containers, gets "~" back and no error.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "coupled-adam")
    return folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remembered(cache: Path) -> str | None:
    try:
        usable = read_json(cache)["instructions"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return usable if usable in INSTRUCTION_SETS else None


def _remember(cache: Path, usable: str) -> None:
    """Write the answer, as a whole since ranks may do it at once; without a home folder the child runs again."""
    with suppress(OSError):
        if not cache.is_absolute():
            return
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache, json.dumps({"instructions": usable}))
