"""The primary comparisons of a report, checked with scipy's paired t-test and the definition of Holm's correction."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from fabricated_study import COUPLED, STANDARD, fabricate, scaled
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables, write_tables
from coupled_adam.report.significance import compare, holm
from coupled_adam.study.results import Result, read_results

THREE = {"standard": STANDARD, "coupled": COUPLED, "scaled": scaled(1)}
SIZES = (("30M", 30_000_000, 82_000_000), ("30M", 30_000_000, 262_000_000))


def rows_of(results: list[Result], folder: Path) -> list[dict[str, str]]:
    write_tables(build_tables(gather_grid(results)), folder)
    path = folder / "primary.csv"
    return list(csv.DictReader(path.open())) if path.exists() else []


def losses(results: list[Result], tokens: int, optimizer: str) -> np.ndarray:
    found = {run.seed: run.metrics["loss"] for run in results if (run.tokens, run.optimizer) == (tokens, optimizer)}
    return np.array([found[seed] for seed in sorted(found)])


def test_numbers_match_paired_tests_and_all_rows_form_one_family(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", optimizers=THREE, sizes=SIZES, seeds=(1, 2, 3))
    results = read_results(folder)
    rows = rows_of(results, tmp_path / "tables")
    names = [run.optimizer for run in results]
    others = [name for name in dict.fromkeys(names) if name != "standard"]
    assert [(row["D"], row["optimizer"]) for row in rows] == list(itertools.product(("82M", "262M"), others))
    expected = []
    for row, (_, _, tokens) in zip(rows, (size for size in SIZES for _ in others), strict=True):
        first, second = (losses(results, tokens, name) for name in ("standard", row["optimizer"]))
        test = stats.ttest_rel(second, first)
        low, high = test.confidence_interval(0.95)
        assert float(row["difference_value"]) == pytest.approx((second - first).mean())
        assert (float(row["interval_low"]), float(row["interval_high"])) == pytest.approx((low, high))
        assert float(row["p_value"]) == pytest.approx(test.pvalue)
        expected.append(test.pvalue)
    by_hand = {}
    for rank, place in enumerate(np.argsort(expected)):
        by_hand[place] = max([min(1, (len(expected) - rank) * expected[place]), *by_hand.values()])
    for place, row in enumerate(rows):
        assert float(row["p_holm_value"]) == pytest.approx(by_hand[place])
        decided = "better" if float(row["difference_value"]) < 0 else "worse"
        assert row["verdict"] == (decided if by_hand[place] < 0.05 else "not significant")


def test_one_seed_or_no_standard_optimizer_gives_no_table(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", sizes=SIZES[:1], seeds=(1, 2))
    results = read_results(folder)
    assert len(rows_of(results, tmp_path / "both")) == 1
    assert rows_of([run for run in results if run.seed == 1], tmp_path / "one") == []
    assert rows_of([run for run in results if run.optimizer == "coupled"], tmp_path / "coupled") == []


def test_only_common_seeds_are_compared(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "study", sizes=SIZES[:1], seeds=(1, 2, 3))
    results = [run for run in read_results(folder) if (run.optimizer, run.seed) != ("standard", 2)]
    [row] = rows_of(results, tmp_path / "tables")
    by_seed = {(run.optimizer, run.seed): run.metrics["loss"] for run in results}
    expected = np.mean([by_seed["coupled", seed] - by_seed["standard", seed] for seed in (1, 3)])
    assert float(row["difference_value"]) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_step_by_step(p_values: list[float]) -> None:
    corrected = holm(p_values)
    assert all(0 <= before <= after <= 1 for before, after in zip(p_values, corrected, strict=True))
    # By definition: in ascending order, reject while p_(k) < 0.05 / (n - k + 1).
    left = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = set()
    while left and p_values[left[0]] * len(left) < 0.05:
        rejected.add(left.pop(0))
    assert {place for place, p in enumerate(corrected) if p < 0.05} == rejected


def test_constant_values_have_an_interval_of_width_zero() -> None:
    same = compare({1: 3.0, 2: 3.0}, {1: 2.5, 2: 2.5}, "lower")
    assert same.paired_interval == (-0.5, -0.5)
    assert same.paired_two_sided_p == 0
    alike = compare({1: 3.0, 2: 3.0}, {1: 3.0, 2: 3.0}, "lower")
    assert alike.paired_two_sided_p == 1
