"""The numbers a run is judged by: how each is named, which direction is better, and how the paper prints it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from coupled_adam.base.notation import escape_latex
from coupled_adam.evaluation.downstream.tasks import PAPER_TASKS

Better = Literal["lower", "higher"]
Lead = Literal["loss", "embeddings"]
"""What tables and reports begin with."""

ARROWS = {"lower": "↓", "higher": "↑", None: ""}
LATEX_ARROWS = {"lower": r" ($\downarrow$)", "higher": r" ($\uparrow$)", None: ""}


@dataclass(frozen=True)
class Metric:
    """One metric of a run."""

    key: str
    """Its name in the results of a run."""
    label: str
    """Its name in plain text."""
    latex: str
    """Its name in LaTeX, with no macro that a reader would have to define."""
    better: Better | None
    """The direction in which it is better; None: neither, and nothing is tested."""
    decimals: int
    """Decimals of a mean over several seeds, as in the paper's tables."""
    published_key: str | None = None
    """Its name in the published tables; None: it is not there."""
    single_decimals: int | None = None
    """Decimals of a single run, where the paper shows more of them (Tab. results_L)."""

    @property
    def arrow(self) -> str:
        """↓ where lower is better, ↑ where higher is, else empty."""
        return ARROWS[self.better]

    @property
    def heading(self) -> str:
        """Label and arrow, as a table shows them.

        Example:
            >>> METRICS["loss"].heading
            'loss (↓)'
        """
        return f"{self.label} ({self.arrow})" if self.better else self.label

    @property
    def latex_heading(self) -> str:
        """Label and arrow in LaTeX."""
        return self.latex + LATEX_ARROWS[self.better]

    def decimals_of(self, count: int) -> int:
        """Decimals of a mean over `count` runs."""
        return self.decimals if count > 1 or self.single_decimals is None else self.single_decimals


# The order of Tab. results_S and Tab. results_L.
MAIN = (
    Metric("loss", "loss", r"$\mathcal{L}$", "lower", 2, "loss", single_decimals=3),
    Metric("acc", "accuracy", "Acc", "higher", 3, "acc"),
    Metric("iso", "ISO", "ISO", "higher", 2, "iso"),
    Metric("mu_norm", "‖μ‖", r"$\|\mu\|$", "lower", 2, "mu_norm"),
    Metric("mu_norm_ratio", "‖μ‖ ratio", r"$\|\mu\|^{\mathrm{r}}$", "lower", 2, "mu_norm_ratio"),
    Metric("r_cos", "r_cos", r"$r_{\cos}$", "higher", 0, "r_cos"),
    Metric("rho_log", "\N{GREEK SMALL LETTER RHO}", r"$\rho$", "higher", 0, "rho"),
    Metric("kappa", "κ", r"$\kappa$", "higher", 1, "kappa"),
)

# The order of Tab. results_S_downstream, which ends with the mean of the seven, acc.
TASKS = (
    Metric("arc_easy", "ARC easy", "ARC easy", "higher", 2, "arc_easy"),
    Metric("arc_challenge", "ARC challenge", "ARC challenge", "higher", 2, "arc_challenge"),
    Metric("hellaswag", "HellaSwag", "HellaSwag", "higher", 2, "hellaswag"),
    Metric("lambada", "LAMBADA", "LAMBADA", "higher", 2, "lambada"),
    Metric("race", "RACE", "RACE", "higher", 2, "race"),
    Metric("truthfulqa", "TruthfulQA", "TruthfulQA", "higher", 2, "truthfulqa"),
    Metric("winogrande", "WinoGrande", "WinoGrande", "higher", 2, "winogrande"),
)

# Measured here beside those of the paper. `rho` follows the paper's text; its tables hold what `rho_log` is.
OTHERS = (
    Metric("val_loss", "validation loss", "validation loss", "lower", 2, single_decimals=3),
    Metric("train_loss", "training loss", "training loss", "lower", 2, single_decimals=3),
    Metric("loss_standard_error", "standard error of the loss", "standard error of the loss", None, 4),
    Metric("mean_norm", "mean ‖e‖", r"$\overline{\|e_i\|}$", None, 2),
    Metric("iso_both_signs", "ISO, both signs", "ISO, both signs", "higher", 2),
    Metric("isoscore", "IsoScore", "IsoScore", "higher", 2),
    Metric("mean_cosine", "mean cosine", "mean cosine", "lower", 2),
    Metric("r_cos_5", "r_cos, 5 sets", r"$r_{\cos}$, 5 sets", "higher", 0),
    Metric("rho", "\N{GREEK SMALL LETTER RHO}, with p", r"$\rho$, with $p$", "higher", 0),
)

