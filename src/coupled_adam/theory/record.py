"""Records of the theory: the numbers of a checkpoint and of a run, and their JSON.

A run folder gets `theory/theory.json`, one `RunTheory`; theory_folder.py describes the arrays. Undefined numbers
(mutual information without scikit-learn, for example) are None, never NaN.

Letters: V rows of a table, padding included, H width, i a row, t the target, K batches; g a gradient, u an update.
"""

from dataclasses import field
from typing import Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coupled_adam.base.errors import UserError

Optimizer = Literal["sgd", "adam", "coupled", "own"]
"""own: the member of the family of second moments that trained a run, if it is not Coupled Adam."""
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam", "coupled")
FITTED = ("x_true", "x_false", "second_moment")
"""Quantities fitted against the unigram probability: X_i^(i=t), X_i^(i!=t) and E[v_i]."""

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=CHECKED)
class Spread:
    """A mean and the standard deviation of single values."""

    mean: float
    std: float | None
    """Sample standard deviation; None for a single value."""


PUBLISHED = {
    "x_true_r2": Spread(0.003, 0.001),
    "x_true_mutual_information": Spread(0.14, 0.02),
    "x_false_r2": Spread(0.92, 0.01),
    "x_false_mutual_information": Spread(0.50, 0.02),
    "second_moment_r2": Spread(0.85, 0.07),
    "second_moment_mutual_information": Spread(1.18, 0.09),
    "second_moment_A": Spread(1e-4, None),
}
"""The paper's values over 30 checkpoints of three models, by the names of `RunTheory.summary`."""


@dataclass(frozen=True, config=CHECKED)
class Fit:
    """Fit y = A p through the origin, where p is the unigram probability of the corpus."""

    A: float | None
    r2: float | None
    """Uncentred: 1 - sum((y - A p)^2) / sum(y^2), as in the paper."""
    r2_centred: float | None
    """1 - sum((y - A p)^2) / sum((y - mean(y))^2); negative if a constant would fit better."""
    mutual_information: float | None
    """Of y and p in nats, by nearest neighbours; None without scikit-learn or with too few tokens."""
    count: int
    """Number of fitted tokens."""


@dataclass(frozen=True, config=CHECKED)
class TheoremFit:
    """The Theorem's right-hand side S [p X^(i=t) + (1 - p) X^(i!=t)] against the measured E[g_i^2], over all rows.

    Here p is the frequency of i as target in the measured batches, so that only the Theorem's assumption is tested:
    that h^2 is independent of p_i and of whether i is the target.
    """

    slope: float | None
    """measured = slope * predicted, through the origin."""
    r2: float | None
    """Of that line, uncentred."""
    r2_centred: float | None
    median_ratio: float | None
    """Median over i of predicted / measured."""
    log_correlation: float | None
    """Pearson correlation of the logarithms."""


@dataclass(frozen=True, config=CHECKED)
class UpdateSum:
    """sum_i u_i of one optimizer for one table, at a learning rate of one.

    Each is divided by sum_i |u_i| of the whole update. The mean embedding moves by (1/V) sum_i u_i and a row by
    (1/V) sum_i |u_i| on average, so `total` is the shift of the mean relative to the mean length of an update.
    """

    optimizer: Optimizer
    total: float
    """0: the mean embedding does not move. 1: all rows move alike."""
    output: float
    """The part of the update from the output layer."""
    input: float
    """The part from the input layer, through tying. Both parts have the denominators of the whole update, so as vectors
    they add up to the total."""
    total_norm: float
    """|sum_i u_i|; likewise for the parts."""
    output_norm: float
    input_norm: float
    cosine_with_mean: float | None
    """Cosine of sum_i u_i and the mean embedding: 1 moves it straight outwards, -1 back to the origin."""


Series = dict[str, list[float]]


