r"""BatchedMuon: torch.optim.Muon that orthogonalises matrices of one shape together.

A step of torch.optim.Muon launches about twenty small kernels for every matrix and reads a tensor learning rate back to
the host. Here all matrices of one shape, tall ones transposed, are one (B, m, n) tensor, which a batched product
handles at once; and nothing waits for the device, so the step can be recorded as a CUDA graph.

Letters: B matrices of a batch, m rows, n columns, m <= n after transposing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from coupled_adam.optimizer.checks import is_flattened
from coupled_adam.optimizer.newton_schulz import COEFFICIENTS, EPS, STEPS, orthogonalised
from coupled_adam.optimizer.sharding import is_distributed, local_gradient, local_part
from coupled_adam.optimizer.whole_matrix import gathered, part_on_this_rank

ADJUSTMENTS = ("original", "match_rms_adamw")
NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Elements of a batch, 64 MiB in bfloat16: enough to fill a GPU, little beside the model.
BATCH_ELEMENTS = 2**25
# Options that a file of torch.optim.Muon lacks.
OWN_OPTIONS = ("ns_dtype", "capturable")


class BatchedMuon(Optimizer):
    r"""Muon: momentum whose matrix is replaced by the closest one with orthogonal rows or columns.

    .. math::
        \begin{aligned}
            B &\leftarrow \mu B + (1 - \mu) g                                                                 \\
            \tilde B &= \mu B + (1 - \mu) g \ \text{if nesterov, else}\ B                                     \\
            \theta &\leftarrow \theta - \eta \lambda \theta                                                   \\
            \theta &\leftarrow \theta - \eta \, r(\theta) \, \mathrm{NewtonSchulz}(\tilde B)
        \end{aligned}

    with :math:`r = \sqrt{\max(1, \text{rows} / \text{columns})}` for "original" and
    :math:`r = 0.2 \sqrt{\max(\text{rows}, \text{columns})}` for "match_rms_adamw". This is the arithmetic of
    torch.optim.Muon, and files go both ways: the state is `momentum_buffer`, in the dtype of the parameter. Matrices
    of one shape, or of a shape and its transpose, are updated together; temporary tensors take 256 MiB at most, or four
    times the bytes of the largest matrix in float32.

    Muon is for the hidden matrices of a network. Give vocabulary tables, heads, norms and biases to another optimizer.

    Parameters may be DTensors (FSDP2, HSDP, tensor parallel; uneven and empty shards too): each matrix is then
    gathered to all its ranks in `ns_dtype`, and all of them orthogonalise it. torch.amp.GradScaler works as with
    torch.optim.SGD: it unscales the gradients, and skips the step where one is not finite.

    A NaN or an infinite number anywhere in a gradient makes all of its matrix NaN, because every number of the update
    depends on all of the gradient. Other matrices are not touched by it. Clipping by a global norm before the step
    makes all matrices NaN, as it does with every optimizer.

    Args:
        params: matrices, as torch.optim takes them; with their names, errors name them.
        lr: learning rate :math:`\eta`, a number or a one-element tensor, which is not read back to the host.
        weight_decay: decoupled weight decay :math:`\lambda`.
        momentum: :math:`\mu` in [0, 1).
        nesterov: whether the gradient itself counts once more.
        ns_coefficients: a, b, c of the Newton-Schulz polynomial.
        eps: smallest norm that a matrix is divided by.
        ns_steps: rounds of the iteration.
        adjust_lr_fn: "original", which None means too, or "match_rms_adamw", with which learning rate and weight decay
            can be those of AdamW.
        ns_dtype: dtype of the iteration, "bfloat16" or "float32". On CUDA float32 products follow
            torch.set_float32_matmul_precision.
        capturable: allow recording the step as a CUDA graph. A tensor `lr` must then be on the device.

    Example:
        >>> model = torch.nn.Linear(8, 4, bias=False)
        >>> optimizer = BatchedMuon(model.named_parameters(), lr=0.02)
        >>> model(torch.randn(16, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[model.weight])
        ['momentum_buffer']
    """

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
        except Exception:  # also a TypeError, such as of eps="small"
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option in OWN_OPTIONS:
                group.setdefault(option, self.defaults[option])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of BatchedMuon or of torch.optim.Muon.

        Args:
            state_dict: what `state_dict()` returned. Options that the file lacks stay as they are.
        """
        super().load_state_dict(state_dict | {"param_groups": list(self._completed(state_dict["param_groups"]))})

    def _completed(self, groups: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The groups of a file, with the options that torch.optim.Muon does not have."""
        for index, given in enumerate(groups):
            live = self.param_groups[min(index, len(self.param_groups) - 1)]  # another number: torch's own error
            yield {option: live[option] for option in OWN_OPTIONS} | given

    def make_state(self) -> None:
        """Give every trainable matrix without state the momentum of zeros that its first step would make."""
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
            closure: reevaluates the model and returns the loss, called once with gradients enabled.

        Returns:
            What the closure returned, else None.
        """
        # Renamed in torch 2.12 or so; the old name warns where the new one exists.
        check = getattr(self, "_accelerator_graph_capture_health_check", None)
        cast(Callable[[], None], check or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            for batch in batches(self._matrices(index, group), BATCH_ELEMENTS):
                update_batch(batch, group)
        return loss

    def _matrices(self, index: int, group: dict[str, Any]) -> list["MuonMatrix"]:
        """The matrices of a group that have a gradient, with their momentum, made at their first one."""
        found = []
        for label, p in _labelled(index, group):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(f"{label} has a sparse gradient; use a layer with sparse=False, or another optimizer")
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            found.append(MuonMatrix(p, local_part(p), local_gradient(p.grad, p), local_part(state["momentum_buffer"])))
        return found


@dataclass(frozen=True, slots=True)
class MuonMatrix:
    """A matrix of the model and what a step reads and writes: this rank's parts of it."""

    param: Tensor
    """Whole, or a DTensor."""
    local: Tensor
    grad: Tensor
    momentum: Tensor

    @property
    def is_tall(self) -> bool:
        """Whether it is transposed for the iteration."""
        rows, columns = self.param.shape
        return rows > columns

    @property
    def kind(self) -> tuple[object, ...]:
        """Matrices of one kind can share a batch."""
        shape = tuple(sorted(self.param.shape))
        return (*shape, self.local.dtype, self.local.device, is_distributed(self.param))


def batches(matrices: Sequence[MuonMatrix], most_elements: int) -> Iterator[list[MuonMatrix]]:
    """Matrices of one kind together, wide ones before tall ones, in an order that all ranks share.

    Args:
        matrices: of a group.
        most_elements: of a batch; a larger matrix is a batch of its own.
    """
    kinds: dict[tuple[object, ...], list[MuonMatrix]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.kind, []).append(matrix)
    for alike in kinds.values():
        alike.sort(key=lambda matrix: matrix.is_tall)
        size = max(1, most_elements // max(1, alike[0].param.numel()))
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def update_batch(batch: Sequence[MuonMatrix], group: dict[str, Any]) -> None:
    """Update momentum and parameters of matrices of one kind, in place.

    Args:
        batch: wide matrices before tall ones.
        group: the options.
    """
    mu, dtype = group["momentum"], NS_DTYPES[group["ns_dtype"]]
    gradients = [matrix.grad.to(matrix.momentum.dtype) for matrix in batch]
    torch._foreach_lerp_([matrix.momentum for matrix in batch], gradients, 1 - mu)

    m, n = sorted(batch[0].param.shape)
    stacked = torch.empty(len(batch), m, n, dtype=dtype, device=batch[0].local.device)
    wide = sum(not matrix.is_tall for matrix in batch)
    # Both shapes of a batch, as the parameters have them: (B, rows, columns).
    shapes = [
        (batch[:wide], gradients[:wide], slice(None, wide), False),
        (batch[wide:], gradients[wide:], slice(wide, None), True),
    ]
    for matrices, grads, places, is_tall in shapes:
        if matrices:
            into = stacked[places]
            _stack_updates(matrices, grads, into.mT if is_tall else into, mu if group["nesterov"] else None)
    stacked = orthogonalised(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
    for matrices, _, places, is_tall in shapes:
        if matrices:
            directions = stacked[places]
            _descend(matrices, directions.mT if is_tall else directions, group)


def _stack_updates(matrices: Sequence[MuonMatrix], grads: list[Tensor], into: Tensor, mu: float | None) -> None:
    """Fill (B, rows, columns) with what is to be orthogonalised: the momentum, or with Nesterov's mu part gradient."""
    momenta = [matrix.momentum for matrix in matrices]
    if is_distributed(matrices[0].param):
        for slot, matrix, grad in zip(into.unbind(), matrices, grads, strict=True):
            local = matrix.momentum if mu is None else torch.lerp(grad, matrix.momentum, mu)
            slot.copy_(gathered(local.to(into.dtype), matrix.param))
        return
    # One tensor for all, of which each matrix has a dense part: then a few kernels write them all.
    updates = torch.empty(into.shape, dtype=momenta[0].dtype, device=into.device)
    parts = list(updates.unbind())
    torch._foreach_copy_(parts, momenta if mu is None else grads)
    if mu is not None:
        torch._foreach_lerp_(parts, momenta, mu)
    into.copy_(updates)


def _descend(matrices: Sequence[MuonMatrix], directions: Tensor, group: dict[str, Any]) -> None:
    """Decay parameters of one shape and subtract their directions (B, rows, columns), which are whole on every rank."""
    params = [matrix.local for matrix in matrices]
    # In float32 at least: in bfloat16 a weight decay of 1 - lr * lambda would round to 1.
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    lr, decay = _on_device(group["lr"], directions.device), group["weight_decay"]
    changes = torch.empty(directions.shape, dtype=dtype, device=directions.device).copy_(directions)
    changes.mul_(-lr * lr_ratio(group["adjust_lr_fn"], *directions.shape[-2:]))
    parts = [part_on_this_rank(change, matrix.param) for change, matrix in zip(changes.unbind(), matrices, strict=True)]
    values = params if params[0].dtype == dtype else [param.to(dtype) for param in params]
    if decay != 0:
        torch._foreach_mul_(values, 1 - lr * decay)
    torch._foreach_add_(values, parts)
    if values is not params:
        torch._foreach_copy_(params, values)


def lr_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """What the learning rate is multiplied by for a matrix of this shape.

    Example:
        >>> lr_ratio("original", 400, 100), lr_ratio("original", 100, 400), lr_ratio("match_rms_adamw", 100, 400)
        (2.0, 1.0, 4.0)
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _on_device(lr: float | Tensor, device: torch.device) -> float | Tensor:
    if not isinstance(lr, Tensor) or lr.device == device:
        return lr if not isinstance(lr, Tensor) else lr.reshape(())
    return lr.item() if lr.device.type == "cpu" else lr.reshape(()).to(device)


def _labelled(index: int, group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a group with what an error calls it."""
    names = group.get("param_names")
    for i, param in enumerate(group["params"]):
        yield f"group {index}: tensor {repr(names[i]) if names else i}", param


def _check_matrix(label: str, param: Tensor) -> None:
    if is_flattened(param):
        raise ValueError(f"{label} is flattened by FSDP1, which has no matrices; use fully_shard (FSDP2)")
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
        raise ValueError(f"Invalid lr device: {lr.device}. With capturable=True a tensor lr is on {first.device}")
    for option, low, high in (
        ("lr", 0.0, math.inf),
        ("weight_decay", 0.0, math.inf),
        ("momentum", 0.0, 1.0),
        ("eps", 0.0, math.inf),
    ):
        value = group[option]
        if isinstance(value, Tensor) and option == "lr":
            continue  # reading it would wait for the device
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
