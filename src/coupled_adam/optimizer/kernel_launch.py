"""Launch Triton kernels with little work for the host, on the device of their tensors."""

import contextlib
import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.table import Table


class Launcher:
    """A kernel with a cache of its compiled versions, one per kind of arguments.

    Triton's own launch derives the kind from all arguments every time, which takes 20 to 35 microseconds of CPU time.
    Three launches would take as long as the GPU needs for GPT-2's table. Here the caller passes the kind.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self.kernel = kernel
        self.num_warps = num_warps
        self.compiled: dict[Hashable, Any] = {}

    def launch(self, grid: tuple[int, int, int], kind: Hashable, *arguments: Any) -> None:
        """Run the kernel.

        Args:
            grid: number of programs along each axis.
            kind: everything Triton specializes on: device, dtypes, alignments, integers, which pointers are None.
            *arguments: all arguments of the kernel in order, including tile shapes.
        """
        compiled = self.compiled.get(kind)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = self.kernel[grid](*arguments, num_warps=self.num_warps)
        if compiled is not None:  # the interpreter compiles nothing
            self.compiled[kind] = compiled


def step_on_device(table: Table) -> bool:
    return table.step.is_cpu == table.param.is_cpu


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def alignment_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr() % 16


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """Strides of a (V, H) tensor; zeros for a pointer that is None."""
    return (0, 0) if tensor is None else tensor.stride()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv is for kernels and takes microseconds here


_NO_CHANGE = contextlib.nullcontext()


@functools.cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device."""
    if _several_devices() and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_CHANGE
