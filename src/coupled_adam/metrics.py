"""The registry of metrics: how each is spelled and named, which direction is better, and what it means.

Every table, page, log, tracker and terminal takes these from here. A metric has one key wherever it is stored: rows of
metrics.jsonl, trackers, results of a study. The key alone is that of the output table, or of the one table of a tied
model; an untied model has its input table under `input_` and the same key.

Rows name the loss `loss`, and their kind says of which text: a row `train` has the metric `train_loss` (`logged_key`).
`up_to_date` is the one place that knows how files of version 0.1.0 spell keys.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from coupled_adam.base.text import escape_latex

Better = Literal["lower", "higher"]
Lead = Literal["loss", "embeddings"]
"""What tables and reports begin with."""
Value = TypeVar("Value")

ARROWS = {"lower": "↓", "higher": "↑", None: ""}
LATEX_ARROWS = {"lower": r" ($\downarrow$)", "higher": r" ($\uparrow$)", None: ""}
NATS = "nats per token"
"""The unit of every loss."""


@dataclass(frozen=True)
class Metric:
    """One metric of a run or of a table."""

    key: str
    """Its name in files, trackers and code; of a table, also that of its field in EmbeddingMetrics."""
    label: str
    """Its name in words."""
    better: Better | None
    """The direction in which it is better; None: neither, and nothing is tested."""
    decimals: int
    """Decimals of a mean over several seeds, as in the paper's tables."""
    meaning: str
    """What it is, in a few words."""
    symbol: str = ""
    """Its name at the head of a column, as the paper writes it; not given: the label."""
    latex: str = ""
    """The symbol in LaTeX, with no macro that a reader would have to define; not given: the symbol, escaped."""
    short: str = ""
    """Its name on one line of a terminal, in ASCII; not given: the symbol."""
    published_key: str | None = None
    """Its name in the published tables; None: it is not there."""
    single_decimals: int | None = None
    """Decimals of a single run, where the paper shows more of them (Tab. results_L)."""
    of_table: bool = False
    """Whether it measures an embedding table, and not what the model predicts or how it trains."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "symbol", self.symbol or self.label)
        object.__setattr__(self, "latex", self.latex or escape_latex(self.symbol))
        object.__setattr__(self, "short", self.short or self.symbol)

    @property
    def arrow(self) -> str:
        """↓ where lower is better, ↑ where higher is, else empty."""
        return ARROWS[self.better]

    @property
    def label_with_arrow(self) -> str:
        """The label and the direction, for a list in words.

        Example:
            >>> METRICS["mu_norm_ratio"].label_with_arrow, METRICS["mean_norm"].label_with_arrow
            ('mean-embedding ratio ↓', 'mean length')
        """
        return f"{self.label} {self.arrow}".rstrip()

    @property
    def heading(self) -> str:
        """Symbol and arrow, for the head of a column.

        Example:
            >>> METRICS["loss"].heading
            'loss (↓)'
        """
        return f"{self.symbol} ({self.arrow})" if self.better else self.symbol

    @property
    def latex_heading(self) -> str:
        """Symbol and arrow in LaTeX."""
        return self.latex + LATEX_ARROWS[self.better]

    def decimals_of(self, count: int) -> int:
        """Decimals of a mean over `count` runs."""
        return self.decimals if count > 1 or self.single_decimals is None else self.single_decimals


# In nats per token. The first is the paper's.
LOSSES = (
    Metric("loss", "test loss", "lower", 2, NATS, "loss", r"$\mathcal{L}$", single_decimals=3),
    Metric("val_loss", "validation loss", "lower", 2, NATS, single_decimals=3),
    Metric("train_loss", "training loss", "lower", 2, NATS, short="loss", single_decimals=3),
    Metric("loss_standard_error", "standard error of the loss", None, 4, NATS),
)

_TABLE_ROUNDED = "test loss with the table rounded to integers, one scale for"
# Under `evaluation.quantised_loss`; `embeddings.integers` says how a table is rounded.
QUANTISED_LOSSES = tuple(
    Metric(
        f"loss_{integers}_{key}",
        f"test loss, table in {integers}, {scale}",
        "lower",
        2,
        f"{_TABLE_ROUNDED} {shared}; {NATS}",
        f"{integers}, {scale}",
        single_decimals=3,
    )
    for integers in ("int8", "int4")
    for key, scale, shared in (("row", "by row", "a row"), ("group", "by 32", "32 columns of a row"))
)

ACCURACY = Metric("acc", "accuracy", "higher", 3, "mean over the downstream tasks", latex="Acc")
# The order of Tab. results_S_downstream, which ends with their mean, acc.
TASKS = tuple(
    Metric(key, label, "higher", 2, "accuracy in a downstream task", published_key=key)
    for key, label in (
        ("arc_easy", "ARC easy"),
        ("arc_challenge", "ARC challenge"),
        ("hellaswag", "HellaSwag"),
        ("lambada", "LAMBADA"),
        ("race", "RACE"),
        ("truthfulqa", "TruthfulQA"),
        ("winogrande", "WinoGrande"),
    )
)

# `rho` follows the paper's text; its tables hold what `rho_log` is.
RHO = "\N{GREEK SMALL LETTER RHO}"
_OF_TABLES = (
    Metric("iso", "ISO", "higher", 2, "isotropy: 1 when no direction stands out, near 0 when one does"),
    Metric("mu_norm", "length of the mean", "lower", 2, "‖μ‖, of the mean embedding", "‖μ‖", r"$\|\mu\|$"),
    Metric(
        "mu_norm_ratio",
        "mean-embedding ratio",
        "lower",
        2,
        "length of the mean over the mean length; 0: centred at the origin",
        "‖μ‖ ratio",
        r"$\|\mu\|^{\mathrm{r}}$",
        "mu ratio",
    ),
    Metric(
        "r_cos",
        "r_cos (%)",
        "higher",
        0,
        "correlation of cosine and human word similarity, 4 benchmarks",
        "r_cos",
        r"$r_{\cos}$",
    ),
    Metric(
        "rho_log",
        "rho, log p (%)",
        "higher",
        0,
        "correlation of length and log frequency, as in the published tables",
        RHO,
        r"$\rho$",
        published_key="rho",
    ),
    Metric("kappa", "kappa (%)", "higher", 1, "smallest over largest singular value", "κ", r"$\kappa$"),
    Metric("mean_norm", "mean length", None, 2, "of an embedding, ‖e‖", "mean ‖e‖", r"$\overline{\|e_i\|}$"),
    Metric("iso_both_signs", "ISO, both signs", "higher", 2, "as ISO, along each direction both ways: stricter"),
    Metric("iso_score", "IsoScore", "higher", 2, "how evenly the variance spreads over all directions, from 0 to 1"),
    Metric("mean_cosine", "mean cosine", "lower", 2, "of two different tokens: 0 when they point everywhere"),
    Metric(
        "r_cos_5",
        "r_cos_5 (%)",
        "higher",
        0,
        "as r_cos, over 5 benchmarks, as the authors' code takes it",
        "r_cos, 5 sets",
        r"$r_{\cos}$, 5 sets",
    ),
    Metric(
        "rho", "rho, p (%)", "higher", 0, "correlation of length and frequency", f"{RHO}, with p", r"$\rho$, with $p$"
    ),
    Metric("spearman", "Spearman (%)", "higher", 0, "as r_cos, correlation of ranks", "Spearman"),
)
NEED_WORDS = ("r_cos", "r_cos_5", "spearman")
"""Those of a table that need word pairs with human scores."""

_MEASURED = {
    metric.key: metric for metric in (*LOSSES, ACCURACY, *(replace(metric, of_table=True) for metric in _OF_TABLES))
}
_MAIN_KEYS = ("loss", "acc", "iso", "mu_norm", "mu_norm_ratio", "r_cos", "rho_log", "kappa")
MAIN = tuple(replace(_MEASURED[key], published_key=_MEASURED[key].published_key or key) for key in _MAIN_KEYS)
"""In the order of Tab. results_S and Tab. results_L."""
OTHERS = tuple(metric for key, metric in _MEASURED.items() if key not in _MAIN_KEYS)
"""Measured here beside those of the paper."""
TABLE_METRICS = tuple(metric for metric in (*MAIN, *OTHERS) if metric.of_table)
"""Those of one embedding table; each is a field of EmbeddingMetrics."""

# How a training goes: in rows `train` of metrics.jsonl alone.
PROGRESS = (
    Metric("tokens", "tokens", None, 0, "trained on so far"),
    Metric("lr", "learning rate", None, 4, "of the step", short="lr"),
    Metric("row_exponent", "row exponent", None, 3, "of the coupled second moment at this step, where it is annealed"),
    Metric("grad_norm", "gradient norm", None, 3, "of all gradients, before clipping", short="grad"),
    Metric("tokens_per_second", "tokens per second", "higher", 0, "over all ranks", "tokens/s", short="tok/s"),
    Metric("mfu", "model FLOP utilisation", "higher", 2, "part of the device's peak, from 0 to 1", short="MFU"),
    Metric("memory_bytes", "memory", "lower", 0, "most so far, in bytes"),
)

INPUT_PREFIX = "input_"
"""Before the key, where it is that of the input table of an untied model."""


def of_input_table(metric: Metric) -> Metric:
    """The same metric of the input table; the paper's models are tied, so it has no published counterpart."""
    return replace(
        metric,
        key=INPUT_PREFIX + metric.key,
        label=f"{metric.label}, input table",
        symbol=f"{metric.symbol}, input",
        latex=f"{metric.latex}, input",
        short=f"{metric.short}, input",
        published_key=None,
    )


