"""The device of a run: selection, setup, peak performance and memory use.

All settings that affect speed but not results are made here, once, before the model is built.
"""

import ctypes
import os
import re
import sys

import torch

from coupled_adam.base.errors import UserError

# Dense bf16 matrix products with float32 accumulation, FLOP per second, from the vendors' data sheets. A device name
# matches an entry if it contains all its words; the first match counts.
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
    """Resolve "auto", "cpu" or "cuda" to a device of this machine.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"Invalid device: {wanted!r}; expected 'auto', 'cpu' or 'cuda'")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "the device is 'cuda', but torch finds no CUDA device; use 'cpu' or 'auto' (training.device in a config, "
            "--device)"
        )
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The vendor's name of a GPU; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def prepare_device(device: torch.device, *, deterministic: bool, threads: int | None) -> None:
    """Set up this process for training on a device.

    Args:
        device: the device of the model.
        deterministic: use only bit-reproducible operations; others raise an error.
        threads: number of CPU threads; None for torch's default.
    """
    if threads:
        torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    if device.type == "cpu":
        keep_freed_memory()
        return
    torch.set_float32_matmul_precision("high")  # TF32


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP per second of dense bf16 matrix products; None for an unknown device.

    Example:
        >>> peak_flops(torch.device("cpu")) is None
        True
    """
    return peak_flops_by_name(device_name(device))


def peak_flops_by_name(name: str) -> float | None:
    """Peak FLOP per second by the vendor's name of the device.

    Example:
        >>> peak_flops_by_name("NVIDIA H100 80GB HBM3") / 1e12
        989.0
    """
    words = set(re.findall(r"\w+", name.lower()))
    return next((flops for key, flops in PEAK_FLOPS.items() if words.issuperset(key.lower().split())), None)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: of tensors on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory, because every training step allocates the same sizes.

    By default malloc returns large blocks to the system, which zeroes every page when it is allocated again. Does
    nothing with another C library, or if the user has set glibc's MALLOC_ variables.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # glibc's maximum
    mallopt(M_TRIM_THRESHOLD, 2**30)
    mallopt(M_TOP_PAD, 64 * 2**20)
