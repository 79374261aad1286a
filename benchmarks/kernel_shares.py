"""Where the time of a step goes: the share of each kind of kernel, on the CPU of each kind of operator."""

from collections.abc import Callable

import torch

# Parts of kernel names, in this order, and what they belong to. The rest is called "pointwise".
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn"),
    "loss": ("cross_entropy", "log_softmax", "nll_loss", "softmax"),
    "norm and GELU": ("add_norm", "layer_norm", "gelu"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "optimizer": (
        "adam", "optimizer", "_update_kernel", "_square_sums_kernel", "_second_moment_kernel", "_clip_factor_kernel",
        "multi_tensor", "lpnorm", "foreach",
    ),
    "copies": ("memcpy", "memset", "aten::copy_", "aten::fill_", "aten::zero_"),
}  # fmt: skip


def where_time_goes(
    seconds: Callable[[int], float], count: int, seconds_per_step: float, device: torch.device
) -> dict[str, float]:
    """Share of each kind of kernel in the time of a step, idle included.

    Args:
        seconds: takes that many steps, and returns the seconds of each.
        count: steps to record.
        seconds_per_step: of steps that were not recorded.
        device: cpu or cuda.
    """
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        wall = 1e6 * count * seconds(count)
    # Recording slows the host down: on a GPU the kernels are as fast as ever and the wall clock is the unrecorded one.
    whole = 1e6 * seconds_per_step * count if is_cuda else wall
    shares = dict.fromkeys([*KINDS, "pointwise", "idle"], 0.0)
    for event in profile.key_averages():
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        shares[kind_of(event.key)] += microseconds / whole
    shares["idle"] = max(0.0, 1 - sum(shares.values()))
    return shares


def kind_of(name: str) -> str:
    """The kind of a kernel or operator, by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "pointwise")
