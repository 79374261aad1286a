"""What is measured of the theory: numbers of a checkpoint, of a run, and their JSON.

A run's folder gets `theory/theory.json`, one `RunTheory`; the arrays behind it are described in `folder`. Numbers
that do not exist (a correlation of nothing, mutual information without scikit-learn) are None, never NaN.

Letters: V rows of a table, padding included, H width, i a row, t the target, K batches; g a gradient, u an update.
"""

from dataclasses import field
from typing import Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from coupled_adam.base.errors import UserError

Optimizer = Literal["sgd", "adam", "coupled", "own"]
"""own: the member of the family of second moments that a run was trained with, where it is not Coupled Adam."""
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adam", "coupled")
FITTED = ("x_true", "x_false", "second_moment")
"""What is fitted against the unigram probability: X_i^(i=t), X_i^(i!=t) and E[v_i]."""

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=CHECKED)
class Spread:
    """A mean and how far single values lie from it."""

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
"""The paper's values, over 30 checkpoints of three models; under the names of `RunTheory.summary`."""


@dataclass(frozen=True, config=CHECKED)
class Fit:
    """y = A p through the origin, p the unigram probability of the corpus."""

    A: float | None
    r2: float | None
    """Uncentred: 1 - sum((y - A p)^2) / sum(y^2), as the paper's."""
    r2_centred: float | None
    """1 - sum((y - A p)^2) / sum((y - mean(y))^2); negative where a constant would fit better."""
    mutual_information: float | None
    """Of y and p in nats, by nearest neighbours; None where scikit-learn is missing or the tokens are too few."""
    count: int
    """Tokens that were fitted."""


@dataclass(frozen=True, config=CHECKED)
class TheoremFit:
    """The Theorem's right-hand side S [p X^(i=t) + (1 - p) X^(i!=t)] against the measured E[g_i^2], over all rows.

    Here p is how often i was the target in the very batches that were measured, so nothing but the Theorem's assumption
    is tested: that h^2 is independent of p_i and of whether i is the target.
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
    (1/V) sum_i |u_i| on average: so `total` is the shift of the mean as a part of the mean length of an update.
    """

    optimizer: Optimizer
    total: float
    """0: the mean embedding stays where it is. 1: all rows move alike."""
    output: float
    """Of the part of the update that comes from the output layer."""
    input: float
    """Of the part that comes from the input layer, through tying. Both parts have the whole update's denominators, so
    as vectors they add up to the total."""
    total_norm: float
    """|sum_i u_i|, likewise for the parts."""
    output_norm: float
    input_norm: float
    cosine_with_mean: float | None
    """Of sum_i u_i and the mean embedding: 1 drives it straight outwards, -1 back to the origin."""


Series = dict[str, list[float]]


@dataclass(frozen=True, config=CHECKED)
class CheckpointTheory:
    """What was measured at one checkpoint, with K batches of pseudo-training at a learning rate of zero."""

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
    """Of g_i = -(delta_it - p_i) h against autograd in float64: largest difference over largest entry."""
    clip_factors: list[float]
    """Per batch, what clipping multiplies the gradients by; 1: not clipped."""
    gradient_sums: Series
    """Per batch: |sum_i g_i| / sum_i |g_i| of the parts "output" and "input" and of the "total" of the output table,
    which is their sum when it is tied. "output_frobenius" and so on: divided by the Frobenius norm instead."""
    updates: list[UpdateSum]
    """Of the output table, tied or not, after the last batch; one for each of OPTIMIZERS, and "own" where the run
    was trained with another member of the family. That one is summed over the rows of tokens, without padding."""
    update_series: dict[Optimizer, Series]
    """The same after every batch, relative: "total", "output", "input"."""
    fits: dict[str, Fit]
    """By the names in FITTED."""
    theorem: TheoremFit
    """Of every token, both sides averaged over H. A final norm gives all h nearly the same length, so there this is
    nearly exact whatever the model."""
    theorem_elements: TheoremFit
    """Of every token and some coordinates of h one by one, as the vector equation says it: the real test."""
    input_updates: list[UpdateSum] = field(default_factory=list)
    """Of the input table of an untied model, whose gradient is the input part alone; empty when tied."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Whose updates were summed."""
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
    """What its embeddings were trained with: "adamw", "coupled" or "sgd"."""
    parameters: int
    vocabulary_size: int
    """Tokens of the corpus' tokenizer that the table has rows for; the fits are over these."""
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
    `theorem_elements_slope`, `theorem_elements_r2`; what is None is left out."""
    notes: list[str] = field(default_factory=list)
    """What the reader should know."""
    own: Optimizer | None = None
    """Which of the update sums is that of the optimizer which trained the output table. None: not known, as in files of
    version 0.1.0."""
    member: str = ""
    """The name of the member of the family of second moments, where `own` is "own"."""

    @property
    def trained_with(self) -> str:
        """The optimizer of its embeddings by name."""
        return self.member or self.optimizer

    def to_json(self) -> str:
        """As `theory.json` holds it."""
        return _RUN.dump_json(self, indent=1).decode() + "\n"


Record = TypeVar("Record")
_RUN = TypeAdapter(RunTheory)
_CHECKPOINT = TypeAdapter(CheckpointTheory)


def run_from_json(text: str, source: str) -> RunTheory:
    """Read what `RunTheory.to_json` wrote.

    Args:
        text: the JSON.
        source: what to call it in messages.
    """
    return _read(_RUN, text, source)


def checkpoint_to_json(checkpoint: CheckpointTheory) -> str:
    """The numbers of one checkpoint."""
    return _CHECKPOINT.dump_json(checkpoint, indent=1).decode() + "\n"


def checkpoint_from_json(text: str, source: str) -> CheckpointTheory:
    """Read what `checkpoint_to_json` wrote."""
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
