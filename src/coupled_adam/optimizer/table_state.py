"""State of a coupled table: created at its first gradient, and extended when the options of its group need more.

Legend: V vocabulary rows, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.sharding import row_moment_like, second_moment_like
from coupled_adam.optimizer.table import needs_first_moment, needs_row_moments
from coupled_adam.optimizer.torch_versions import scalar_dtype


def prepare_state(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Create what the next step of a table needs and its state lacks.

    Args:
        state: state of the table, changed in place. Empty before the first step.
        param: the table, (V, H).
        group: its group, whose options may have changed since the last step. An `exp_avg` that it no longer needs
            stays until the step is taken.
    """
    if not state:
        is_fused = group["fused"]
        device = param.device if group["capturable"] or is_fused else "cpu"
        state["step"] = torch.zeros((), dtype=scalar_dtype(is_fused=is_fused), device=device)
    _prepare_first_moment(state, param, group)
    if "exp_avg_sq" not in state:
        state["exp_avg_sq"] = second_moment_like(param)  # (1, H) float32
    if needs_row_moments(group) and "row_avg_sq" not in state:
        state["row_avg_sq"] = row_moment_like(param, state["exp_avg_sq"])  # (V, 1) float32


def _prepare_first_moment(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Set `exp_avg`, (V, H): zeros if it is missing, else converted to a new `state_dtype`."""
    if not needs_first_moment(group):
        return
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format, dtype=group["state_dtype"])
    elif group["state_dtype"] not in (None, state["exp_avg"].dtype):
        state["exp_avg"] = state["exp_avg"].to(group["state_dtype"])
