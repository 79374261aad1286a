"""The device of a run: which one, how it is set up, what it could do, and how much memory is in use.

All settings that change the speed and not the result are made here, once, before the model is built.
"""

import ctypes
import os
import re
import sys

import torch

from coupled_adam.base.errors import UserError

# Dense bf16 matrix products with float32 sums, FLOP per second, by the vendors' data sheets. A name matches when it has
# all words of a line; the first match counts.
PEAK_FLOPS = {
    "B300": 2250e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "RTX A6000": 155e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}

# malloc's parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def pick_device(wanted: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means on this machine.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"Invalid device: {wanted!r}; expected 'auto', 'cpu' or 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "the device is 'cuda', but torch sees none; take 'cpu' or 'auto' (training.device of a config, --device)"
        )
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """What the vendor calls a GPU; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def prepare_device(device: torch.device, *, deterministic: bool, threads: int | None) -> None:
    """Set this process up for training on a device.

    Args:
        device: where the model will be.
        deterministic: only operations that give the same bits again; those that cannot raise an error.
        threads: of the CPU; None leaves torch's choice.
    """
    if threads:
        torch.set_num_threads(threads)
    if deterministic:
        # Read when cuBLAS is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if device.type == "cpu":
        keep_freed_memory()
        return
    torch.set_float32_matmul_precision("high")  # TF32


def peak_flops(device: torch.device) -> float | None:
    """FLOP per second in dense bf16 matrix products; None for a device that is not in the table.

    Example:
        >>> peak_flops(torch.device("cpu")) is None
        True
    """
    return peak_flops_by_name(device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """The same by the vendor's name.

    Example:
        >>> peak_flops_by_name("NVIDIA H100 80GB HBM3") / 1e12
        989.0
    """
    words = set(re.findall(r"\w+", name.lower()))
    return next((flops for key, flops in PEAK_FLOPS.items() if words.issuperset(key.lower().split())), None)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of tensors on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed, as a training step will ask for the same sizes again.

    By default it returns large blocks to the system, which hands them out again page by page, each filled with zeros.
    Does nothing where the C library is another one, or where the user has set MALLOC_ variables of glibc.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest that glibc takes
    mallopt(M_TRIM_THRESHOLD, 2**30)
    mallopt(M_TOP_PAD, 64 * 2**20)
