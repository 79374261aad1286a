"""The paper's numbers: 880 means with their standard deviations, and which of them are bold.

They are in published.csv, one row per number, spelled as in the paper's tables. `find_published` finds the number for a
cell of a study, by its size, its data and the settings of its optimizer.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from coupled_adam.base.text import shorthand
from coupled_adam.config.optimizer_names import is_coupled_adam
from coupled_adam.metrics import METRICS

# Tables of the paper, grouped by what they compare, which decides what is bold.
MAIN_TABLES = ("small_scale", "large_scale", "small_scale_downstream", "large_scale_downstream")
SCALE_TABLES = ("ablation_scale", "ablation_scale_downstream")
SGD_SEARCH_TABLES = ("ablation_sgd_search",)
SGD_BEST_TABLES = ("ablation_sgd_best", "ablation_sgd_best_downstream")
ALL_TABLES = (*MAIN_TABLES, *SCALE_TABLES, *SGD_SEARCH_TABLES, *SGD_BEST_TABLES)

# The paper's names are rounded: its 1.3B model has 1.336 billion parameters, and 105B tokens are four times 26.2B.
MODELS = {"125M": 125e6, "355M": 355e6, "760M": 760e6, "1.3B": 1.3e9, "2.6B": 2.6e9}
MODEL_TOLERANCE = 0.05
DATASETS = {"5B": 5e9, "10B": 10e9, "20B": 20e9, "26B": 26e9, "52B": 52e9, "105B": 105e9, "210B": 210e9}
DATASET_TOLERANCE = 0.02

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Published:
    """One number of the paper."""

    mean: float
    std: float | None
    """Over three seeds; None for the large models, which have one seed."""
    bold: bool
    """With three seeds: significantly better in that table. With one seed: the better of the two."""
    decimals: int

    @property
    def text(self) -> str:
        """Plain text, as printed in the paper, except that five values like 25.0(1.1) become 25.0(11)."""
        return shorthand(self.mean, self.std, self.decimals)


@cache
def published_numbers() -> dict[Key, Published]:
    """All numbers by (table, D, N, optimizer, metric), spelled as in the file.

    Example:
        >>> len(published_numbers())
        880
    """
    text = (files("coupled_adam.report") / "published.csv").read_text(encoding="utf-8")
    return {
        (row["table"], row["dataset_tokens"], row["model_params"], row["optimizer"], row["metric"]): Published(
            mean=float(row["mean"]),
            std=float(row["std"]) if row["std"] else None,
            bold=row["bold"] == "1",
            decimals=len(row["mean"].partition(".")[2]),
        )
        for row in csv.DictReader(text.splitlines())
    }


def lookup(table: str, dataset_tokens: str, model: str, optimizer: str, metric: str) -> Published | None:
    """Look up one number by its names in the file; None if the paper has none.

    Example:
        >>> lookup("small_scale", "5B", "125M", "Coupled", "kappa").text
        '4.8(2)'
    """
    return published_numbers().get((table, dataset_tokens, model, optimizer, metric))


def find_published(
    metric: str, tokens: int, parameters: int, settings: Mapping[str, Any], tables: Sequence[str] = ALL_TABLES
) -> Published | None:
    """Find the published number for a cell of a study.

    Args:
        metric: key of the metric in a study's results.
        tokens: data size D; must be within 2% of one of the paper's.
        parameters: model size N; must be within 5% of one of the paper's.
        settings: the optimizer section of the cell's config, and "tied".
        tables: tables of the paper to search, in this order.

    Returns:
        The number, or None if the paper does not have this size, metric or optimizer. The learning rate, the batch size
        and the text are not compared.

    Example:
        >>> find_published("rho_log", 5_000_000_000, 124_373_760, {"embeddings": "adamw"}).text
        '-54(3)'
    """
    known = METRICS.get(metric)
    dataset = nearest(DATASETS, tokens, DATASET_TOLERANCE)
    model = nearest(MODELS, parameters, MODEL_TOLERANCE)
    if known is None or known.published_key is None or dataset is None or model is None:
        return None
    for table in tables:
        for optimizer in paper_optimizers(settings):
            found = lookup(table, dataset, model, optimizer, known.published_key)
            if found is not None:
                return found
    return None


def nearest(names: Mapping[str, float], value: float, tolerance: float) -> str | None:
    """The name whose number is within a relative tolerance of a value; None without a match."""
    return next((name for name, number in names.items() if abs(value / number - 1) <= tolerance), None)


def paper_optimizers(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of an optimizer in the paper's tables; empty if the paper does not have it.

    Example:
        >>> paper_optimizers({"embeddings": "coupled", "scale_exponent": -2.0})
        ('Coupled (n=-2)',)
        >>> paper_optimizers({"embeddings": "sgd", "sgd_factor": 300.0})
        ('SGD (300)',)
    """
    if settings.get("output_bias", "none") != "none" or settings.get("matrices", "adamw") != "adamw":
        return ()
    if any(settings.get(key) for key in ("tables", "input_table", "logit_cap", "mu_loss")):
        return ()
    differs = not settings.get("tied", True) or settings.get("centre", False) or settings.get("z_loss", 0) != 0
    if differs:
        return ()
    match settings.get("embeddings"):
        case "adamw":
            return ("Standard", "Standard Adam")
        case "coupled" if is_coupled_adam(settings):
            n = settings.get("scale_exponent", 0)
            return ("Coupled", "Coupled Adam", "Coupled (n=0)") if n == 0 else (f"Coupled (n={n:g})",)
        case "sgd" if settings.get("sgd_momentum", 0.9) == 0.9:
            return (f"SGD ({settings.get('sgd_factor') or 0:g})",)
    return ()
