"""Notes on the runs behind the numbers: the split of the loss, the embedding table, the number of task documents."""

from collections.abc import Iterable

from coupled_adam.base.text import counted
from coupled_adam.metrics import INPUT_PREFIX, METRICS, TASK_LIMIT
from coupled_adam.study.results import Result


def loss_splits(results: Iterable[Result]) -> set[str]:
    """The splits of the losses: "test", or "val" if a corpus has no test split."""
    return {result.loss_split for result in results if result.metrics.get("loss") is not None}


def loss_name(results: Iterable[Result]) -> str:
    """Name of the loss in a sentence."""
    splits = loss_splits(results)
    if "val" not in splits:
        return METRICS["loss"].label
    return METRICS["val_loss"].label if splits == {"val"} else METRICS["loss"].symbol


def loss_note(results: Iterable[Result]) -> str:
    """Note on losses that are not all on test text; otherwise empty."""
    splits = loss_splits(results)
    if "val" not in splits:
        return ""
    if splits == {"val"}:
        return "The loss is measured on validation text, because the corpus has no test split."
    return (
        "The loss is measured on test text in some runs, and on validation text in runs whose corpus has no test split."
    )


def limit_note(results: Iterable[Result]) -> str:
    """Note on tasks that were evaluated only on their first documents; otherwise empty."""
    limits = sorted({limit for result in results if (limit := result.metrics.get(TASK_LIMIT)) is not None})
    if not limits:
        return ""
    *others, last = map(int, limits)
    documents = " or ".join([*(f"{limit:,}" for limit in others), counted(last, "document")])
    return f"Evaluated on only the first {documents} of each task."


def table_note(results: Iterable[Result]) -> str:
    """Note on embedding measures of models with two tables; empty without such models."""
    untied = [result for result in results if not result.settings.get("tied", True)]
    if not untied:
        return ""
    note = "For untied models, the embeddings are those of the output table"
    keys = {key for result in untied for key, value in result.metrics.items() if value is not None}
    has_input = any(key.startswith(INPUT_PREFIX) for key in keys)
    return f"{note}; the input table is under Further measures." if has_input else f"{note}."