_OF_INPUT_TABLES = tuple(map(of_input_table, TABLE_METRICS))
METRICS: dict[str, Metric] = {
    metric.key: metric for metric in (*MAIN, *TASKS, *OTHERS, *QUANTISED_LOSSES, *_OF_INPUT_TABLES, *PROGRESS)
}
"""Every metric by its key, in the order in which they are shown."""

# Of these there is no better or worse, so they are not among METRICS; `theory_metrics` says what each is.
THEORY_PREFIX = "theory_"

FREQUENCY_BINS = 10
"""Bins of tokens by their count in the training text: `evaluation.loss_by_frequency` says which token is in which."""
FREQUENCY_PREFIX = "frequency_"
# Of one bin each, under `bin_key`: so they are not among METRICS.
BIN_LOSS = Metric(
    f"{FREQUENCY_PREFIX}loss", "loss by token frequency", "lower", 3, NATS, "loss", r"$\mathcal{L}$", single_decimals=3
)
BIN_CALIBRATION = Metric(
    f"{FREQUENCY_PREFIX}calibration",
    "calibration by token frequency",
    None,
    3,
    "log of predicted over observed share of the bin's tokens; below 0: underestimated",
    "calibration",
)
BIN_TOKENS = Metric(f"{FREQUENCY_PREFIX}tokens", "tokens", None, 0, "of the vocabulary, in the bin")
BIN_TARGETS = Metric(f"{FREQUENCY_PREFIX}targets", "targets", None, 0, "evaluated tokens that are in the bin")
BY_FREQUENCY = (BIN_LOSS, BIN_CALIBRATION, BIN_TOKENS, BIN_TARGETS)
# Not measured itself: the documents of a task that were evaluated, from the first; None or absent: all.
TASK_LIMIT = "task_limit"

