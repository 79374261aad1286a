"""BatchedMuon: torch.optim.Muon that orthogonalizes many matrices together.

A step of torch.optim.Muon launches about thirty small kernels per matrix, and reads a tensor learning rate back to the
host. Here, matrices of the same shape share their kernels, and nothing waits for the device, so a CUDA graph can
capture the step. Clipping needs no extra pass: the step applies the factor while reading the gradients. This module has
the class with its options, groups and state; `muon_step` has the arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from coupled_adam.optimizer.checks import is_flattened
from coupled_adam.optimizer.muon_step import NS_DTYPES, MuonMatrix, muon_step
from coupled_adam.optimizer.newton_schulz import COEFFICIENTS, EPS, STEPS
from coupled_adam.optimizer.sharding import local_gradient, local_part
from coupled_adam.optimizer.torch_versions import check_graph_capture, disable_dynamo

ADJUSTMENTS = ("original", "match_rms_adamw")
# Options that files of torch.optim.Muon lack.
OWN_OPTIONS = ("ns_dtype", "capturable")


class BatchedMuon(Optimizer):
    r"""Muon: descend along the momentum, replaced by the closest matrix with orthogonal rows or columns.

    .. math::
        \begin{aligned}
            B &\leftarrow \mu B + (1 - \mu) g                                                                 \\
            \tilde B &= \mu B + (1 - \mu) g \ \text{if nesterov, else}\ B                                     \\
            \theta &\leftarrow \theta - \eta \lambda \theta                                                   \\
            \theta &\leftarrow \theta - \eta \, r(\theta) \, \mathrm{NewtonSchulz}(\tilde B)
        \end{aligned}

    with :math:`r = \sqrt{\max(1, \text{rows} / \text{columns})}` for "original" and
    :math:`r = 0.2 \sqrt{\max(\text{rows}, \text{columns})}` for "match_rms_adamw". The arithmetic and the state are
    those of torch.optim.Muon, and state dicts load in both directions. The state is `momentum_buffer`, in the dtype of
    the parameter. Matrices of the same shape, up to transposition, are updated together; on a GPU, small matrices of
    different shapes too. Temporary tensors take at most 512 MiB, or four times the float32 size of the largest matrix.

    Muon is for the hidden matrices of a network. Give vocabulary tables, heads, norms and biases to another optimizer.

    Parameters may be DTensors (FSDP2, HSDP, tensor parallel), also with uneven and empty shards. Each matrix is then
    gathered to all its ranks in `ns_dtype`, and each rank orthogonalizes it. torch.amp.GradScaler works as with
    torch.optim.SGD: it unscales the gradients, and skips the step if one is not finite.

    A NaN or infinity in a gradient makes its whole matrix NaN, because every element of the update depends on all of
    the gradient. Other matrices are not affected. Clipping by a global norm makes all matrices NaN, as with every
    optimizer.

    Args:
        params: matrices, in any form that torch.optim accepts. Pass names to see them in error messages.
        lr: learning rate :math:`\eta`, a number or a one-element tensor, which is not read back to the host.
        weight_decay: decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu` in [0, 1).
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: a, b, c of the Newton-Schulz polynomial.
        eps: lower bound of the norm by which a matrix is divided.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: "original" (also None) or "match_rms_adamw", which works with the learning rate and weight decay
            of AdamW.
        ns_dtype: dtype of the iteration, "bfloat16" or "float32". On CUDA, float32 products follow
            torch.set_float32_matmul_precision.
        capturable: allow capturing the step in a CUDA graph. A tensor `lr` must then be on the device.

    Example:
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> optimizer = BatchedMuon(model.named_parameters(), lr=0.02)
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[model.weight])
        ['momentum_buffer']
    """

    grad_factor: Tensor | None = None
    """Factor of the gradients in the next step: a one-element tensor that is not read back to the host; None means 1.
    The step applies it while reading the gradients, does not write to them, and then resets it to None.
    :func:`coupled_adam.clip_together` sets it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bfloat16",
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim; all its tensors must be matrices."""
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            _check_options(group)
            for label, param in _labelled(index, group):
                _check_matrix(label, param)
        except Exception:  # including TypeError, such as from eps="small"
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option in OWN_OPTIONS:
                group.setdefault(option, self.defaults[option])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of BatchedMuon or torch.optim.Muon.

        Args:
            state_dict: result of `state_dict()`. Options that the file lacks keep their values.
        """
        super().load_state_dict(state_dict | {"param_groups": list(self._completed(state_dict["param_groups"]))})

    def _completed(self, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Add the options that torch.optim.Muon does not have to the groups of a file."""
        for index, given in enumerate(groups):
            live = self.param_groups[min(index, len(self.param_groups) - 1)]  # torch refuses another number of groups
            yield {option: live[option] for option in OWN_OPTIONS} | given

    def make_state(self) -> None:
        """Create the zero momentum of every trainable matrix without state, as its first step would."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(
                        p, requires_grad=False, memory_format=torch.preserve_format
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss. It is called once, with gradients enabled.

        Returns:
            The result of the closure, or None without a closure.
        """
        check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_factor = self.grad_factor
        if grad_factor is not None:
            self._forget_grad_factor()
        for index, group in enumerate(self.param_groups):
            muon_step(self._matrices(index, group), group, grad_factor)
        return loss

    @disable_dynamo  # in torch 2.11 Dynamo cannot set attributes of an optimizer
    def _forget_grad_factor(self) -> None:
        self.grad_factor = None

    def _matrices(self, index: int, group: dict[str, Any]) -> list[MuonMatrix]:
        """Collect the matrices of a group that have a gradient; create their momentum at the first gradient."""
        found = []
        for label, p in _labelled(index, group):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(f"{label} has a sparse gradient; use sparse=False, or another optimizer")
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            momentum = local_part(state["momentum_buffer"])
            gradient = local_gradient(p.grad, p).to(momentum.dtype)
            found.append(MuonMatrix(p, local_part(p), gradient, momentum))
        return found


def _labelled(index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a group with its label for error messages."""
    names = group.get("param_names")
    for i, param in enumerate(group["params"]):
        yield f"group {index}: tensor {repr(names[i]) if names else i}", param


def _check_matrix(label: str, param: Tensor) -> None:
    if is_flattened(param):
        raise ValueError(f"{label} is flattened by FSDP1 and not a matrix; use fully_shard (FSDP2)")
    if param.ndim != 2:
        raise ValueError(
            f"{label} has shape {tuple(param.shape)}, expected a matrix (rows, columns); give it to another optimizer"
        )
    if not param.is_floating_point():
        raise ValueError(f"{label} has dtype {param.dtype}, expected a real floating-point dtype")


def _check_options(group: dict[str, Any]) -> None:
    lr, coefficients = group["lr"], group["ns_coefficients"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Invalid lr shape: {tuple(lr.shape)}. Use a number or a tensor with one element")
    first = next(iter(group["params"]), None)
    if group["capturable"] and isinstance(lr, Tensor) and first is not None and lr.device.type != first.device.type:
        raise ValueError(f"Invalid lr device: {lr.device}. With capturable=True, put lr on {first.device}")
    for option, low, high in (
        ("lr", 0.0, math.inf),
        ("weight_decay", 0.0, math.inf),
        ("momentum", 0.0, 1.0),
        ("eps", 0.0, math.inf),
    ):
        value = group[option]
        if isinstance(value, Tensor) and option == "lr":
            continue  # reading a tensor would wait for the device
        if not isinstance(value, Real) or not low <= float(value) < high:
            raise ValueError(f"Invalid {option} value: {value!r}. Use a number in [{low:g}, {high:g})")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 < steps < 100:
        raise ValueError(f"Invalid ns_steps value: {steps!r}. Use a whole number from 1 to 99")
    if len(coefficients) != 3:
        raise ValueError(f"Invalid ns_coefficients value: {coefficients!r}. Use three numbers")
    for option, choices in (("adjust_lr_fn", (None, *ADJUSTMENTS)), ("ns_dtype", tuple(NS_DTYPES))):
        if group[option] not in choices:
            raise ValueError(f"Invalid {option} value: {group[option]!r}. Use one of {', '.join(map(repr, choices))}")
