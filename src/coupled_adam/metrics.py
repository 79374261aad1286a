"""Registry of metrics: the key, names, direction and meaning of each.

All tables, pages, logs and trackers use this registry. A metric has the same key everywhere: in metrics.jsonl, trackers
and results of a study. Keys without a prefix refer to the output table, or to the only table of a tied model; keys of
an untied model's input table start with `input_`.

A row of metrics.jsonl calls the loss `loss`, and its kind says on which text: a `train` row has the metric `train_loss`
(see `logged_key`). Only `up_to_date` handles the keys of version 0.1.0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from coupled_adam.base.text import escape_latex, fixed, four_digits, shorthand

Better = Literal["lower", "higher"]
Lead = Literal["loss", "embeddings"]
"""What tables and reports start with."""
Value = TypeVar("Value")

ARROWS = {"lower": "↓", "higher": "↑", None: ""}
LATEX_ARROWS = {"lower": r" ($\downarrow$)", "higher": r" ($\uparrow$)", None: ""}
NATS = "nats per token"
"""The unit of every loss."""


@dataclass(frozen=True)
class Metric:
    """One metric of a run or of a table."""

    key: str
    """Name in files, trackers and code; for a table's metric, also its field in EmbeddingMetrics."""
    label: str
    """Name in running text."""
    better: Better | None
    """The better direction; None for metrics without one, which are not tested."""
    decimals: int
    """Decimals of a mean over several seeds, as in the paper's tables."""
    meaning: str
    """Short description."""
    symbol: str = ""
    """Column heading, as in the paper; defaults to the label."""
    latex: str = ""
    """The symbol in LaTeX, without custom macros; defaults to the escaped symbol."""
    short: str = ""
    """Name for one line on a terminal, in ASCII; defaults to the symbol."""
    published_key: str | None = None
    """Name in the published tables; None if it is not there."""
    single_decimals: int | None = None
    """Decimals of a single run, if the paper shows more of them (Tab. results_L)."""
    of_table: bool = False
    """Whether it measures an embedding table, rather than predictions or training."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "symbol", self.symbol or self.label)
        object.__setattr__(self, "latex", self.latex or escape_latex(self.symbol))
        object.__setattr__(self, "short", self.short or self.symbol)

    @property
    def arrow(self) -> str:
        """↓ if lower is better, ↑ if higher is better, otherwise empty."""
        return ARROWS[self.better]

    @property
    def label_with_arrow(self) -> str:
        """Label and direction, for running text.

        Example:
            >>> METRICS["mu_norm_ratio"].label_with_arrow, METRICS["mean_norm"].label_with_arrow
            ('mean-embedding ratio ↓', 'mean length')
        """
        return f"{self.label} {self.arrow}".rstrip()

    @property
    def heading(self) -> str:
        """Column heading: symbol and arrow.

        Example:
            >>> METRICS["loss"].heading
            'loss (↓)'
        """
        return f"{self.symbol} ({self.arrow})" if self.better else self.symbol

    @property
    def latex_heading(self) -> str:
        """Column heading in LaTeX."""
        return self.latex + LATEX_ARROWS[self.better]

    def decimals_of(self, count: int) -> int:
        """Decimals of a mean over `count` runs."""
        return self.decimals if count > 1 or self.single_decimals is None else self.single_decimals

    def mean_text(self, mean: float, std: float | None, count: int) -> str:
        """Format a mean over `count` runs, as in the paper's tables.

        Example:
            >>> METRICS["loss"].mean_text(3.88151, 0.0121, 3), METRICS["loss"].mean_text(3.88151, None, 1)
            ('3.88(1)', '3.882')
        """
        return shorthand(mean, std, self.decimals_of(count))

    def text(self, value: float, error: float | None = None) -> str:
        """Format the value of one run or one model.

        Losses and accuracies have three decimals. Metrics of tables have four significant digits, because their scale
        differs between models.

        Args:
            value: the value; it may be NaN if the training diverged.
            error: its standard error, for a loss or an accuracy.

        Example:
            >>> METRICS["loss"].text(3.88151), METRICS["hellaswag"].text(0.2571, 0.0043), METRICS["iso"].text(0.123456)
            ('3.882', '0.257(4)', '0.1235')
        """
        if self.of_table:
            return four_digits(value)
        decimals = max(3, self.decimals_of(1))
        return fixed(value, decimals) if error is None else shorthand(value, error, decimals)


# In nats per token. The first is the paper's.
LOSSES = (
    Metric("loss", "test loss", "lower", 2, NATS, "loss", r"$\mathcal{L}$", single_decimals=3),
    Metric("val_loss", "validation loss", "lower", 2, NATS, single_decimals=3),
    Metric("train_loss", "training loss", "lower", 2, NATS, short="loss", single_decimals=3),
    Metric("loss_standard_error", "standard error of the loss", None, 4, NATS),
)

_TABLE_ROUNDED = "test loss with the table rounded to integers, one scale for"
# Measured with `evaluation.quantised_loss`; `embeddings.integers` defines the rounding.
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
# In the order of Tab. results_S_downstream, which ends with their mean, acc.
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

# `rho` follows the paper's text; the paper's tables show `rho_log`.
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
    Metric("iso_both_signs", "ISO, both signs", "higher", 2, "as ISO, with both signs of each direction: stricter"),
    Metric("iso_score", "IsoScore", "higher", 2, "how evenly the variance spreads over all directions, from 0 to 1"),
    Metric("mean_cosine", "mean cosine", "lower", 2, "of two different tokens; 0 if they point in all directions"),
    Metric(
        "r_cos_5",
        "r_cos_5 (%)",
        "higher",
        0,
        "as r_cos, over the 5 benchmarks of the authors' code",
        "r_cos, 5 sets",
        r"$r_{\cos}$, 5 sets",
    ),
    Metric(
        "rho", "rho, p (%)", "higher", 0, "correlation of length and frequency", f"{RHO}, with p", r"$\rho$, with $p$"
    ),
    Metric("spearman", "Spearman (%)", "higher", 0, "as r_cos, correlation of ranks", "Spearman"),
)
NEED_WORDS = ("r_cos", "r_cos_5", "spearman")
"""Keys of the table metrics that need word pairs with human scores."""

_MEASURED = {
    metric.key: metric for metric in (*LOSSES, ACCURACY, *(replace(metric, of_table=True) for metric in _OF_TABLES))
}
_MAIN_KEYS = ("loss", "acc", "iso", "mu_norm", "mu_norm_ratio", "r_cos", "rho_log", "kappa")
MAIN = tuple(replace(_MEASURED[key], published_key=_MEASURED[key].published_key or key) for key in _MAIN_KEYS)
"""Metrics of Tab. results_S and Tab. results_L, in that order."""
OTHERS = tuple(metric for key, metric in _MEASURED.items() if key not in _MAIN_KEYS)
"""Metrics that the paper does not report."""
TABLE_METRICS = tuple(metric for metric in (*MAIN, *OTHERS) if metric.of_table)
"""Metrics of an embedding table; each is a field of EmbeddingMetrics."""

# Progress of a training; only in `train` rows of metrics.jsonl.
PROGRESS = (
    Metric("tokens", "tokens", None, 0, "trained on so far"),
    Metric("lr", "learning rate", None, 4, "of the step", short="lr"),
    Metric("row_exponent", "row exponent", None, 3, "of the coupled second moment at this step, where it is annealed"),
    Metric("grad_norm", "gradient norm", None, 3, "of all gradients, before clipping", short="grad"),
    Metric("tokens_per_second", "tokens per second", "higher", 0, "over all ranks", "tokens/s", short="tok/s"),
    Metric("mfu", "model FLOP utilisation", "higher", 2, "part of the device's peak, from 0 to 1", short="MFU"),
    Metric("memory_bytes", "memory", "lower", 0, "peak so far, in bytes"),
)

INPUT_PREFIX = "input_"
"""Prefix of the keys for the input table of an untied model."""


def of_input_table(metric: Metric) -> Metric:
    """The same metric for the input table; it has no published value, because the paper's models are tied."""
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
"""All metrics by key, in display order."""

