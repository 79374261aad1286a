"""Is one optimizer better than another? The paper's test (App. error), and two more powerful ones.

Two samples X_0 and X_1 of one metric, S runs each, have means m_i and corrected standard deviations sigma_i. Their
difference is d = m_1 - m_0, and 1 is better than 0 if t = d / se is far enough on the good side of Student's
distribution with nu degrees of freedom. All three tests are one-sided, at 95%, and differ only in se and nu:

    paper    se = sqrt(sigma_0^2 + sigma_1^2) / sqrt(S)          nu = S - 1
    Welch    the same se                                         nu by Welch and Satterthwaite, from S - 1 to 2 S - 2
    paired   se = standard deviation of (X_1 - X_0) / sqrt(S)    nu = S - 1, over runs with the same seed
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, TypeGuard

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.text import counted
from coupled_adam.metrics import Better

CONFIDENCE = 0.95
"""The one-sided confidence level, alpha in the paper."""

Values = Sequence[float | None] | Mapping[int, float | None]
"""One value per run: a list, or a mapping from seed to value, which makes the paired test possible."""


@dataclass(frozen=True)
class Summary:
    """The values of one metric over the seeds of one cell."""

    count: int
    """S, the number of finite values."""
    mean: float | None
    """None without values."""
    std: float | None
    """Corrected sample standard deviation (divided by S - 1); None for fewer than two values."""
    left_out: int = 0
    """Number of values that are None, NaN or infinite."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of approach 1 with approach 0 in one metric. None means that no statement is possible."""

    better: Better | None
    first: Summary
    """X_0."""
    second: Summary
    """X_1."""
    difference: float | None
    """d, the mean of 1 minus the mean of 0 (Eq. student_mean_d)."""
    difference_std: float | None
    """sqrt(sigma_0^2 + sigma_1^2) (Eq. sigmad)."""
    threshold: float | None
    """d_significance (Eq. studentonesidedconfidencethreshold): half of the bars in Fig. results_S."""
    t: float | None
    """d / se of the paper's test; infinite if the means differ without any variance."""
    p_value: float | None
    """The paper's test: the probability that chance alone makes 1 look at least this much better than 0."""
    welch_p: float | None
    """The same by Welch's test."""
    paired_p: float | None = None
    """The same by the paired test; None with fewer than two common seeds."""
    pairs: int = 0
    """Number of common seeds."""
    paired_difference: float | None = None
    """Mean of X_1 - X_0 over the common seeds; None as for `paired_p`."""
    paired_interval: tuple[float, float] | None = None
    """Two-sided 95% interval of the mean of X_1 - X_0 over the common seeds; None as for `paired_p`."""
    paired_two_sided_p: float | None = None
    """The probability that chance alone makes them differ at least this much in either direction, paired."""
    notes: tuple[str, ...] = ()
    """Caveats: ignored values, different numbers of seeds, no variance."""

    @property
    def significant(self) -> bool | None:
        """Whether 1 is significantly better than 0 by the paper's test; None for no claim."""
        return self._beyond_threshold(1 if self.better == "higher" else -1)

    @property
    def significantly_worse(self) -> bool | None:
        """Whether 0 is significantly better than 1 by the paper's test; None for no claim."""
        return self._beyond_threshold(-1 if self.better == "higher" else 1)

    @property
    def outcome(self) -> Literal["better", "worse", "open", "no claim"]:
        """Verdict of the paper's test on 1 against 0; open: no significant difference."""
        if self.significant is None:
            return "no claim"
        if self.significant:
            return "better"
        return "worse" if self.significantly_worse else "open"

    def _beyond_threshold(self, sign: int) -> bool | None:
        """Eqs. student_signficance_loss and student_signficance_other."""
        if self.better is None or self.difference is None or self.threshold is None:
            return None
        return sign * self.difference > self.threshold

    @property
    def mean0(self) -> float | None:
        """Mean of approach 0."""
        return self.first.mean

    @property
    def std0(self) -> float | None:
        """Standard deviation of approach 0."""
        return self.first.std

    @property
    def mean1(self) -> float | None:
        """Mean of approach 1."""
        return self.second.mean

    @property
    def std1(self) -> float | None:
        """Standard deviation of approach 1."""
        return self.second.std


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a value is not None and finite."""
    return value is not None and math.isfinite(value)


def summarise(values: Iterable[float | None]) -> Summary:
    """Mean and corrected standard deviation of the finite values.

    Example:
        >>> summarise([3.0, 5.0, None])
        Summary(count=2, mean=4.0, std=1.4142135623730951, left_out=1)
    """
    given = list(values)
    finite = [float(value) for value in given if is_number(value)]
    # The standard library sums exactly: equal values have a standard deviation of 0, not 1e-17.
    return Summary(
        count=len(finite),
        mean=statistics.fmean(finite) if finite else None,
        std=statistics.stdev(finite) if len(finite) > 1 else None,
        left_out=len(given) - len(finite),
    )


def compare(x0: Values, x1: Values, better: Better | None) -> Comparison:
    """Compare approach 1 with approach 0 in one metric.

    Args:
        x0: the values of approach 0, one per run. None, NaN and infinity are ignored, with a note.
        x1: the values of approach 1. With mappings from seed to value, runs with the same seed are also paired.
        better: the better direction of the metric; None for no test.

    Returns:
        The difference and the p-values of the three tests, which are small if 1 is better. With fewer than two values
        on one side there is no claim.

    Example:
        >>> runs = compare([3.13, 3.14, 3.15], [3.11, 3.12, 3.13], "lower")
        >>> runs.significant, round(runs.p_value, 3), round(runs.welch_p, 3)
        (False, 0.067, 0.035)
        >>> compare({1: 3.13, 2: 3.16, 3: 3.19}, {1: 3.11, 2: 3.13, 3: 3.17}, "lower").paired_p < 0.02
        True
    """
    comparison = compare_summaries(summarise(as_list(x0)), summarise(as_list(x1)), better)
    paired = summarise(paired_differences(x0, x1))
    comparison = replace(comparison, pairs=paired.count)
    if better is None or paired.mean is None or paired.std is None:
        return comparison
    standard_error, nu = paired.std / math.sqrt(paired.count), paired.count - 1
    half = quantile(nu, (1 + CONFIDENCE) / 2) * standard_error
    p = one_sided_p(paired.mean, standard_error, nu, better)
    return replace(
        comparison,
        paired_p=p,
        paired_difference=paired.mean,
        paired_interval=(paired.mean - half, paired.mean + half),
        paired_two_sided_p=2 * min(p, 1 - p),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons by Holm's method: rejecting those below 0.05 keeps the probability of
    any false rejection below 0.05.

    Example:
        >>> [round(p, 3) for p in holm([0.04, 0.01, 0.5])]
        [0.08, 0.03, 0.5]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def compare_summaries(first: Summary, second: Summary, better: Better | None) -> Comparison:
    """Compute the paper's test and Welch's from means and standard deviations, as in published tables.

    The paper has equal numbers of seeds. For different numbers, se^2 = sigma_0^2 / S_0 + sigma_1^2 / S_1, and nu is the
    smaller S - 1. For equal numbers this is the paper's test; otherwise it is more conservative than Welch's.

    Example:
        >>> standard, coupled = Summary(3, 0.346, 0.001), Summary(3, 0.350, 0.001)
        >>> compare_summaries(standard, coupled, "higher").significant
        True
    """
    if better not in ("lower", "higher", None):
        raise UserError(f"better is {better!r}; pass 'lower', 'higher' or None")
    untested = Comparison(
        better=better,
        first=first,
        second=second,
        difference=None if first.mean is None or second.mean is None else second.mean - first.mean,
        difference_std=None,
        threshold=None,
        t=None,
        p_value=None,
        welch_p=None,
        notes=notes_on(first, second),
    )
    if untested.difference is None or first.std is None or second.std is None:
        return untested
    difference = untested.difference
    error0, error1 = first.std / math.sqrt(first.count), second.std / math.sqrt(second.count)
    standard_error = math.hypot(error0, error1)
    nu = min(first.count, second.count) - 1
    welch_nu = welch_degrees(error0, first.count, error1, second.count)
    return replace(
        untested,
        difference_std=math.hypot(first.std, second.std),
        threshold=quantile(nu) * standard_error,
        t=t_value(difference, standard_error),
        p_value=one_sided_p(difference, standard_error, nu, better) if better else None,
        welch_p=one_sided_p(difference, standard_error, welch_nu, better) if better else None,
    )


def better_than_all(samples: Mapping[str, Values], better: Better | None) -> str | None:
    """The approach that is significantly better than every other one by the paper's test, if any.

    Approaches without values are ignored. An approach with a single value can neither win nor be beaten.

    Example:
        >>> better_than_all({"a": [1.0, 1.1], "b": [2.0, 2.1], "c": [3.0, 3.1], "d": []}, "lower")
        'a'
    """
    summaries = {name: summarise(as_list(values)) for name, values in samples.items()}
    present = {name: summary for name, summary in summaries.items() if summary.count}
    for name, own in present.items():
        others = [summary for each, summary in present.items() if each != name]
        if others and all(compare_summaries(other, own, better).significant for other in others):
            return name
    return None


def as_list(values: Values) -> list[float | None]:
    """The values of all runs as a list."""
    return list(values.values()) if isinstance(values, Mapping) else list(values)


def paired_differences(x0: Values, x1: Values) -> list[float]:
    """X_1 - X_0 for seeds with a value in both; empty without seeds."""
    if not (isinstance(x0, Mapping) and isinstance(x1, Mapping)):
        return []
    pairs = [(x0[seed], x1[seed]) for seed in x0 if seed in x1]
    return [second - first for first, second in pairs if is_number(first) and is_number(second)]


def quantile(nu: float, probability: float = CONFIDENCE) -> float:
    """t_{alpha, nu}: Student's t is below this value with the given probability.

    Example:
        >>> round(quantile(2), 2)
        2.92
    """
    return float(student().stdtrit(nu, probability))


def one_sided_p(difference: float, standard_error: float, nu: float, better: Better) -> float:
    """Probability that Student's t is at least as far on the good side as difference / standard_error."""
    t = t_value(difference, standard_error)
    return float(student().stdtr(nu, -t if better == "higher" else t))


