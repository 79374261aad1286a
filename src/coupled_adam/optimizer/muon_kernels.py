"""The elementwise work of a Muon step as Triton kernels, for plain matrices on CUDA and ROCm.

Three kernels read and write each number once: the first updates the momentum and writes the matrices to orthogonalize
into the batch, the second divides by the norms, the third updates the parameters. Tall matrices are transposed inside a
tile, so that memory is read and written along rows. A launch gets the addresses of up to eight matrices of the same
layout, and every program picks one. Sums have a fixed order, so a step is deterministic. Nothing waits for the device.
`muon_step` does the same in torch operations, for all other matrices.

Legend: B matrices of a batch, m rows, n columns, m <= n after transposing, P partial sums of a matrix. A program works
on tiles of BLOCK_M x BLOCK_N of the batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from coupled_adam.optimizer.kernel_launch import Launcher, ceil_div, on_device_of

BLOCK_M, BLOCK_N = 64, 64
SCALE_BLOCK = 4096
# Partial sums per matrix: the kernel that divides by the norm reads them in one load.
MOST_PARTIALS = 1024
MATRICES_PER_LAUNCH = 8

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _addresses_and_place(*kinds: str) -> list[str]:
    """Names of the arguments whose values do not trigger a recompilation."""
    return [f"{kind}{i}" for kind in kinds for i in range(MATRICES_PER_LAUNCH)] + ["first"]


@triton.jit
def _chosen(i, a0, a1, a2, a3, a4, a5, a6, a7, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the i-th of eight addresses as a pointer."""
    address = tl.where(i == 1, a1, a0)
    address = tl.where(i == 2, a2, address)
    address = tl.where(i == 3, a3, address)
    address = tl.where(i == 4, a4, address)
    address = tl.where(i == 5, a5, address)
    address = tl.where(i == 6, a6, address)
    address = tl.where(i == 7, a7, address)
    pointer = address.to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _lerp(start, end, weight):
    """Interpolate like torch.lerp, which is exact at both ends."""
    step = end - start
    return tl.where(weight < 0.5, start + weight * step, end - step * (1.0 - weight))


