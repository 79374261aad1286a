"""The optimizers of a training run: one of three for the vocabulary tables, AdamW for everything else.

The three are what the paper compares: AdamW ("adamw"), Coupled Adam ("coupled", with the exponents of its family of
second moments) and SGD ("sgd"). All of them clip the gradients by one global norm. Letters: V vocabulary rows, H width.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from coupled_adam.optimizer import CoupledAdamW, param_groups
from coupled_adam.optimizer.sharding import PartialSum, Reduction, is_distributed, local_part, process_groups
from coupled_adam.training.embedding_monitor import rows_before_padding

if TYPE_CHECKING:
    from coupled_adam.config.run_sections import OptimizerSection


class EmbeddingOptimizers:
    """All optimizers of a run, stepped as one."""

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        lr_factors: list[float],
        max_grad_norm: float,
        centred_tables: list[Tensor],
        vocabulary_size: int | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.lr_factors = lr_factors
        self.max_grad_norm = max_grad_norm
        self.centred_tables = centred_tables
        self.vocabulary_size = vocabulary_size

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step, in place where a captured graph reads it from the device."""
        for optimizer, factor in zip(self.optimizers, self.lr_factors, strict=True):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * factor)
                else:
                    group["lr"] = lr * factor

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
        if len(self.optimizers) == 1 and isinstance(self.optimizers[0], CoupledAdamW):
            self.optimizers[0].step()
            norm = self.optimizers[0].grad_norm
            assert norm is not None
        else:
            norm = self._clip()
            for optimizer in self.optimizers:
                optimizer.step()
        for table in self.centred_tables:
            centre(table, self.vocabulary_size)
        return norm.float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def _clip(self) -> Tensor:
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def build_optimizers(
    model: nn.Module, section: "OptimizerSection", *, capturable: bool = False, vocabulary_size: int | None = None
) -> EmbeddingOptimizers:
    """The optimizers that the section [optimizer] of a config asks for.

    Args:
        model: unwrapped; its parameters may be DTensors.
        section: which optimizer the tables get, and all its numbers.
        capturable: keep step counts and learning rates on the device, for CUDA graphs.
        vocabulary_size: rows of the tables from this one on are padding; None for none.
    """
    device = next(model.parameters()).device
    common: dict[str, Any] = {
        "betas": (section.beta1, section.beta2),
        "eps": section.eps,
        "weight_decay": section.weight_decay,
        "fused": True,
    }

    def new_lr() -> float | Tensor:
        return torch.tensor(section.lr, device=device) if capturable else section.lr

    max_grad_norm = section.max_grad_norm or math.inf  # without clipping the norm is still wanted, to be shown
    selected = param_groups(model, section.weight_decay, section.couple)
    centred = [p for group in selected if group.get("coupled") for _, p in group["params"]] if section.centre else []

    if section.embeddings == "coupled":
        coupled = CoupledAdamW(
            selected,
            lr=new_lr(),
            scale_exponent=section.scale_exponent,
            **family_of(section, device, vocabulary_size),
            max_grad_norm=max_grad_norm,
            capturable=capturable,
            **common,
        )
        return EmbeddingOptimizers([coupled], [1.0], max_grad_norm, centred, vocabulary_size)
    if section.embeddings == "adamw":
        standard = param_groups(model, section.weight_decay, "none")
        adamw = torch.optim.AdamW(standard, lr=new_lr(), capturable=capturable, **common)
        return EmbeddingOptimizers([adamw], [1.0], max_grad_norm, centred, vocabulary_size)
    assert section.embeddings == "sgd"
    assert section.sgd_factor is not None
    tables = [{**group, "weight_decay": 0.0} for group in selected if group.pop("coupled", False)]
    names = {group["name"] for group in tables}
    others = [group for group in selected if group["name"] not in names]
    is_sharded = any(is_distributed(p) for group in tables for _, p in group["params"])
    # torch's fused SGD does not know DTensors.
    sgd = torch.optim.SGD(tables, lr=new_lr(), momentum=section.sgd_momentum, fused=not is_sharded)
    adamw = torch.optim.AdamW(others, lr=new_lr(), capturable=capturable, **common)
    return EmbeddingOptimizers([sgd, adamw], [section.sgd_factor, 1.0], max_grad_norm, centred, vocabulary_size)


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