@dataclass(frozen=True, config=CHECKED)
class CheckpointTheory:
    """Measurements at one checkpoint, with K batches of pseudo-training at a learning rate of zero."""

    step: int
    tokens_seen: int
    batches: int
    """K."""
    loss: float
    """Mean over the K batches."""
    mu_norm: float
    """|mu|, the length of the mean embedding of the output table, without padding."""
    S_mean: float
    """Mean over H of S = E[h^2]."""
    identity_error: float
    """g_i = -(delta_it - p_i) h against autograd in float64: largest difference divided by the largest entry."""
    clip_factors: list[float]
    """Factor of gradient clipping per batch; 1 if not clipped."""
    gradient_sums: Series
    """Per batch: |sum_i g_i| / sum_i |g_i| for the parts "output" and "input", and for the "total" of the output table,
    which is their sum if it is tied. "output_frobenius" and so on: divided by the Frobenius norm instead."""
    updates: list[UpdateSum]
    """For the output table, tied or not, after the last batch; one for each of OPTIMIZERS, and "own" if another member
    of the family trained the run. "own" is summed over the rows of tokens, without padding."""
    update_series: dict[Optimizer, Series]
    """The same after every batch, relative: "total", "output", "input"."""
    fits: dict[str, Fit]
    """By the names in FITTED."""
    theorem: TheoremFit
    """For every token, both sides averaged over H. A final norm gives all h nearly the same length, so this is nearly
    exact for any model."""
    theorem_elements: TheoremFit
    """For every token and single coordinates of h, as in the vector equation: the real test."""
    input_updates: list[UpdateSum] = field(default_factory=list)
    """For the input table of an untied model, whose gradient is only the input part; empty if tied."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers whose updates were summed."""
        return tuple(each.optimizer for each in self.updates)

    def update(self, optimizer: Optimizer) -> UpdateSum:
        """The update sum of one optimizer."""
        return next(each for each in self.updates if each.optimizer == optimizer)


@dataclass(frozen=True, config=CHECKED)
class RunTheory:
    """The theory measured on the checkpoints of one run."""

    run: str
    """Name of the run."""
    optimizer: str
    """Optimizer of its embeddings: "adamw", "coupled" or "sgd"."""
    parameters: int
    vocabulary_size: int
    """Tokens of the corpus's tokenizer that have a row in the table; the fits are over these."""
    rows: int
    """V."""
    width: int
    """H."""
    tied: bool
    corpus: str
    """Folder of the tokens."""
    batches: int
    """K."""
    tokens_per_batch: int
    precision: str
    """"float32" or "bf16"."""
    checkpoints: list[CheckpointTheory]
    """In the order of their steps."""
    summary: dict[str, Spread]
    """Mean and spread over the checkpoints of `x_true_r2`, `x_true_r2_centred`, `x_true_mutual_information`,
    `x_true_A`, the same for `x_false` and `second_moment`, and `theorem_slope`, `theorem_r2`,
    `theorem_elements_slope`, `theorem_elements_r2`; without None values."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader."""
    own: Optimizer | None = None
    """The optimizer that trained the output table; None if unknown, as in files of version 0.1.0."""
    member: str = ""
    """Name of the member of the family of second moments, if `own` is "own"."""

    @property
    def trained_with(self) -> str:
        """Name of the optimizer of its embeddings."""
        return self.member or self.optimizer

    def to_json(self) -> str:
        """Convert to the content of `theory.json`."""
        return _RUN.dump_json(self, indent=1).decode() + "\n"


Record = TypeVar("Record")
_RUN = TypeAdapter(RunTheory)
_CHECKPOINT = TypeAdapter(CheckpointTheory)


def run_from_json(text: str, source: str) -> RunTheory:
    """Read the output of `RunTheory.to_json`.

    Args:
        text: the JSON.
        source: its name in error messages.
    """
    return _read(_RUN, text, source)


def checkpoint_to_json(checkpoint: CheckpointTheory) -> str:
    """Convert the numbers of one checkpoint to JSON."""
    return _CHECKPOINT.dump_json(checkpoint, indent=1).decode() + "\n"


def checkpoint_from_json(text: str, source: str) -> CheckpointTheory:
    """Read the output of `checkpoint_to_json`."""
    return _read(_CHECKPOINT, text, source)


def _read(adapter: TypeAdapter[Record], text: str, source: str) -> Record:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(
            f"{source}: {place}: {first['msg']}; measure it again with `coupled-adam theory RUN --fresh`"
        ) from None
