"""A description of CoupledAdamW for torch's optimizer tests: options, flags and errors.

torch ships such descriptions (`torch.testing._internal.common_optimizers`), but not the tests. This one is derived from
AdamW's: two-dimensional parameters go into a coupled group, and amsgrad is left out.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from coupled_adam import CoupledAdamW

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest: pip install expecttest")
# Importing it forbids setting torch.backends.* for the rest of the process, which other tests do.
with mock.patch("torch.backends.disable_global_flags"):
    common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)

DEVICE = "cpu"  # tests/gpu covers the other
ADAMW = next(info for info in common.optim_db if info.optim_cls is AdamW)


def optim_inputs(device: str, dtype: torch.dtype | None = None) -> list[Any]:
    return [given for given in ADAMW.optim_inputs_func(device, dtype) if not given.kwargs.get("amsgrad")]


def error_inputs(device: str, dtype: torch.dtype) -> list[Any]:
    return list(ADAMW.optim_error_inputs_func(device, dtype))


COUPLED_ADAMW = common.OptimizerInfo(
    CoupledAdamW,
    optim_inputs_func=optim_inputs,
    optim_error_inputs_func=error_inputs,
    scheduler_inputs=ADAMW.scheduler_inputs,
    supported_impls=tuple(flag for flag in ADAMW.supported_impls if flag != "differentiable"),
    not_og_supported_flags=ADAMW.not_og_supported_flags,
    supports_complex=False,
    has_capturable_arg=True,
    supports_fused_on=ADAMW.supports_fused_on,
)
INPUTS = optim_inputs(DEVICE)
ALL_INPUTS = common._get_optim_inputs_including_global_cliquey_kwargs(DEVICE, torch.float32, COUPLED_ADAMW)
each_input = pytest.mark.parametrize("given", INPUTS, ids=lambda given: given.desc)
every_input = pytest.mark.parametrize("given", ALL_INPUTS, ids=lambda given: given.desc)


def marked(params: Any) -> Any:
    """Group the parameters of a test and couple the two-dimensional ones; return anything but a list unchanged."""
    if not isinstance(params, list):
        return params
    if params and isinstance(params[0], dict):
        return [group if _has_vectors(group) else {"coupled": True, **group} for group in params]
    if all(isinstance(param, Tensor) for param in params):
        tables, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        return [{"params": tables, "coupled": True}] + ([{"params": others}] if others else [])
    return [{"params": params, "coupled": True}]


def _has_vectors(group: dict[str, Any]) -> bool:
    """Whether one of torch's groups contains no tables, as in torch 2.6."""
    params = group["params"] if isinstance(group["params"], list) else [group["params"]]
    return any(isinstance(param, Tensor) and param.dim() < 2 for param in params)


def build(params: list[nn.Parameter], kwargs: dict[str, Any]) -> CoupledAdamW:
    return CoupledAdamW(marked(params), **kwargs)


def new_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    """Two tables and two other parameters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 4), (5, 3), (6,), (2, 3, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in shapes]


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def take_steps(optimizer: Optimizer, params: list[nn.Parameter], steps: int = 4, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def assert_same(params: list[nn.Parameter], others: list[nn.Parameter], **tolerance: float) -> None:
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, **tolerance)