_LOSS_OF_KIND = {"train": "train_loss", "val": "val_loss", "test": "loss"}
_FORMER_KEYS = {"isoscore": "iso_score", "input_isoscore": "input_iso_score"}
_FORMER_OUTPUT_PREFIX = "output_"


def table_key(role: str, key: str) -> str:
    """The key of a number of one table of a model.

    Args:
        role: "output" for the output table or the one of a tied model, "input" for that of an untied one.
        key: of the number.

    Example:
        >>> table_key("output", "iso"), table_key("input", "iso")
        ('iso', 'input_iso')
    """
    assert role in ("output", "input"), role
    return INPUT_PREFIX + key if role == "input" else key


def bin_key(metric: Metric, number: int) -> str:
    """The key of a metric of one bin.

    Args:
        metric: of BY_FREQUENCY.
        number: of the bin, from 1 for the most frequent tokens to 10.

    Example:
        >>> bin_key(BIN_LOSS, 10)
        'frequency_loss_10'
    """
    assert metric in BY_FREQUENCY, metric.key
    assert 1 <= number <= FREQUENCY_BINS, number
    return f"{metric.key}_{number}"


def logged_key(kind: str, name: str) -> str:
    """The key of a metric from the kind of a row in metrics.jsonl and the name it has there.

    Example:
        >>> logged_key("val", "loss"), logged_key("embeddings", "iso")
        ('val_loss', 'iso')
    """
    return _LOSS_OF_KIND.get(kind, name) if name == "loss" else name


