"""The paper's seven tasks: how lm-evaluation-harness calls them, how our results do, and what their mean is.

Nothing here needs lm-eval.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coupled_adam.base.errors import UserError
from coupled_adam.metrics import METRICS

# What every one of the seven is judged by. TruthfulQA's is the share of probability on true answers.
METRIC = "acc"
NO_TASKS = "none"
ALL_OF_PAPER = "paper"
MEAN = "acc"


@dataclass(frozen=True)
class PaperTask:
    """One of the seven."""

    name: str
    """In lm-eval."""
    key: str
    """In the results of a study."""
    folder: str
    """Of its definition, among those of lm-eval."""


# In the order of the paper's tables.
PAPER_TASKS = (
    PaperTask("arc_easy", "arc_easy", "arc"),
    PaperTask("arc_challenge", "arc_challenge", "arc"),
    PaperTask("hellaswag", "hellaswag", "hellaswag"),
    PaperTask("lambada_openai", "lambada", "lambada"),
    PaperTask("race", "race", "race"),
    PaperTask("truthfulqa_mc2", "truthfulqa", "truthfulqa"),
    PaperTask("winogrande", "winogrande", "winogrande"),
)
PAPER_NAMES = tuple(task.name for task in PAPER_TASKS)


def parse_tasks(text: str | None) -> list[str]:
    """The tasks that `--tasks` names, each once, in the order given.

    Args:
        text: names with commas between, "paper" among them for its seven; "none" for no task; None for the seven.

    Example:
        >>> parse_tasks("race, arc_easy,race")
        ['race', 'arc_easy']
        >>> parse_tasks("none")
        []
        >>> len(parse_tasks(None)), len(parse_tasks("paper,piqa"))
        (7, 8)
    """
    if text is None:
        return list(PAPER_NAMES)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--tasks is {text!r}, expected names with commas between, such as {PAPER_NAMES[0]},race")
    if NO_TASKS in names:
        if len(names) > 1:
            raise UserError(f"--tasks is {text!r}: {NO_TASKS!r} stands alone; leave it out, or the other names")
        return []
    return with_those_of_paper(names)


def with_those_of_paper(names: Iterable[str]) -> list[str]:
    """Names of tasks, with the seven in the place of "paper", each once."""
    return list(dict.fromkeys(each for name in names for each in (PAPER_NAMES if name == ALL_OF_PAPER else (name,))))


def label_of(name: str) -> str:
    """A task as tables name it; one that is not the paper's by its own name."""
    key = task_key(name)
    return METRICS[key].label if name in PAPER_NAMES else key


def task_key(name: str) -> str:
    """The name of a task in the results of a run; one that is not the paper's has that of lm-eval.

    Example:
        >>> task_key("lambada_openai"), task_key("piqa")
        ('lambada', 'piqa')
    """
    return next((task.key for task in PAPER_TASKS if task.name == name), name)


def mean_accuracy(accuracies: Mapping[str, float]) -> float | None:
    """The paper's Acc: the mean over the seven; None where one is missing.

    Args:
        accuracies: by the names of lm-eval; tasks that are not among the seven do not count.

    Example:
        >>> mean_accuracy(dict.fromkeys(PAPER_NAMES, 0.25) | {"piqa": 0.9})
        0.25
        >>> mean_accuracy({"race": 0.3}) is None
        True
    """
    if not accuracies.keys() >= set(PAPER_NAMES):
        return None
    return sum(accuracies[name] for name in PAPER_NAMES) / len(PAPER_NAMES)
