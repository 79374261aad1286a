"""The three tests compared with scipy and with computation by hand; the shorthand compared with decimal numbers."""

import contextlib
import io
import math
import re
import statistics
import warnings
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from coupled_adam.base.notation import escape_latex, to_html, to_latex, to_markdown
from coupled_adam.base.text import parse_shorthand, shorthand
from coupled_adam.metrics import INPUT_PREFIX, METRICS
from coupled_adam.report.significance import Summary, better_than_all, compare, compare_summaries, summarise

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
ALTERNATIVES = {"lower": "less", "higher": "greater"}

losses = st.floats(-100, 100).map(lambda x: round(x, 4))
samples = st.lists(losses, min_size=2, max_size=6)
directions = st.sampled_from(["lower", "higher"])


def varied(*values: list[float]) -> bool:
    """Whether scipy's arithmetic is precise enough."""
    return all(statistics.stdev(each) > 1e-3 for each in values)


# By hand: means 3 and 1, sigma 1 and 1, sigma_d sqrt(2), t = -2 / (sqrt(2) / sqrt(3)) = -sqrt(6), nu = 2.
# For nu = 2 the distribution is F(t) = 1/2 + t / (2 sqrt(2 + t^2)), and t_95 = 0.9 / sqrt(2 * 0.95 * 0.05).
def test_paper_test_as_computed_by_hand() -> None:
    result = compare([2.0, 3.0, 4.0], [0.0, 1.0, 2.0], "lower")
    t_95 = 0.9 / math.sqrt(2 * 0.95 * 0.05)
    assert round(t_95, 2) == 2.92
    assert (result.mean0, result.std0, result.mean1, result.std1) == (3.0, 1.0, 1.0, 1.0)
    assert result.difference == -2.0
    assert result.difference_std == pytest.approx(math.sqrt(2))
    assert result.t == pytest.approx(-math.sqrt(6))
    assert result.threshold == pytest.approx(t_95 * math.sqrt(2) / math.sqrt(3))
    assert result.p_value == pytest.approx(0.5 - math.sqrt(6) / (2 * math.sqrt(8)))
    assert result.significant is False
    assert result.notes == ()


@pytest.mark.parametrize(("difference", "significant"), [(2.383, False), (2.385, True)])
def test_threshold_separates_significant_from_other_differences(difference: float, significant: bool) -> None:
    # d_significance of two samples with sigma = 1 and S = 3 is 2.9200 * sqrt(2 / 3) = 2.3842.
    higher = compare([0.0, 1.0, 2.0], [difference + x for x in (0.0, 1.0, 2.0)], "higher")
    lower = compare([0.0, 1.0, 2.0], [x - difference for x in (0.0, 1.0, 2.0)], "lower")
    assert higher.significant is lower.significant is significant
    assert higher.significantly_worse is lower.significantly_worse is False


@given(samples, samples, directions)
def test_welch_agrees_with_scipy(x0: list[float], x1: list[float], better: Any) -> None:
    assume(varied(x0, x1))
    reference = stats.ttest_ind(x1, x0, equal_var=False, alternative=ALTERNATIVES[better])
    result = compare(x0, x1, better)
    assert result.welch_p == pytest.approx(reference.pvalue, rel=1e-7, abs=1e-12)
    assert result.t == pytest.approx(reference.statistic, rel=1e-7, abs=1e-9)


@given(st.lists(st.tuples(losses, losses), min_size=2, max_size=6), directions)
def test_paired_agrees_with_scipy(pairs: list[tuple[float, float]], better: Any) -> None:
    x0, x1 = (list(column) for column in zip(*pairs, strict=True))
    assume(varied([b - a for a, b in pairs]))
    reference = stats.ttest_rel(x1, x0, alternative=ALTERNATIVES[better])
    result = compare(dict(enumerate(x0)), dict(reversed(list(enumerate(x1)))), better)
    assert result.paired_p == pytest.approx(reference.pvalue, rel=1e-7, abs=1e-12)
    assert result.pairs == len(pairs)