def up_to_date(values: Mapping[str, Value], kind: str = "result") -> dict[str, Value]:
    """Values under the keys of this registry, whichever version wrote them.

    Version 0.1.0 wrote `output_iso` into rows of embeddings, and `isoscore` into results.

    Args:
        values: of a row of metrics.jsonl, or the metrics of a result.
        kind: of the row; "result" for those of a result, where `output_` may be the beginning of a task's name.

    Example:
        >>> up_to_date({"step": 8, "output_iso": 0.5, "input_iso": 0.4}, "embeddings")
        {'step': 8, 'iso': 0.5, 'input_iso': 0.4}
        >>> up_to_date({"isoscore": 0.2, "output_quality": 0.1})
        {'iso_score': 0.2, 'output_quality': 0.1}
    """
    if kind == "embeddings":
        values = {key.removeprefix(_FORMER_OUTPUT_PREFIX): value for key, value in values.items()}
    return {_FORMER_KEYS.get(key, key): value for key, value in values.items()}


def other_tasks(found: Iterable[Mapping[str, float | None]]) -> list[Metric]:
    """The tasks in results that are not the paper's, by name.

    Args:
        found: what each run has measured.
    """
    keys = {key for values in found for key in values if key not in METRICS and key != TASK_LIMIT}
    names = sorted(key for key in keys if not key.startswith((THEORY_PREFIX, FREQUENCY_PREFIX)))
    return [Metric(name, name, "higher", 2, TASKS[0].meaning) for name in names]


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
    of_validation = METRICS["val_loss"].label
    if metric.key == "val_loss":
        label = f"{of_validation} while training"
    else:
        label = of_validation if set(splits) == {"val"} else f"test or {of_validation}"
    return replace(metric, label=label, symbol=label, latex=label)


def in_order(metrics: Iterable[Metric], lead: Lead) -> list[Metric]:
    """The metrics in the order of the paper's tables, or with those of the embeddings first, the mean-embedding ratio
    before all others.

    Example:
        >>> [metric.key for metric in in_order(MAIN, "embeddings")]
        ['mu_norm_ratio', 'iso', 'mu_norm', 'r_cos', 'rho_log', 'kappa', 'loss', 'acc']
    """
    if lead == "loss":
        return list(metrics)
    return sorted(metrics, key=lambda metric: (not metric.of_table, metric.key != "mu_norm_ratio"))


def measured(metrics: Iterable[Metric], found: Iterable[Mapping[str, float | None]]) -> list[Metric]:
    """Those metrics that at least one run has a value of.

    Args:
        metrics: the metrics that are wanted.
        found: what each run has measured.
    """
    keys = {key for values in found for key, value in values.items() if value is not None}
    return [metric for metric in metrics if metric.key in keys]
