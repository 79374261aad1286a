"""What a reader has to know of the runs behind the numbers: what the loss is of, which table, how many documents."""

from collections.abc import Iterable

from coupled_adam.metrics import INPUT_PREFIX, METRICS, TASK_LIMIT
from coupled_adam.study.results import Result


def loss_splits(results: Iterable[Result]) -> set[str]:
    """The splits that the losses are of: "test", or "val" where a corpus has no test split."""
    return {result.loss_split for result in results if result.metrics.get("loss") is not None}


def loss_name(results: Iterable[Result]) -> str:
    """What to call the loss in a sentence."""
    splits = loss_splits(results)
    if "val" not in splits:
        return METRICS["loss"].label
    return METRICS["val_loss"].label if splits == {"val"} else METRICS["loss"].symbol


def loss_note(results: Iterable[Result]) -> str:
    """What to say of losses that are not all of test text; empty where they are."""
    splits = loss_splits(results)
    if "val" not in splits:
        return ""
    if splits == {"val"}:
        return "The loss is that of the validation text: the corpus has no test split."
    return (
        "The loss is that of the test text in some runs and of the validation text in others, "
        "whose corpus has no test split."
    )


def limit_note(results: Iterable[Result]) -> str:
    """What to say of tasks that were tried on their first documents alone; empty where there are none."""
    limits = sorted({limit for result in results if (limit := result.metrics.get(TASK_LIMIT)) is not None})
    if not limits:
        return ""
    documents = " or ".join(f"{limit:g}" for limit in limits)
    return f"Of each task only the first {documents} documents were evaluated, for a try."


def table_note(results: Iterable[Result]) -> str:
    """What to say of measures of embeddings where a model has two tables; empty where none has."""
    untied = [result for result in results if not result.settings.get("tied", True)]
    if not untied:
        return ""
    note = "The embeddings of untied models are measured in the output table"
    keys = {key for result in untied for key, value in result.metrics.items() if value is not None}
    has_input = any(key.startswith(INPUT_PREFIX) for key in keys)
    return f"{note}; Further measures has the input table." if has_input else f"{note}."