# Theory metrics have no better direction, so they are not in METRICS; `theory_metrics` describes them.
THEORY_PREFIX = "theory_"

FREQUENCY_BINS = 10
"""Number of bins of tokens by their count in the training text; see `evaluation.loss_by_frequency`."""
FREQUENCY_PREFIX = "frequency_"
# Each value belongs to one bin and is stored under `bin_key`, so these are not in METRICS.
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
BIN_TARGETS = Metric(f"{FREQUENCY_PREFIX}targets", "targets", None, 0, "evaluated tokens in the bin")
BY_FREQUENCY = (BIN_LOSS, BIN_CALIBRATION, BIN_TOKENS, BIN_TARGETS)
# Not a metric: the number of documents evaluated per task, from the first; None or absent for all.
TASK_LIMIT = "task_limit"

_LOSS_OF_KIND = {"train": "train_loss", "val": "val_loss", "test": "loss"}
_FORMER_KEYS = {"isoscore": "iso_score", "input_isoscore": "input_iso_score"}
_FORMER_OUTPUT_PREFIX = "output_"


def table_key(role: str, key: str) -> str:
    """The key of a metric of one of a model's tables.

    Args:
        role: "output" for the output table or a tied table, "input" for the input table of an untied model.
        key: the metric's key without prefix.

    Example:
        >>> table_key("output", "iso"), table_key("input", "iso")
        ('iso', 'input_iso')
    """
    assert role in ("output", "input"), role
    return INPUT_PREFIX + key if role == "input" else key


def bin_key(metric: Metric, number: int) -> str:
    """The key of a metric of one frequency bin.

    Args:
        metric: one of BY_FREQUENCY.
        number: number of the bin, from 1 (most frequent tokens) to 10.

    Example:
        >>> bin_key(BIN_LOSS, 10)
        'frequency_loss_10'
    """
    assert metric in BY_FREQUENCY, metric.key
    assert 1 <= number <= FREQUENCY_BINS, number
    return f"{metric.key}_{number}"


def logged_key(kind: str, name: str) -> str:
    """The key of a metric, from the kind of a row in metrics.jsonl and the name in that row.

    Example:
        >>> logged_key("val", "loss"), logged_key("embeddings", "iso")
        ('val_loss', 'iso')
    """
    return _LOSS_OF_KIND.get(kind, name) if name == "loss" else name


def up_to_date(values: Mapping[str, Value], kind: str = "result") -> dict[str, Value]:
    """Rename the keys of version 0.1.0 to those of this registry.

    Version 0.1.0 wrote `output_iso` to rows of embeddings, and `isoscore` to results.

    Args:
        values: a row of metrics.jsonl, or the metrics of a result.
        kind: kind of the row; "result" for a result, where `output_` may be part of a task's name.

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
    """Metrics for the tasks in the results that are not the paper's, sorted by name.

    Args:
        found: the metrics of each run.
    """
    keys = {key for values in found for key in values if key not in METRICS and key != TASK_LIMIT}
    names = sorted(key for key in keys if not key.startswith((THEORY_PREFIX, FREQUENCY_PREFIX)))
    return [Metric(name, name, "higher", 2, TASKS[0].meaning) for name in names]
