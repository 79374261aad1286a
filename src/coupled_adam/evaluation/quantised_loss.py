"""The loss of a model with quantised vocabulary tables; everything else keeps its precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coupled_adam.data.tokens import Tokens
from coupled_adam.embeddings.integers import GROUPS, LARGEST_INTEGER, quantise
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.metrics import QUANTISED_LOSSES
from coupled_adam.models.language_model import LanguageModel


def quantised_losses(model: LanguageModel, tokens: Tokens, *, bf16: bool | None = None) -> dict[str, float | None]:
    """Compute the loss over all tokens of a split for each kind of quantisation, by the keys of QUANTISED_LOSSES.

    Args:
        model: on its device; its tables are restored afterwards.
        tokens: of the split.
        bf16: as in `loss_over`.
    """
    ways = [(integers, group) for integers in LARGEST_INTEGER for group in GROUPS.values()]
    losses: dict[str, float | None] = {}
    for metric, (integers, group) in zip(QUANTISED_LOSSES, ways, strict=True):
        with rounded_tables(model, integers, group):
            losses[metric.key] = loss_over(model, tokens, bf16=bf16).loss
    return losses


@contextmanager
def rounded_tables(model: LanguageModel, integers: str, group: int | None) -> Iterator[None]:
    """Quantise the vocabulary tables of a model, a tied one once, and restore them exactly at the end.

    Args:
        model: its input and output tables are quantised.
        integers: "int8" or "int4".
        group: columns that share a scale; None for the whole row.
    """
    tables = [model.get_parameter(name) for name in dict.fromkeys((model.input_table_name, model.output_table_name))]
    exact = [table.detach().clone() for table in tables]
    try:
        with torch.no_grad():
            for table in tables:
                table.copy_(quantise(table, integers, group))
        yield
    finally:
        with torch.no_grad():
            for table, values in zip(tables, exact, strict=True):
                table.copy_(values)
