"""Try tile shapes for the kernels of residual sum and LayerNorm on this GPU; `fused_kernels` has the best as constants.

    python benchmarks/tune_norms.py

One table for each direction, dtype of the residual stream and shape, the fastest first, with the share of what memory
allows. The shapes are those of a step of GPT-2 125M with 96 samples and of 6 x 384 with 16 samples.

Letters: N rows (tokens), H width.
"""

import functools
import itertools

import torch

from coupled_adam.models import fused_kernels
from tune_kernels import BYTES_PER_MS, milliseconds, report

SHAPES = [(98304, 768), (16384, 384)]
ROWS, WARPS, PROGRAMS = (1, 2, 4, 8), (1, 2, 4, 8), (528, 1056, 2112)


def tune(N: int, H: int, dtype: torch.dtype) -> None:
    """Print the times of both directions for a residual stream of this dtype."""

    def random(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(N, H, device="cuda").to(dtype)

    x, total, grad_total, grad_x = (random(dtype) for _ in range(4))
    branch, y, grad_y = (random(torch.bfloat16) for _ in range(3))
    grad_branch = branch.new_empty(0) if dtype == branch.dtype else torch.empty_like(branch)
    weight, grad_weight = (torch.ones(H, device="cuda") for _ in range(2))
    mean, rstd = (torch.ones(N, device="cuda") for _ in range(2))
    forward = functools.partial(fused_kernels.add_norm, x, branch, weight, 1e-5, total, y, mean, rstd)
    backward = functools.partial(
        fused_kernels.add_norm_backward, grad_total, grad_y, total, weight, mean, rstd, grad_x, grad_branch, grad_weight
    )
    title = f"{N}x{H}, stream in {str(dtype).removeprefix('torch.')}"
    results = []
    for rows, warps in itertools.product(ROWS, WARPS):
        fused_kernels.NORM_ROWS, fused_kernels.NORM_WARPS = rows, warps
        results.append((milliseconds(forward), f"NORM_ROWS {rows} NORM_WARPS {warps}"))
    report(f"{title}, forward", results, sum(map(size, (x, branch, total, y))) / BYTES_PER_MS)
    results = []
    for warps, programs in itertools.product(WARPS, PROGRAMS):
        fused_kernels.NORM_BACKWARD_WARPS, fused_kernels.NORM_BACKWARD_PROGRAMS = warps, programs
        label = f"NORM_BACKWARD_WARPS {warps} NORM_BACKWARD_PROGRAMS {programs}"
        results.append((milliseconds(backward), label))
    moved = sum(map(size, (grad_total, grad_y, total, grad_x, grad_branch)))
    report(f"{title}, backward", results, moved / BYTES_PER_MS)


def size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.itemsize


def main() -> None:
    for (N, H), dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        tune(N, H, dtype)


if __name__ == "__main__":
    main()
