"""The optimizers of a training run: one of three for the vocabulary tables, AdamW or Muon for the matrices of the
blocks, AdamW for everything else.

The three are what the paper compares: AdamW ("adamw"), Coupled Adam ("coupled", with the exponents of its family of
second moments) and SGD ("sgd"). All of them clip the gradients by one global norm. Every group has its `lr_factor`: its
learning rate is that factor times the one of the schedule. Letters: V vocabulary rows, H width.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.optimizer import BatchedMuon, CoupledAdamW, clip_together, hidden_matrices, param_groups
from coupled_adam.optimizer.sharding import PartialSum, Reduction, is_distributed, local_part, process_groups
from coupled_adam.training.embedding_monitor import rows_before_padding

if TYPE_CHECKING:
    from coupled_adam.config.run_sections import OptimizerSection

Group = dict[str, Any]


class EmbeddingOptimizers:
    """All optimizers of a run, stepped as one."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        max_grad_norm: float,
        centred_tables: list[Tensor],
        vocabulary_size: int | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.max_grad_norm = max_grad_norm
        self.centred_tables = centred_tables
        self.vocabulary_size = vocabulary_size

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in place where a captured graph reads it from the device."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * group["lr_factor"])
                else:
                    group["lr"] = lr * group["lr_factor"]

    def set_row_exponent(self, row_exponent: float) -> None:
        """Set the row exponent of the next step, in place on the device. Only where it is annealed."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group.get("coupled"):
                    group["row_exponent"].fill_(row_exponent)

    def step(self) -> Tensor:
        """Clip, update everything, centre the tables where asked for.

        Returns:
            The norm of all gradients before clipping: a float32 scalar on their device, without waiting for it.
        """
        first = self.optimizers[0]
        norm = None if isinstance(first, CoupledAdamW) else self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
        if isinstance(first, CoupledAdamW):  # it clips inside its step, and Muon beside it by the same norm
            norm = first.grad_norm
        assert norm is not None
        for table in self.centred_tables:
            centre(table, self.vocabulary_size)
        return norm.float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def _clip(self) -> Tensor:
        """Clip the gradients of all optimizers by one norm, before any of them steps."""
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def build_optimizers(
    model: nn.Module,
    section: "OptimizerSection",
    *,
    capturable: bool = False,
    vocabulary_size: int | None = None,
    seed: int = 0,
) -> EmbeddingOptimizers:
    """The optimizers that the section [optimizer] of a config asks for.

    Args:
        model: unwrapped; its parameters may be DTensors.
        section: which optimizer the tables get, and all its numbers.
        capturable: keep step counts and learning rates on the device, for CUDA graphs.
        vocabulary_size: rows of the tables from this one on are padding; None for none.
        seed: of the rounding of first moments in bfloat16.
    """
    device = next(model.parameters()).device
    max_grad_norm = section.max_grad_norm or math.inf  # without clipping the norm is still wanted, to be shown
    matrices = _hidden_matrices(model, section) if section.matrices == "muon" else []
    hidden = [pair for group in matrices for pair in group["params"]]
    selected = param_groups(model, section.weight_decay, section.couple, exclude=hidden)
    centred = [p for group in selected if group.get("coupled") for _, p in group["params"]] if section.centre else []
    groups: list[Group] = [{**group, **_table_options(group["name"], section)} for group in selected]

    common: dict[str, Any] = {
        "betas": (section.beta1, section.beta2),
        "eps": section.eps,
        "weight_decay": section.weight_decay,
        "fused": True,
        "capturable": capturable,
    }
    optimizers: list[torch.optim.Optimizer] = []
    if section.embeddings == "coupled":
        coupled = CoupledAdamW(
            _with_lr(groups, section.lr, device if capturable else None),
            lr=section.lr,
            scale_exponent=section.scale_exponent,
            **family_of(section, device, vocabulary_size),
            state_dtype=torch.bfloat16 if section.state_dtype == "bfloat16" else None,  # the weights are float32
            state_seed=seed,
            max_grad_norm=max_grad_norm,
            **common,
        )
        optimizers.append(coupled)
    else:
        is_coupled = [group.pop("coupled", False) for group in groups]
        if section.embeddings == "sgd":
            tables = [group for group, coupled in zip(groups, is_coupled, strict=True) if coupled]
            groups = [group for group, coupled in zip(groups, is_coupled, strict=True) if not coupled]
            optimizers.append(_sgd(tables, section, device if capturable else None))
        adamw = _with_lr(groups, section.lr, device if capturable else None)
        optimizers.append(torch.optim.AdamW(adamw, lr=section.lr, **common))
    if matrices:
        muon = BatchedMuon(
            _with_lr(matrices, section.lr, device if capturable else None),
            lr=section.lr,
            momentum=section.muon.momentum,
            adjust_lr_fn=section.muon.adjust_lr_fn,
            capturable=capturable,
        )
        if section.embeddings == "coupled":
            clip_together(coupled, muon)
        optimizers.append(muon)
    return EmbeddingOptimizers(optimizers, max_grad_norm, centred, vocabulary_size)


def _hidden_matrices(model: nn.Module, section: "OptimizerSection") -> list[Group]:
    """The group of the blocks' matrices, for Muon."""
    try:
        matrices = hidden_matrices(model)
    except ValueError as error:
        raise UserError(
            'optimizer.matrices = "muon": the model has no matrix but its tables and heads; set it to "adamw"'
        ) from error
    decay = section.weight_decay if section.muon.weight_decay is None else section.muon.weight_decay
    group = {"name": "hidden_matrices", "params": list(matrices)}
    return [group | {"weight_decay": decay, "lr_factor": section.muon.lr_factor}]


