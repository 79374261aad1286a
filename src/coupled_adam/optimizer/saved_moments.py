"""Convert the saved moments of one parameter between torch.optim.AdamW and CoupledAdamW.

AdamW keeps a (V, H) second moment. A coupled table keeps its average over rows, and with row moments also its average
over columns. Averaging AdamW's state gives exactly these, because averages and the moving average commute.

Legend: V vocabulary rows, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from coupled_adam.optimizer.sharding import (
    PartialSum,
    column_like,
    distribute_like,
    is_distributed,
    local_part,
    local_real_rows,
    process_groups,
)
from coupled_adam.optimizer.table import needs_row_moments, sum_dtype

ROWS_AT_A_TIME = 4096


class SavedMoments:
    """The saved moments of one parameter, to be converted to the live optimizer's shapes.

    Add up `sums` over the ranks before calling `fitted`.
    """

    def __init__(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        self.state, self.param, self.group = state, param, group
        # For averaging a full second moment.
        self.column_sums: PartialSum | None = None
        self.row_sums: PartialSum | None = None
        # For row moments and their column moments.
        self.row_total: PartialSum | None = None
        self.column_total: PartialSum | None = None
        second_moment = state["exp_avg_sq"]
        local = local_part(second_moment)
        is_full = second_moment.shape == param.shape and param.shape[:1] != (1,)
        if group.get("coupled") and is_full:
            real = local[: local_real_rows(second_moment, group["vocabulary_size"])]
            self.column_sums = PartialSum(_column_sums(real), process_groups(second_moment, tensor_dim=0))
            if needs_row_moments(group):
                self.row_sums = PartialSum(_row_sums(local), process_groups(second_moment, tensor_dim=1))
        elif "row_avg_sq" in state:
            rows = state["row_avg_sq"]
            self.row_total = PartialSum(_total(local_part(rows)), process_groups(rows, tensor_dim=0))
            self.column_total = PartialSum(_total(local), process_groups(second_moment, tensor_dim=1))

    @property
    def sums(self) -> list[PartialSum]:
        """The partial sums of this rank."""
        sums = (self.column_sums, self.row_sums, self.row_total, self.column_total)
        return [partial_sum for partial_sum in sums if partial_sum is not None]

    def fitted(self) -> dict[str, Any]:
        """Return the state in the live optimizer's shapes."""
        if not self.group.get("coupled"):
            return self._of_adamw()
        return self._of_coupled()  # a step creates what is still missing

    def _of_coupled(self) -> dict[str, Any]:
        """Build the state of a coupled table: average full second moments, drop empty row moments, keep the rest."""
        if self.column_sums is None:
            return self._without_empty_rows()
        dtype = torch.promote_types(self.param.dtype, torch.float32)
        rows = self.group["vocabulary_size"] or self.param.shape[0]
        average = (self.column_sums.values / rows).unsqueeze(0).to(dtype)  # (1, H)
        fitted = {**self.state, "exp_avg_sq": distribute_like(average, self.param)}
        if self.row_sums is not None:
            row_average = (self.row_sums.values / self.param.shape[1]).unsqueeze(1).to(dtype)  # (V, 1)
            fitted["row_avg_sq"] = column_like(row_average, self.param)
        return fitted

    def _without_empty_rows(self) -> dict[str, Any]:
        """Drop row moments that were never filled: all 0, although column moments with the same mean are not."""
        if self.column_total is None or self._has_row_moments() or self.column_total.values == 0:
            return self.state
        return {key: value for key, value in self.state.items() if key != "row_avg_sq"}

    def _has_row_moments(self) -> bool:
        """Whether the row moments are not all zero."""
        return self.row_total is not None and bool(self.row_total.values != 0)

    def _of_adamw(self) -> dict[str, Any]:
        """Build AdamW's second moment c_h r_i / s, which has these row and column averages."""
        state = {key: value for key, value in self.state.items() if key != "row_avg_sq"}
        if "exp_avg" not in state:  # beta1 was 0
            state["exp_avg"] = _repeated_row(torch.zeros_like(state["exp_avg_sq"]), self.param)
        if self.state["exp_avg_sq"].shape == self.param.shape:
            return state
        state["exp_avg"] = state["exp_avg"].to(self.param.dtype)  # from a narrower state_dtype
        second_moment = _repeated_row(self.state["exp_avg_sq"], self.param)
        if self.column_total is not None and self._has_row_moments():
            mean = self.column_total.values / self.param.shape[1]
            ratios = local_part(self.state["row_avg_sq"]).to(mean.dtype) / mean  # (V, 1)
            local = local_part(second_moment)
            for rows, ratio in zip(local.split(ROWS_AT_A_TIME), ratios.split(ROWS_AT_A_TIME), strict=True):
                rows.copy_(rows.to(ratio.dtype) * ratio)
        return {**state, "exp_avg_sq": second_moment}


def _total(moments: Tensor) -> Tensor:
    return moments.sum(dtype=sum_dtype(moments.device))


def _row_sums(second_moment: Tensor) -> Tensor:
    """Sum a (V, H) tensor over its columns: (V,)."""
    dtype = sum_dtype(second_moment.device)
    sums = torch.empty(second_moment.shape[0], dtype=dtype, device=second_moment.device)
    for first in range(0, len(sums), ROWS_AT_A_TIME):
        block = slice(first, first + ROWS_AT_A_TIME)
        sums[block] = second_moment[block].sum(dim=1, dtype=dtype)
    return sums


def _column_sums(second_moment: Tensor) -> Tensor:
    """Sum a (V, H) tensor over its rows, in float64: the average of V equal float32 rows is then exactly that row."""
    dtype = sum_dtype(second_moment.device)
    sums = torch.zeros(second_moment.shape[1], dtype=dtype, device=second_moment.device)
    for block in second_moment.split(ROWS_AT_A_TIME):  # torch would convert the whole table first
        sums += block.sum(dim=0, dtype=dtype)
    return sums


def _repeated_row(row: Tensor, param: Tensor) -> Tensor:
    """Repeat a (1, H) second moment for every row of `param`, in its dtype, on the device of the row."""
    if is_distributed(param):
        repeated = torch.zeros_like(param, memory_format=torch.preserve_format)
    else:  # `param` is on the meta device if a file is converted without its model
        repeated = torch.empty_like(param, memory_format=torch.preserve_format, device=row.device)
    local_part(repeated).copy_(local_part(row).expand(local_part(param).shape[0], -1))
    return repeated