@triton.jit(do_not_specialize=_addresses_and_place("grad", "momentum"))
def _gather_kernel(
    grad0: tl.int64,
    grad1: tl.int64,
    grad2: tl.int64,
    grad3: tl.int64,
    grad4: tl.int64,
    grad5: tl.int64,
    grad6: tl.int64,
    grad7: tl.int64,
    momentum0: tl.int64,
    momentum1: tl.int64,
    momentum2: tl.int64,
    momentum3: tl.int64,
    momentum4: tl.int64,
    momentum5: tl.int64,
    momentum6: tl.int64,
    momentum7: tl.int64,
    stacked_ptr,
    partial_ptr,
    grad_factor_ptr,
    mu,
    grad_weight,
    first,
    rows,
    columns,
    m,
    n,
    stride_grad_r,
    stride_grad_c,
    stride_momentum_r,
    stride_momentum_c,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_TALL: tl.constexpr,
    IS_NESTEROV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (p, i) processes every P-th tile of matrix i, padding included, and writes one partial sum of squares."""
    i = tl.program_id(1)
    grad_ptr = _chosen(i, grad0, grad1, grad2, grad3, grad4, grad5, grad6, grad7, DTYPE, IS_ALIGNED)
    momentum_ptr = _chosen(
        i, momentum0, momentum1, momentum2, momentum3, momentum4, momentum5, momentum6, momentum7, DTYPE, IS_ALIGNED
    )
    grad_factor = 1.0
    if grad_factor_ptr is not None:
        grad_factor = tl.load(grad_factor_ptr)
    matrix = (first + i).to(tl.int64)
    tiles_n = tl.cdiv(n, BLOCK_N)
    square_sum = 0.0
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M) * tiles_n, tl.num_programs(0)):
        of_m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        of_n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        if IS_TALL:
            r, c = of_n, of_m
        else:
            r, c = of_m, of_n
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        row, column = r.to(tl.int64)[:, None], c.to(tl.int64)[None, :]
        momentum_offsets = momentum_ptr + row * stride_momentum_r + column * stride_momentum_c
        g = tl.load(grad_ptr + row * stride_grad_r + column * stride_grad_c, mask=mask, other=0.0).to(tl.float32)
        B = tl.load(momentum_offsets, mask=mask, other=0.0).to(tl.float32)
        if grad_factor_ptr is not None:
            g *= grad_factor
        stored = _lerp(B, g, grad_weight).to(DTYPE)
        tl.store(momentum_offsets, stored, mask=mask)
        update = stored.to(tl.float32)
        if IS_NESTEROV:
            update = _lerp(g, update, mu)
        X = update.to(stacked_ptr.dtype.element_ty)
        rounded = X.to(tl.float32)
        square_sum += tl.sum(rounded * rounded)
        if IS_TALL:
            X = tl.trans(X)
        offsets = (matrix * m + of_m)[:, None] * n + of_n[None, :]
        tl.store(stacked_ptr + offsets, X, mask=(of_m < m)[:, None] & (of_n < n)[None, :])
    tl.store(partial_ptr + matrix * tl.num_programs(0) + tl.program_id(0), square_sum)


@triton.jit
def _scale_kernel(stacked_ptr, partial_ptr, eps, P, size, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """Divide a part of matrix i by its norm, or by eps if that is larger."""
    matrix = tl.program_id(1).to(tl.int64)
    partials = tl.arange(0, BLOCK_P)
    norm = tl.sqrt(tl.sum(tl.load(partial_ptr + matrix * P + partials, mask=partials < P, other=0.0)))
    norm = tl.where(norm < eps, eps, norm)  # NaN stays NaN
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    X = tl.load(stacked_ptr + matrix * size + places, mask=places < size, other=0.0).to(tl.float32)
    tl.store(stacked_ptr + matrix * size + places, (X / norm).to(stacked_ptr.dtype.element_ty), mask=places < size)


@triton.jit(do_not_specialize=_addresses_and_place("param"))
def _descend_kernel(
    param0: tl.int64,
    param1: tl.int64,
    param2: tl.int64,
    param3: tl.int64,
    param4: tl.int64,
    param5: tl.int64,
    param6: tl.int64,
    param7: tl.int64,
    stacked_ptr,
    lr_ptr,
    decay,
    change,
    weight_decay,
    ratio,
    first,
    rows,
    columns,
    m,
    n,
    stride_r,
    stride_c,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_TALL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Update theta of one tile of matrix i per program, in float32 for every dtype."""
    i = tl.program_id(1)
    param_ptr = _chosen(i, param0, param1, param2, param3, param4, param5, param6, param7, DTYPE, IS_ALIGNED)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
        decay = 1.0 - lr * weight_decay
        change = -lr * ratio
    tiles_n = tl.cdiv(tl.maximum(rows, columns), BLOCK_N)
    of_m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    of_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = ((first + i).to(tl.int64) * m + of_m)[:, None] * n + of_n[None, :]
    X = tl.load(stacked_ptr + offsets, mask=(of_m < m)[:, None] & (of_n < n)[None, :], other=0.0)
    if IS_TALL:
        X = tl.trans(X)
        r, c = of_n, of_m
    else:
        r, c = of_m, of_n
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    param_offsets = param_ptr + r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    theta = tl.load(param_offsets, mask=mask, other=0.0).to(tl.float32)
    theta = theta * decay + change * X.to(tl.float32)
    tl.store(param_offsets, theta.to(DTYPE), mask=mask)


GATHER = Launcher(_gather_kernel, num_warps=8)
SCALE = Launcher(_scale_kernel, num_warps=4)
DESCEND = Launcher(_descend_kernel, num_warps=8)


class MatrixLayout(NamedTuple):
    """What the kernels need to know about a tensor besides its address."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_aligned: bool


def gather(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    into: Tensor,
    *,
    mu: float,
    is_nesterov: bool,
    grad_factor: Tensor | None,
) -> Tensor:
    """Update the momenta in place, and fill a batch with the matrices to orthogonalize.

    Args:
        grads: B matrices, each (m, at most n) or, transposed, (at most n, m).
        momenta: momenta with the shapes and dtype of the gradients.
        into: (B, m, n), contiguous; matrices with fewer columns are padded with zeros.
        mu: momentum coefficient.
        is_nesterov: whether to use Nesterov momentum.
        grad_factor: factor of the gradients, a float32 scalar on their device; None means 1.

    Returns:
        Partial sums of the squares of each matrix of the batch, (B, P) float32.
    """
    B, m, n = into.shape
    P = min(ceil_div(m, BLOCK_M) * ceil_div(n, BLOCK_N), MOST_PARTIALS)
    partial_sums = torch.empty(B, P, dtype=torch.float32, device=into.device)
    with on_device_of(into):
        for first, layouts, alike in _launches(grads, momenta):
            of_grad, of_momentum = layouts
            rows, columns = of_grad.shape
            GATHER.launch(
                (P, len(alike), 1),
                (into.device, into.dtype, m, n, layouts, grad_factor is None, is_nesterov, BLOCK_M, BLOCK_N),
                *_addresses([grad for grad, _ in alike]),
                *_addresses([momentum for _, momentum in alike]),
                into,
                partial_sums,
                grad_factor,
                float(mu),  # for an int, Triton would compile another kernel
                float(1 - mu),
                first,
                rows,
                columns,
                m,
                n,
                *of_grad.stride,
                *of_momentum.stride,
                TRITON_DTYPES[of_grad.dtype],
                of_grad.is_aligned and of_momentum.is_aligned,
                rows > columns,
                is_nesterov,
                BLOCK_M,
                BLOCK_N,
            )
    return partial_sums


def scale(stacked: Tensor, partial_sums: Tensor, eps: float) -> None:
    """Divide each matrix of a batch by its Frobenius norm, in place.

    As in `newton_schulz.orthogonalised`, this is the norm of the rounded numbers. It is infinite if the sum of their
    squares overflows float32.

    Args:
        stacked: (B, m, n), contiguous.
        partial_sums: partial sums of squares, (B, P).
        eps: lower bound of the norm by which a matrix is divided.
    """
    B, P = partial_sums.shape
    size = stacked[0].numel()
    with on_device_of(stacked):
        SCALE.launch(
            (ceil_div(size, SCALE_BLOCK), B, 1),
            (stacked.device, stacked.dtype, P, size, SCALE_BLOCK, MOST_PARTIALS),
            stacked,
            partial_sums,
            float(eps),
            P,
            size,
            SCALE_BLOCK,
            MOST_PARTIALS,
        )


def descend(
    params: Sequence[Tensor],
    directions: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float,
    ratio_of: Callable[[int, int], float],
) -> None:
    """Decay the parameters and subtract their directions, in place.

    Args:
        params: B matrices, as for `gather`.
        directions: (B, m, n), contiguous.
        lr: a number, or a scalar tensor on the device.
        weight_decay: decoupled weight decay.
        ratio_of: returns the factor of the learning rate for a matrix with the given rows and columns.
    """
    _, m, n = directions.shape
    lr_tensor, lr_value = (lr, 0.0) if isinstance(lr, Tensor) else (None, lr)
    with on_device_of(directions):
        for first, layouts, alike in _launches(params):
            (layout,) = layouts
            rows, columns = layout.shape
            ratio = ratio_of(rows, columns)
            lr_dtype = None if lr_tensor is None else lr_tensor.dtype
            tiles = ceil_div(min(rows, columns), BLOCK_M) * ceil_div(max(rows, columns), BLOCK_N)
            DESCEND.launch(
                (tiles, len(alike), 1),
                (directions.device, directions.dtype, m, n, layout, lr_dtype, BLOCK_M, BLOCK_N),
                *_addresses([param for (param,) in alike]),
                directions,
                lr_tensor,
                float(1 - lr_value * weight_decay),
                float(-lr_value * ratio),
                float(weight_decay),
                float(ratio),
                first,
                rows,
                columns,
                m,
                n,
                *layout.stride,
                TRITON_DTYPES[layout.dtype],
                layout.is_aligned,
                rows > columns,
                BLOCK_M,
                BLOCK_N,
            )


def _launches(*tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[MatrixLayout, ...], list[tuple[Tensor, ...]]]]:
    """Split matrices into launches with one layout each. Yields the index of the first matrix, layouts and tensors."""
    place = 0
    for layouts, run in itertools.groupby(zip(*tensors, strict=True), key=lambda matrix: tuple(map(_layout, matrix))):
        alike = list(run)
        for start in range(0, len(alike), MATRICES_PER_LAUNCH):
            yield place + start, layouts, alike[start : start + MATRICES_PER_LAUNCH]
        place += len(alike)


def _layout(tensor: Tensor) -> MatrixLayout:
    return MatrixLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return as many addresses as a launch takes. Those beyond the tensors are unused."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    return addresses + [addresses[0]] * (MATRICES_PER_LAUNCH - len(addresses))