def student() -> ModuleType:
    """scipy's functions for Student's distribution, which load and run much faster than scipy.stats."""
    return require("scipy.special", "study", "for Student's distribution")


def t_value(difference: float, standard_error: float) -> float:
    """difference / standard_error. Without variance: infinite, or 0 (p = 0.5) if there is no difference either."""
    if standard_error > 0:
        return difference / standard_error
    return math.copysign(math.inf, difference) if difference else 0.0


def welch_degrees(error0: float, count0: int, error1: float, count1: int) -> float:
    """Welch–Satterthwaite nu from the standard errors of both means."""
    total = math.hypot(error0, error1)
    if total == 0:
        return min(count0, count1) - 1
    share0, share1 = (error0 / total) ** 2, (error1 / total) ** 2
    return 1 / (share0**2 / (count0 - 1) + share1**2 / (count1 - 1))


def notes_on(first: Summary, second: Summary) -> tuple[str, ...]:
    """Caveats about the comparison of two samples."""
    notes = []
    left_out = first.left_out + second.left_out
    if left_out:
        values = left_out + first.count + second.count
        notes.append(f"ignored because missing or not finite: {left_out} of {counted(values, 'value')}")
    if min(first.count, second.count) < 2:
        seeds = f"{first.count} and {second.count} seeds"
        if first.count == second.count:
            seeds = f"{counted(first.count, 'seed')} each"
        notes.append(f"{seeds}: no claim, because a test needs two of each")
    elif first.count != second.count:
        nu = min(first.count, second.count) - 1
        notes.append(f"{first.count} and {second.count} seeds: the paper's test with sigma_i^2/S_i and nu = {nu}")
    elif first.std == 0 and second.std == 0:
        notes.append("the seeds do not vary, so any difference counts as significant")
    return tuple(notes)
