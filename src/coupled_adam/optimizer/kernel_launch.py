"""How Triton kernels are launched: with little work for the host, and on the device of their tensors."""

import contextlib
import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.table import Table


class Launcher:
    """A kernel together with what Triton compiled of it for each kind of arguments.

    Triton's own launch works out the kind from every argument, each time, in 20 to 35 microseconds of CPU time; three
    of them would take as long as the GPU needs for GPT-2's table. Here the caller names the kind.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self.kernel = kernel
        self.num_warps = num_warps
        self.compiled: dict[Hashable, Any] = {}

    def launch(self, grid: tuple[int, int, int], kind: Hashable, *arguments: Any) -> None:
        """Run the kernel.

        Args:
            grid: number of programs along each axis.
            kind: everything Triton specialises on: device, dtypes, alignments, integers, which pointers are None.
            *arguments: all arguments of the kernel in order, tile shapes included.
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


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)  # triton.cdiv is meant for kernels and takes microseconds here


_NO_CHANGE = contextlib.nullcontext()


@functools.cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if _several_devices() and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_CHANGE
