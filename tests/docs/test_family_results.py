"""docs/results.md on partially coupled Adam and on few steps: its numbers are those of the stored runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_markdown_table
from coupled_adam.study.results import Result, read_results

DOCS = Path(__file__).parents[2] / "docs"
STORED = DOCS / "results"
SHORT = 82_000_000
PARTIAL = "partial y=0.25 mean-free"
BASELINES = {"AdamW": "standard", "Coupled Adam": "coupled"}


def lines_of(name: str) -> list[str]:
    """The table of the page that follows this mark."""
    shown = (DOCS / "results.md").read_text().split(f"<!-- table {name} -->")[1].split("\n\n")[0]
    return [line for line in shown.splitlines() if line.startswith("|")]


def section(heading: str) -> str:
    [found] = [part for part in (DOCS / "results.md").read_text().split("\n## ") if part.startswith(heading)]
    return " ".join(found.split())


def short_runs() -> list[Result]:
    runs = [*read_results(STORED / "single-gpu"), *read_results(STORED / "partially-coupled")]
    return [run for run in runs if run.tokens == SHORT]


def few_steps() -> dict[str, Result]:
    return {run.optimizer: run for run in read_results(STORED / "few-steps")}


def differences(metric: str, baseline: str) -> np.ndarray:
    """Of partially coupled Adam less another optimizer, seed by seed."""
    values = {(run.optimizer, run.seed): run.metrics[metric] for run in short_runs()}
    return np.array([values[PARTIAL, seed] - values[baseline, seed] for seed in (1, 2, 3)])


@pytest.mark.parametrize("name", ["partially-coupled", "few-steps"])
def test_main_tables_are_those_of_the_stored_runs(name: str) -> None:
    results = short_runs() if name == "partially-coupled" else read_results(STORED / name)
    [table] = [table for table in build_tables(gather_grid(results)) if table.name == "main"]
    assert lines_of(f"{name} main") == [line for line in to_markdown_table(table).splitlines() if line.startswith("|")]


def test_paired_differences_and_their_intervals_are_those_of_the_stored_runs() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of("partially-coupled differences")]
    shown = {row[0]: row[1:] for row in rows[2:]}
    for label, baseline in BASELINES.items():
        cells = []
        for metric, digits in (("loss", 3), ("r_cos", 1)):
            values = differences(metric, baseline)
            low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
            cells += [f"{values.mean():.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
        assert shown[f"less {label}"] == cells


def test_corrected_p_values_are_those_of_the_stored_runs() -> None:
    p = [2 * stats.ttest_1samp(differences("loss", baseline), 0).pvalue for baseline in BASELINES.values()]
    assert f"p = {p[0]:.3f} and {p[1]:.3f}" in section("Between the two")


def test_validation_loss_is_ahead_from_the_steps_that_the_page_names() -> None:
    def curve(study: str, cell: str, seed: int) -> dict[int, float]:
        lines = (STORED / study / f"runs/30M-82M-{cell}/seed-{seed}/metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}

    ahead_from = {"standard": set(), "coupled": set()}
    for seed in (1, 2, 3):
        partial = curve("partially-coupled", "partial-y0.25-mean-free", seed)
        for baseline, first in ahead_from.items():
            other = curve("single-gpu", baseline, seed)
            behind = [step for step in partial if partial[step] >= other[step]]
            first.add(min(step for step in partial if step > max(behind, default=0)))
    assert ahead_from == {"standard": {2000}, "coupled": {500}}
    assert re.search(r"Coupled Adam's .*\b500\b.*AdamW's from step 2,000", section("Between the two"))


def test_gaps_by_token_frequency_are_those_of_the_stored_runs() -> None:
    runs = few_steps()
    gaps = [
        runs["coupled"].metrics[f"frequency_loss_{i}"] - runs["standard"].metrics[f"frequency_loss_{i}"]
        for i in range(1, 9)
    ]
    said = rf"{gaps[0]:.2f} nats .*{min(gaps[1:]):.1f} to {max(gaps[1:]):.1f} behind in the next seven"
    assert re.search(said, section("Between the two"))


def test_what_the_text_says_of_few_steps_is_in_the_stored_runs() -> None:
    runs, text = few_steps(), section("Few steps")
    loss = {name: run.metrics["loss"] for name, run in runs.items()}
    assert loss["y=1 mean-free"] == min(loss[name] for name in loss if "y=" in name and "unigram" not in name)
    assert f"{loss['y=1 mean-free'] - loss['standard']:.2f} behind AdamW." in text
    best = "y=1 to 0.25 mean-free unigram"
    assert f"also {loss[best] - loss['standard unigram']:.2f} behind" in text
    assert f"{loss['standard'] - loss[best]:.2f} ahead, ISO {runs[best].metrics['iso']:.2f}" in text
    assert f"AdamW {loss['standard'] - loss['standard unigram']:.2f}, and ISO to" in text
    assert f"gap of {loss['coupled'] - loss['standard']:.2f} " in text
    assert f"{loss['y=1 to 0.25 mean-free'] - loss['standard']:.2f} is left" in text
    rarest = {name: run.metrics["frequency_calibration_10"] for name, run in runs.items()}
    for name in ("standard", "coupled", "y=1 to 0.25 mean-free", "standard unigram"):
        assert f"e^{rarest[name]:.2f}" in text
    assert f"e^{runs['standard'].metrics['frequency_calibration_9']:.2f} in the next" in text
    rates = [run.tokens_per_second for run in runs.values()]
    assert f"{round(min(rates), -3):,.0f} to {round(max(rates), -3):,.0f} tokens/s" in text
    assert {run.commit for run in runs.values()} == {"166cdb9"}
