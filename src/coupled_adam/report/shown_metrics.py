"""Which metrics a table shows, in which order, and what a loss is called."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from coupled_adam.metrics import METRICS, Lead, Metric


def named(metric: Metric, splits: Collection[str]) -> Metric:
    """Rename a loss after the split it was measured on: without a test split it is a validation loss.

    Args:
        metric: any metric; only losses are renamed.
        splits: the splits on which the losses of the runs were measured.

    Example:
        >>> named(METRICS["loss"], {"val"}).heading
        'validation loss (↓)'
    """
    if "val" not in splits or metric.key not in ("loss", "val_loss"):
        return metric
    of_validation = METRICS["val_loss"].label
    if metric.key == "val_loss":
        label = f"{of_validation} while training"
    else:
        label = of_validation if set(splits) == {"val"} else f"test or {of_validation}"
    return replace(metric, label=label, symbol=label, latex=label)


def in_order(metrics: Iterable[Metric], lead: Lead) -> list[Metric]:
    """Sort metrics as in the paper's tables, or with the mean-embedding ratio and the other embedding metrics first.

    Example:
        >>> from coupled_adam.metrics import MAIN
        >>> [metric.key for metric in in_order(MAIN, "embeddings")]
        ['mu_norm_ratio', 'iso', 'mu_norm', 'r_cos', 'rho_log', 'kappa', 'loss', 'acc']
    """
    if lead == "loss":
        return list(metrics)
    return sorted(metrics, key=lambda metric: (not metric.of_table, metric.key != "mu_norm_ratio"))


def measured(metrics: Iterable[Metric], found: Iterable[Mapping[str, float | None]]) -> list[Metric]:
    """The metrics for which at least one run has a value.

    Args:
        metrics: the metrics to select from.
        found: the metrics of each run.
    """
    keys = {key for values in found for key, value in values.items() if value is not None}
    return [metric for metric in metrics if metric.key in keys]