# All but these and the tasks measure an embedding table; the input table of an untied model has them with this prefix.
INPUT_PREFIX = "input_"
NOT_OF_A_TABLE = {"loss", "acc", "val_loss", "train_loss", "loss_standard_error"}


def of_input_table(metric: Metric) -> Metric:
    """The same metric of the input table; the paper's models are tied, so it has no published counterpart."""
    return Metric(
        INPUT_PREFIX + metric.key, f"{metric.label}, input", f"{metric.latex}, input", metric.better, metric.decimals
    )


_OF_THE_MODEL = {metric.key: metric for metric in (*MAIN, *TASKS, *OTHERS)}

METRICS: dict[str, Metric] = _OF_THE_MODEL | {
    INPUT_PREFIX + metric.key: of_input_table(metric) for metric in (*MAIN, *OTHERS) if metric.key not in NOT_OF_A_TABLE
}
"""Every metric by its key, in the order in which they are shown."""


# Of these there is no better or worse, so they are not among METRICS; `theory_metrics` says what each is.
THEORY_PREFIX = "theory_"
# Not measured itself: the documents of a task that were evaluated, from the first; None or absent: all.
TASK_LIMIT = "task_limit"


def task_key(name: str) -> str:
    """The name of a task in the results of a run; one that is not the paper's has that of lm-eval.

    Example:
        >>> task_key("lambada_openai"), task_key("piqa")
        ('lambada', 'piqa')
    """
    return next((task.key for task in PAPER_TASKS if task.name == name), name)


def other_tasks(found: Iterable[Mapping[str, float | None]]) -> list[Metric]:
    """The tasks in results that are not the paper's, by name.

    Args:
        found: what each run has measured.
    """
    keys = {key for values in found for key in values if key not in METRICS and key != TASK_LIMIT}
    names = sorted(key for key in keys if not key.startswith(THEORY_PREFIX))
    return [Metric(name, name, escape_latex(name), "higher", 2) for name in names]


def named(metric: Metric, splits: Collection[str]) -> Metric:
    """The metric under the name of the text it was measured on: a corpus without a test split has a validation loss.

    Args:
        metric: any; all but the losses stay as they are.
        splits: the splits that the losses of all runs in question are of.

    Example:
        >>> named(METRICS["loss"], {"val"}).heading
        'validation loss (↓)'
    """
    if "val" not in splits or metric.key not in ("loss", "val_loss"):
        return metric
    if metric.key == "val_loss":
        label = "validation loss while training"
    else:
        label = "validation loss" if set(splits) == {"val"} else "test or validation loss"
    return replace(metric, label=label, latex=label)


def in_order(metrics: Iterable[Metric], lead: Lead) -> list[Metric]:
    """The metrics in the order of the paper's tables, or with those of the embeddings first, the mean-embedding ratio
    before all others.

    Example:
        >>> [metric.key for metric in in_order(MAIN, "embeddings")]
        ['mu_norm_ratio', 'iso', 'mu_norm', 'r_cos', 'rho_log', 'kappa', 'loss', 'acc']
    """
    if lead == "loss":
        return list(metrics)
    return sorted(metrics, key=lambda metric: (not is_of_a_table(metric), metric.key != "mu_norm_ratio"))


def is_of_a_table(metric: Metric) -> bool:
    """Whether it measures embeddings, and not what the model predicts."""
    return metric.key in METRICS and metric.key not in NOT_OF_A_TABLE and metric not in TASKS


def measured(metrics: Iterable[Metric], found: Iterable[Mapping[str, float | None]]) -> list[Metric]:
    """Those metrics that at least one run has a value of.

    Args:
        metrics: the metrics that are wanted.
        found: what each run has measured.
    """
    keys = {key for values in found for key, value in values.items() if value is not None}
    return [metric for metric in metrics if metric.key in keys]
