"""Quantise a table to integers and back.

Symmetric, round to nearest: the numbers of a row, or of 32 columns of a row, share one scale, which is the largest
absolute value divided by the largest integer.

Legend: H hidden size, G groups of columns.
"""

import torch
from torch import Tensor

LARGEST_INTEGER = {"int8": 127, "int4": 7}
GROUP = 32
GROUPS = {"row": None, "group of 32": GROUP}
"""Number of columns that share a scale, by name; None for the whole row."""


def quantise(rows: Tensor, integers: str, group: int | None) -> Tensor:
    """Round rows (n, H) to integers and back.

    Args:
        rows: floating-point numbers.
        integers: "int8" or "int4".
        group: columns that share a scale; None for the whole row. The last group may be shorter.

    Example:
        >>> quantise(torch.tensor([[7.0, 3.4, -0.4, 0.0]]), "int4", None)
        tensor([[7., 3., -0., 0.]])
    """
    largest = LARGEST_INTEGER[integers]
    columns = rows.shape[1]
    size = columns if group is None else group
    padded = torch.nn.functional.pad(rows, (0, -columns % size))
    groups: Tensor = padded.unflatten(1, (-1, size))  # (n, G, size)
    scale = groups.abs().amax(2, keepdim=True) / largest
    scale = torch.where(scale == 0, 1.0, scale)
    rounded: Tensor = (groups / scale).round() * scale
    return rounded.flatten(1)[:, :columns]