@given(st.integers(2, 8).flatmap(lambda n: st.tuples(*[st.lists(losses, min_size=n, max_size=n)] * 2)), directions)
def test_the_papers_test_claims_only_what_welchs_test_claims(
    pair: tuple[list[float], list[float]], better: Any
) -> None:
    result = compare(*pair, better)
    assume(result.p_value is not None and result.welch_p is not None)
    if result.significant:
        assert result.welch_p <= result.p_value < 0.05
    else:
        assert result.p_value > 0.05 - 1e-12


@given(samples, samples, directions)
def test_swapping_the_samples_mirrors_everything(x0: list[float], x1: list[float], better: Any) -> None:
    one, other = compare(x0, x1, better), compare(x1, x0, better)
    assert one.difference == -other.difference
    assert one.threshold == other.threshold
    assert one.p_value + other.p_value == pytest.approx(1)
    assert one.welch_p + other.welch_p == pytest.approx(1)
    assert one.significant == other.significantly_worse
    assert not (one.significant and one.significantly_worse)


@given(samples, samples)
def test_the_direction_only_flips_the_sign(x0: list[float], x1: list[float]) -> None:
    lower = compare(x0, x1, "lower")
    higher = compare([-x for x in x0], [-x for x in x1], "higher")
    assert (lower.p_value, lower.welch_p, lower.significant) == (higher.p_value, higher.welch_p, higher.significant)


@given(samples, samples, directions, st.integers(-20, 20), st.integers(-8, 8))
def test_shift_and_scale_change_no_p_value(
    x0: list[float], x1: list[float], better: Any, shift: int, exponent: int
) -> None:
    assume(varied(x0, x1))
    plain = compare(dict(enumerate(x0)), dict(enumerate(x1)), better)

    def changed(values: list[float]) -> dict[int, float]:
        return {seed: 2.0**exponent * (value + shift) for seed, value in enumerate(values)}

    result = compare(changed(x0), changed(x1), better)
    assert result.difference == pytest.approx(2.0**exponent * plain.difference, rel=1e-6, abs=1e-9)
    assert result.threshold == pytest.approx(2.0**exponent * plain.threshold, rel=1e-6)
    assert result.p_value == pytest.approx(plain.p_value, rel=1e-5, abs=1e-9)
    assert result.welch_p == pytest.approx(plain.welch_p, rel=1e-5, abs=1e-9)


@given(samples)
def test_summary_agrees_with_numpy(values: list[float]) -> None:
    summary = summarise(values)
    assert summary.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert summary.std == pytest.approx(np.std(values, ddof=1), abs=1e-6)


def test_one_seed_makes_no_claim() -> None:
    result = compare({1: 3.0}, {1: 2.0}, "lower")
    assert result.difference == -1.0
    claims = (result.significant, result.significantly_worse, result.p_value, result.welch_p, result.paired_p, result.t)
    assert claims == (None,) * 6
    assert result.threshold is None
    assert "no claim" in result.notes[0]


def test_without_values_there_is_no_difference() -> None:
    result = compare([], [1.0, 2.0], "lower")
    assert (result.mean0, result.difference, result.significant) == (None, None, None)


