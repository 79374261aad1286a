"""docs/results.md on the study table-beta2: its tables and numbers match the stored runs."""

import re
from functools import cache

import numpy as np
import pytest
from page_text import ROOT, cells_of, section, words
from paired_differences import interval, mean_and_interval, mean_and_spread

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import primary_comparisons
from coupled_adam.study.results import Result, read_results

NOT_RUN = "\N{EN DASH}"
STORED = ROOT / "docs" / "results" / "table-beta2"
METHODS = {
    "AdamW": "standard",
    "Coupled Adam": "coupled",
    "row exponent 0.25": "y=0.25",
    "row exponent 0.5": "y=0.5",
    "row exponent 1": "y=1",
    "row exponent 1, no momentum": "y=1 b1=0",
}


BETTER = ("standard b2=0.99", "standard b2=0.999", "y=0.5 b2=0.99")


@cache
def stored() -> list[Result]:
    return read_results(STORED)


def losses(optimizer: str) -> dict[int, float]:
    """Test losses of the reported runs by seed."""
    own = [run for run in stored() if run.optimizer == optimizer and not run.is_candidate]
    return {run.seed: run.metrics["loss"] or 0.0 for run in own}


def trials(optimizer: str) -> dict[float, float]:
    """Validation losses of the trials by factor of the learning rate."""
    own = [run for run in stored() if run.optimizer == optimizer and run.is_candidate]
    return {float(run.trial.value): run.metrics["val_loss"] or 0.0 for run in own if run.trial is not None}


def shown_loss(optimizer: str) -> str:
    values = np.array(list(losses(optimizer).values()))
    return mean_and_spread(values) if len(values) else NOT_RUN


def changes(optimizer: str) -> dict[int, float]:
    """The change of the test loss from beta2 = 0.95 to 0.99, by seed."""
    before, after = losses(optimizer), losses(f"{optimizer} b2=0.99")
    return {seed: after[seed] - before[seed] for seed in sorted(before)}


def shown_change(optimizer: str) -> str:
    """The mean change and its 95% interval."""
    values = list(changes(optimizer).values())
    return mean_and_interval(values) if values else NOT_RUN


def test_the_losses_by_beta2_match_the_stored_runs() -> None:
    _, _, *shown = cells_of("table-beta2 losses")
    assert [row[0] for row in shown] == list(METHODS)
    for (_, *cells), name in zip(shown, METHODS.values(), strict=True):
        assert cells == [
            *(shown_loss(f"{name}{beta2}") for beta2 in ("", " b2=0.99", " b2=0.999")),
            shown_change(name),
        ]


def test_the_changes_at_every_learning_rate_match_the_stored_trials() -> None:
    header, _, *shown = cells_of("table-beta2 trials")
    for label, *cells in shown:
        before, after = trials(METHODS[label]), trials(f"{METHODS[label]} b2=0.99")
        assert cells == [f"{after[float(factor)] - before[float(factor)]:.3f}" for factor in header[1:]]


def test_the_text_about_beta2_matches_the_stored_runs() -> None:
    gains = {name: np.mean(list(changes(name).values())) for name in ("standard", "coupled", "y=0.25")}
    assert gains["coupled"] > 0  # "and not that of Coupled Adam"
    for page in ("docs/results-further.md", "docs/should-i-use-it.md"):
        assert re.search(rf"of AdamW by {-gains['standard']:.2f}( \([^)]*\))?, ", words(page))
        assert re.search(rf"of row exponent 0.25 by {-gains['y=0.25']:.2f}( \([^)]*\))?, ", words(page))
    lowest = min({run.optimizer for run in stored()}, key=lambda name: np.mean(list(losses(name).values())))
    assert lowest == "standard b2=0.99"
    assert max(changes("standard").values()) < 0
    small = [f"{-change:.3f}" for change in list(changes("y=0.5").values())[:2]]
    assert f"row exponent 0.5 gains {small[0]} and {small[1]}" in section("Which beta2")


def test_the_corrected_comparisons_with_adamw_are_named() -> None:
    found = primary_comparisons(gather_grid([run for run in stored() if not run.is_candidate]))
    assert {each.baseline.variant.name for each in found} == {"standard"}
    decided = {
        outcome: {each.optimizer.variant.name: each.difference for each in found if each.outcome == outcome}
        for outcome in ("better", "worse")
    }
    assert set(decided["worse"]) == {"coupled", "coupled b2=0.99", "y=0.25"}
    gaps = [[losses(name)[seed] - losses("standard")[seed] for seed in (1, 2, 3)] for name in BETTER]
    for name, gap in zip(BETTER, gaps, strict=True):
        assert decided["better"].pop(name) == pytest.approx(np.mean(gap))
    first, second, third = (f"{np.mean(gap):.3f}, {interval(gap)}" for gap in gaps)
    assert decided["better"] == {}
    said = f"AdamW with 0.99 ({first}) and 0.999 ({second}), and row exponent 0.5 with 0.99 ({third})"
    assert f"over all {len(found)} comparisons, three losses are significantly lower: {said}" in section("Which beta2")


def test_the_largest_learning_rate_never_won() -> None:
    tried = [found for found in map(trials, {run.optimizer for run in stored()}) if 81.0 in found]
    assert tried
    assert all(found[81.0] > found[27.0] for found in tried)
