"""Which optimizers of a report are baselines, and which optimizers are compared with which baseline.

A baseline trains the embeddings with AdamW. AdamW with a further method, such as mu-loss or its own betas for the
tables, is a rival of plain AdamW.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from coupled_adam.report.grid import CellRuns

METHODS = ("centre", "mu_loss", "z_loss", "logit_cap")
TABLES = ("tables", "input_table")
SETUPS = ("tied", "output_bias", "matrices")


def methods_of(settings: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """What a run adds to its optimizer: a change of the loss, the logits or the mean, or settings of the tables alone,
    except their learning rate.

    Example:
        >>> sorted(methods_of({"centre": False, "mu_loss": 1e-4, "tables": {"lr_factor": 3.0, "beta2": 0.99}}))
        [('mu_loss', 0.0001), ('tables.beta2', 0.99)]
    """
    own = {
        f"{section}.{key}": value
        for section in TABLES
        for key, value in (settings.get(section) or {}).items()
        if key != "lr_factor"
    }
    return frozenset((own | {key: settings[key] for key in METHODS if settings.get(key)}).items())


def baseline_places(cells: Sequence[CellRuns]) -> list[int]:
    """Indices of the baselines among the cells of one D and model: AdamW for the embeddings. AdamW with a further
    method, such as mu-loss, is no baseline beside AdamW without it."""
    standard = {place: cell.variant.settings for place, cell in enumerate(cells) if cell.variant.role == "standard"}
    return [
        place
        for place, own in standard.items()
        if not any(methods_of(other) < methods_of(own) and have_same_setup(other, own) for other in standard.values())
    ]


def baseline_pairs(cells: Sequence[CellRuns]) -> list[tuple[int, int]]:
    """Index pairs of cells of one D and model, (baseline, optimizer): every baseline with every other optimizer. AdamW
    with a further method is compared only with AdamW in the same setup."""
    baselines = baseline_places(cells)
    others = [place for place in range(len(cells)) if place not in baselines]
    return [
        (first, second)
        for first, second in itertools.product(baselines, others)
        if cells[second].variant.role != "standard"
        or have_same_setup(cells[first].variant.settings, cells[second].variant.settings)
    ]


def have_same_setup(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two runs agree in the tables, the output bias and the optimizer of the matrices."""
    return all(first.get(key) == second.get(key) for key in SETUPS)