@pytest.mark.parametrize(
    ("x1", "t", "p"), [(0.2, math.inf, 0.0), (0.1, 0.0, 0.5), (0.0, -math.inf, 1.0)], ids=["better", "equal", "worse"]
)
def test_without_variance_everything_is_defined_and_nothing_warns(x1: float, t: float, p: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Summed naively, three times 0.1 has a mean of 0.10000000000000002 and a deviation of 1e-17.
        result = compare(dict.fromkeys((1, 2, 3), 0.1), dict.fromkeys((1, 2, 3), x1), "higher")
    assert (result.t, result.threshold) == (t, 0.0)
    assert (result.p_value, result.welch_p, result.paired_p) == (p, p, p)
    assert result.significant is (p == 0.0)
    assert result.significantly_worse is (p == 1.0)
    assert any("do not vary" in note for note in result.notes)


def test_a_constant_sample_is_compared_like_any_other() -> None:
    # Welch's nu is then that of the other sample: a test of its mean against the constant.
    reference = stats.ttest_1samp([1.0, 2.0, 4.0], 1.0, alternative="greater")
    assert compare([1.0] * 3, [1.0, 2.0, 4.0], "higher").welch_p == pytest.approx(reference.pvalue)


def test_missing_values_are_left_out_with_a_note() -> None:
    gaps = compare({1: 1.0, 2: None, 3: 2.0, 4: 5.0}, {1: 2.0, 2: 3.0, 3: math.nan, 4: 7.0, 5: math.inf}, "higher")
    clean = compare({1: 1.0, 3: 2.0, 4: 5.0}, {1: 2.0, 2: 3.0, 4: 7.0}, "higher")
    assert (gaps.p_value, gaps.welch_p, gaps.paired_p) == (clean.p_value, clean.welch_p, clean.paired_p)
    assert (gaps.pairs, gaps.first.left_out, gaps.second.left_out) == (2, 1, 2)
    assert "3 of 9 values" in gaps.notes[0]
    assert clean.notes == ()


def test_different_numbers_of_seeds_use_the_smaller_nu() -> None:
    x0, x1 = [1.0, 2.0, 3.0, 4.0], [5.0, 7.0]
    result = compare(x0, x1, "higher")
    standard_error = math.sqrt(np.var(x0, ddof=1) / 4 + np.var(x1, ddof=1) / 2)
    assert result.t == pytest.approx(3.5 / standard_error)
    assert result.threshold == pytest.approx(stats.t.ppf(0.95, 1) * standard_error)
    assert result.p_value == pytest.approx(stats.t.sf(3.5 / standard_error, 1))
    assert result.welch_p == pytest.approx(stats.ttest_ind(x1, x0, equal_var=False, alternative="greater").pvalue)
    assert "4 and 2 seeds" in result.notes[0]


def test_lists_are_not_paired() -> None:
    assert compare([1.0, 2.0], [2.0, 3.5], "higher").paired_p is None


def test_a_metric_without_direction_is_not_tested() -> None:
    result = compare([1.0, 2.0], [2.0, 3.5], None)
    assert result.difference == 1.25
    assert (result.p_value, result.welch_p, result.significant, result.significantly_worse) == (None,) * 4


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'less'.*'lower', 'higher'"):
        compare([1.0, 2.0], [1.0, 2.0], "less")  # type: ignore[arg-type]


def test_summaries_are_enough_for_the_paper_test() -> None:
    x0, x1 = [3.1, 3.2, 3.4], [3.0, 3.1, 3.1]
    from_values = compare(x0, x1, "lower")
    assert compare_summaries(summarise(x0), summarise(x1), "lower") == from_values
    assert from_values.first == Summary(3, statistics.fmean(x0), statistics.stdev(x0))


def test_only_a_value_that_beats_all_others_is_best() -> None:
    close = {"a": [1.0, 1.1, 1.2], "b": [1.1, 1.2, 1.3], "c": [3.0, 3.1, 3.2]}
    assert better_than_all(close, "lower") is None
    assert better_than_all({"a": close["a"], "c": close["c"]}, "lower") == "a"
    assert better_than_all(close, "higher") == "c"
    assert better_than_all({**close, "d": [None]}, "higher") == "c"
    assert better_than_all({**close, "d": [0.0]}, "higher") is None
    assert better_than_all({"a": close["a"]}, "lower") is None
    assert better_than_all(close, None) is None


@pytest.mark.parametrize(
    ("mean", "std", "decimals", "text"),
    [
        (0.1234, 0.0042, 3, "0.123(4)"),
        (15.2, 3.1, 0, "15(3)"),
        (1.1, 0.06, 2, "1.10(6)"),
        (3.14, 0.002, 2, "3.14(0)"),
        (3.14, 0.0, 2, "3.14(0)"),
        (25.0, 1.1, 1, "25.0(11)"),
        (-54.4, 12.3, 0, "-54(12)"),
        (0.5, 0.096, 2, "0.50(10)"),
        (-0.001, 0.0004, 2, "0.00(0)"),
        (2.4331, None, 3, "2.433"),
    ],
)
def test_shorthand_counts_units_of_the_last_digit(mean: float, std: float | None, decimals: int, text: str) -> None:
    assert shorthand(mean, std, decimals) == text


@given(st.floats(-1e6, 1e6), st.none() | st.floats(0, 1e6), st.integers(0, 6))
def test_shorthand_is_parsed_back_to_the_printed_precision(mean: float, std: float | None, decimals: int) -> None:
    text = shorthand(mean, std, decimals)
    unit = Decimal(1).scaleb(-decimals)
    value = parse_shorthand(text)
    assert value.decimals == decimals
    assert value.mean == float(Decimal(mean).quantize(unit, ROUND_HALF_EVEN))
    if std is None:
        assert value.std is None
    else:
        assert value.std == float(Decimal(std).quantize(unit, ROUND_HALF_EVEN))
        assert int(re.search(r"\((\d+)\)$", text)[1]) * unit == Decimal(std).quantize(unit, ROUND_HALF_EVEN)
    assert shorthand(*value) == text
    assert parse_shorthand(text.replace("(", " (")) == value


def test_shorthand_with_a_decimal_point_in_the_parentheses_is_still_parsed() -> None:
    """The paper and version 0.1 use this form from ten units."""
    assert parse_shorthand("25.0(1.1)") == parse_shorthand("25.0(11)") == (25.0, 1.1, 1)


@pytest.mark.parametrize("text", ["", "0.123(", "0.1(2)(3)", "nan", "1e5", "1.(2)", "0.1 (-2)"])
def test_invalid_shorthand_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(repr(text))} .*0\.123\(4\)"):
        parse_shorthand(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((math.nan, 0.1, 2), "mean is nan"), ((1.0, -0.1, 2), "deviation is -0.1"), ((1.0, 0.1, -1), "decimals is -1")],
)
def test_numbers_without_shorthand_are_refused(arguments: tuple[float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shorthand(*arguments)


def test_forms_of_the_shorthand() -> None:
    assert to_markdown("-54(3)", bold=True) == "**-54(3)**"
    assert to_latex("-54(3)") == r"$-$54 {\tiny (3)}"
    assert to_latex("2.433", bold=True) == r"\textbf{2.433}"
    assert to_html("-54(3)", bold=True) == "<b>\N{MINUS SIGN}54<small>(3)</small></b>"
    assert to_html("-0.041 to -0.024") == "\N{MINUS SIGN}0.041 to \N{MINUS SIGN}0.024"
    assert to_latex("-0.041 to 0.024") == "$-$0.041 to 0.024"
    assert to_html("mean-free to y-0.25") == "mean-free to y-0.25"


def test_other_texts_are_escaped_in_every_form() -> None:
    assert to_markdown("a|b_c*") == r"a\|b\_c\*"
    assert to_html("a<b & c") == "a&lt;b &amp; c"
    assert escape_latex("a_b & 5% {x} \\ ‖μ‖ [1]") == (
        r"a\_b \& 5\% \{x\} \textbackslash{} \ensuremath{\|}\ensuremath{\mu}\ensuremath{\|} {[}1{]}"
    )


def test_metrics_have_their_direction_and_the_paper_name() -> None:
    assert {key for key, metric in METRICS.items() if metric.better == "lower" and metric.published_key} == {
        "loss",
        "mu_norm",
        "mu_norm_ratio",
    }
    assert METRICS["rho_log"].published_key == "rho"
    assert METRICS["rho"].published_key is None
    assert all(metric.key == key for key, metric in METRICS.items())
    assert METRICS["input_mean_cosine"].better == METRICS["mean_cosine"].better == "lower"
    assert not any(key.startswith(INPUT_PREFIX) and metric.published_key for key, metric in METRICS.items())
    assert METRICS["loss"].decimals_of(3) == 2
    assert METRICS["loss"].decimals_of(1) == 3


def test_examples_of_the_page_print_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == text.count("```python") == 3
    for source, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(PAGE), "exec"), {})
        assert printed.getvalue() == expected