def _table_options(name: str, section: "OptimizerSection") -> Group:
    """What [optimizer.tables] and [optimizer.input_table] say of a group of `param_groups`."""
    table = {"output_embeddings": section.tables, "input_embeddings": section.input_table}.get(name)
    if table is None:
        return {"lr_factor": 1.0}
    return {"lr_factor": table.lr_factor, "betas": section.betas_of(table), "eps": section.eps_of(table)}


def _with_lr(groups: list[Group], lr: float, device: torch.device | None) -> list[Group]:
    """The groups with their first learning rate, each in a tensor of its own where a device is given."""
    rates = [lr * group["lr_factor"] for group in groups]
    return [
        {**group, "lr": rate if device is None else torch.tensor(rate, device=device)}
        for group, rate in zip(groups, rates, strict=True)
    ]


def _sgd(tables: list[Group], section: "OptimizerSection", device: torch.device | None) -> torch.optim.SGD:
    assert section.sgd_factor is not None
    own = [
        {"name": group["name"], "params": group["params"], "weight_decay": 0.0, "lr_factor": section.sgd_factor}
        for group in tables
    ]
    is_sharded = any(is_distributed(p) for group in tables for _, p in group["params"])
    # torch's fused SGD does not know DTensors.
    return torch.optim.SGD(
        _with_lr(own, section.lr, device), lr=section.lr, momentum=section.sgd_momentum, fused=not is_sharded
    )


def family_of(section: "OptimizerSection", device: torch.device, vocabulary_size: int | None) -> dict[str, Any]:
    """The arguments of CoupledAdamW that say which member of the family of second moments it is.

    A row exponent that is annealed is a tensor: the state of the rows is then there from the first step on, also where
    the exponent begins or ends at 0, and a captured graph reads it from the device. For Coupled Adam itself the rows of
    the padding count, as they did in version 0.1.0; for the rest of the family they do not.

    Args:
        section: [optimizer] of a config.
        device: of the tables.
        vocabulary_size: rows of the tables from this one on are padding; None for none.
    """
    start = section.row_exponent_start
    row_exponent = section.row_exponent if start is None else torch.tensor(start, device=device)
    is_coupled_adam = start is None and (section.row_exponent, section.column_exponent) == (0.0, 1.0)
    return {
        "row_exponent": row_exponent,
        "column_exponent": section.column_exponent,
        "mean_free": section.mean_free,
        "vocabulary_size": None if is_coupled_adam and not section.mean_free else vocabulary_size,
    }


@torch.no_grad()
def centre(table: Tensor, vocabulary_size: int | None = None) -> None:
    """Subtract the mean embedding from all rows of a table (V, H), which may be sharded over ranks, in place.

    Args:
        table: (V, H).
        vocabulary_size: rows from this one on are padding: they move with the others, but do not count.
    """
    vocabulary_size = vocabulary_size or table.shape[0]
    local = local_part(table)  # (rows on this rank, H)
    counted = local[: rows_before_padding(table, vocabulary_size, "centred")]
    column_sums = PartialSum(counted.sum(dim=0, keepdim=True), process_groups(table, tensor_dim=0))
    Reduction([column_sums]).wait()
    local.sub_(column_sums.values / vocabulary_size)
