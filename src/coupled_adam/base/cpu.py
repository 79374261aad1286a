"""Check whether bfloat16 matrix products run on this CPU before torch tries one.

Some sandboxes advertise Intel's AMX instructions but do not permit them. oneDNN, which multiplies bfloat16 matrices for
torch, trusts the CPU flags, and the process dies with SIGILL and no message. If the CPU advertises AMX, a child process
therefore multiplies first. If the child dies, an environment variable limits oneDNN to an older instruction set; oneDNN
reads it at its first product. The result is cached, so only the first command on a machine waits for the child.
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
# "DEFAULT" is oneDNN's name for everything the CPU advertises. If it fails, the others are tried in this order.
INSTRUCTION_SETS = ("DEFAULT", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
# Several sizes: oneDNN chooses its kernels by shape.
PRODUCT = """
import torch
for size in (16, 64, 250, 512):
    ones = torch.ones(size, size, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones).sum().item()
"""


def limit_instructions() -> str | None:
    """Limit oneDNN to instructions that run here, if the CPU advertises AMX and the user has not set a limit.

    Call it before torch multiplies anything. Child processes inherit the setting.

    Returns:
        A note for the user if a limit was found to be necessary; None if there is no limit or it was cached.
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
        f"this CPU advertises AMX instructions, but they are not permitted here; using {VARIABLE}={usable} for this "
        f"and later commands so that bfloat16 products run. Set {VARIABLE} yourself to choose another instruction set."
    )


def _shown_instructions() -> str:
    """The flags of the first CPU; empty on systems without /proc/cpuinfo, where these sandboxes do not occur."""
    with suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line for line in lines if line.startswith("flags")), "")
    return ""


def _multiplies(instruction_set: str) -> bool:
    environment = {**os.environ, VARIABLE: instruction_set}
    command = [sys.executable, "-c", PRODUCT]
    try:
        # Only death by a signal counts: a child that cannot import torch says nothing about the CPU.
        return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode >= 0
    except (OSError, subprocess.TimeoutExpired):
        return True


def _cache_file(shown: str) -> Path:
    """The cache file: one per CPU, kernel and torch version, since each can change the result."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    key = "\n".join((shown, platform.node(), platform.release(), platform.version(), torch_version))
    # os.path.expanduser returns "~" instead of raising if there is no home folder, as in some containers.
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "coupled-adam")
    return folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remembered(cache: Path) -> str | None:
    try:
        usable = read_json(cache)["instructions"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return usable if usable in INSTRUCTION_SETS else None


def _remember(cache: Path, usable: str) -> None:
    """Cache the result. Ranks may write at the same time, hence `write_whole`; without a home folder, do nothing."""
    with suppress(OSError):
        if not cache.is_absolute():
            return
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cache, json.dumps({"instructions": usable}))
