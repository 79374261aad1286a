"""First moments in Triton kernels: their update, and stochastic rounding with the bits of `stochastic_rounding`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optimizer import stochastic_rounding
from coupled_adam.optimizer.kernel_launch import Launcher, on_device_of
from coupled_adam.optimizer.table import Table

MULTIPLIER1 = tl.constexpr(stochastic_rounding.MULTIPLIER1)
MULTIPLIER2 = tl.constexpr(stochastic_rounding.MULTIPLIER2)
SPREAD = tl.constexpr(stochastic_rounding.SPREAD)
INCREMENT = tl.constexpr(stochastic_rounding.INCREMENT)
LARGEST = tl.constexpr(stochastic_rounding.LARGEST)
UPPER_HALF = tl.constexpr(0xFFFF0000)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= MULTIPLIER1
    x ^= x >> 15
    x *= MULTIPLIER2
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["t", "key"])
def step_keys_kernel(keys_ptr, step_ptr, t, key):
    """Compute `stochastic_rounding.step_keys` on the device, so that each replay of a CUDA graph has new keys."""
    if step_ptr is not None:
        t = tl.load(step_ptr).to(tl.int32) + 1
    index_key = _mix((key.to(tl.uint32) ^ t.to(tl.uint32)) + INCREMENT)
    middle_key = _mix(index_key + INCREMENT)
    tl.store(keys_ptr, index_key.to(tl.int32, bitcast=True))
    tl.store(keys_ptr + 1, middle_key.to(tl.int32, bitcast=True))


@triton.jit
def load_keys(keys_ptr):
    """Load the two keys of a step. Call it before a loop over tiles: Triton does not move loads out of loops."""
    index_key = tl.zeros((), dtype=tl.uint32)
    middle_key = tl.zeros((), dtype=tl.uint32)
    if keys_ptr is not None:
        index_key = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
        middle_key = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    return index_key, middle_key


@triton.jit
def stored_moment(
    m, exp_avg_ptr, rows, columns, keys_ptr, index_key, middle_key, first_element, width, IS_LARGE: tl.constexpr
):
    """Convert float32 moments of a tile for storage: with keys by stochastic rounding, else to nearest.

    See `stochastic_rounding.random_bits` and `stochastic_rounding.round_with_bits`.
    """
    if keys_ptr is None:
        stored = m.to(exp_avg_ptr.dtype.element_ty)
    else:
        if IS_LARGE:
            index = rows.to(tl.int64)[:, None] * width + (columns.to(tl.int64) + first_element)[None, :]
            high = _mix((index >> 32).to(tl.uint32))
            x = index.to(tl.uint32) * SPREAD + index_key + high
            middle_key ^= high
        else:
            # No `.to` on the arguments: Triton turns an argument of 1 into a constant.
            row_index = (rows.to(tl.uint32) * width).to(tl.uint32) * SPREAD
            column_index = (columns.to(tl.uint32) + first_element).to(tl.uint32) * SPREAD
            x = row_index[:, None] + (column_index + index_key)[None, :]
        x ^= x >> 16
        x *= MULTIPLIER1
        x ^= (x >> 15) ^ middle_key
        x *= MULTIPLIER2
        bits = (m.to(tl.uint32, bitcast=True) + (x >> 16)) & UPPER_HALF
        rounded = bits.to(tl.float32, bitcast=True)
        stored = tl.where(tl.abs(m) < LARGEST, rounded, m).to(exp_avg_ptr.dtype.element_ty)
    return stored


@triton.jit
def load_moment(exp_avg_ptr, offsets, mask, EVICTION: tl.constexpr):
    """Load m_{t-1} of a tile. Without a first moment (beta1 = 0), read nothing."""
    m = 0.0
    if exp_avg_ptr is not None:
        m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return m


@triton.jit
def advance_moment(
    g, m, beta1, grad_weight, exp_avg_ptr, offsets, mask, rows, columns, keys_ptr, index_key, middle_key,
    first_element, width, IS_LARGE: tl.constexpr,
):  # fmt: skip
    """Update m_t of a tile in memory, from m_{t-1} of `load_moment`.

    Returns:
        m_t as stored, and m_t before rounding; both float32. Without a first moment, both are the gradient.
    """
    if exp_avg_ptr is None:
        m = grad_weight * g
        stored = m
    else:
        m = beta1 * m + grad_weight * g
        rounded = stored_moment(
            m, exp_avg_ptr, rows, columns, keys_ptr, index_key, middle_key, first_element, width, IS_LARGE
        )
        tl.store(exp_avg_ptr + offsets, rounded, mask=mask)
        stored = rounded.to(tl.float32)
    return stored, m


STEP_KEYS = Launcher(step_keys_kernel, num_warps=1)


class RoundingArguments(NamedTuple):
    """Arguments for rounding, in the order of the kernels that write first moments."""

    keys: Tensor | None  # (2,) int32
    first_element: int
    width: int
    is_large: bool

    @property
    def kind(self) -> tuple[bool, int, int, bool]:
        """Everything that Triton specializes on."""
        return self.keys is None, self.first_element, self.width, self.is_large


NO_ROUNDING = RoundingArguments(None, 0, 0, False)


def rounding_arguments(table: Table, step: Tensor | None, t: float) -> RoundingArguments:
    """Return the arguments with which a kernel rounds the first moments of a table in this step.

    Args:
        table: the table.
        step: t - 1 if the step count is on the device, else None.
        t: the step, if the step count is on the host.
    """
    rounding = table.rounding
    if rounding is None:
        return NO_ROUNDING
    keys = torch.empty(2, dtype=torch.int32, device=table.param.device)
    signed_key = stochastic_rounding.signed(rounding.key)
    with on_device_of(table.param):
        kind = (table.param.device, None if step is None else step.dtype)
        STEP_KEYS.launch((1, 1, 1), kind, keys, step, int(t), signed_key)
    return RoundingArguments(keys, rounding.first, table.width, rounding.is_large)
