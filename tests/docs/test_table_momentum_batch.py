"""docs/results-further.md on tables without momentum and batch sizes: its table and numbers match the stored runs."""

from functools import cache

import numpy as np
from page_text import ROOT, cells_of, section, words
from paired_differences import interval, mean_and_interval

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import primary_comparisons
from coupled_adam.study.results import Result, read_results

STORED = ROOT / "docs" / "results" / "table-momentum-batch"
TOKENS = {"batch-2": 256, "batch-8": 1024, "batch-32": 4096}
LONGER, BOTH, FACTORED = "standard b2=0.99", "standard b1=0 b2=0.99", "y=1 b1=0 b2=0.99"
WITH_MEAN = f"{FACTORED} with mean"
NOT_RUN = "\N{EN DASH}"


@cache
def reported() -> list[Result]:
    return [run for run in read_results(STORED) if not run.is_candidate]


def values(model: str, optimizer: str, metric: str = "loss") -> np.ndarray:
    """A metric of seeds 1, 2 and 3; empty if the optimizer was not run with this batch size."""
    own = {run.seed: run.metrics[metric] for run in reported() if (run.model, run.optimizer) == (model, optimizer)}
    return np.array([own[seed] for seed in (1, 2, 3)] if own else [], dtype=np.float64)


def above(model: str, optimizer: str, baseline: str) -> np.ndarray:
    return values(model, optimizer) - values(model, baseline)


def text() -> str:
    return section("Which beta2").split("### Without momentum, with other batch sizes")[1].split("### ")[0]


def test_the_losses_by_batch_size_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("table-momentum-batch losses")
    assert rows == [
        [
            f"{tokens:,}",
            f"{values(model, 'standard').mean():.3f}({1000 * values(model, 'standard').std(ddof=1):.0f})",
            *(
                mean_and_interval(above(model, name, "standard")) if len(values(model, name)) else NOT_RUN
                for name in (LONGER, BOTH, FACTORED, WITH_MEAN)
            ),
        ]
        for model, tokens in TOKENS.items()
    ]


def test_adamw_with_both_betas_is_lowest_at_every_batch_size() -> None:
    gaps = [above(model, FACTORED, BOTH) for model in TOKENS]
    shown = [f"{gap.mean():.2f} ({interval(gap)})" for gap in gaps]
    assert f"above it by {shown[0]}, {shown[1]} and {shown[2]}" in text()
    for model in TOKENS:
        names = {run.optimizer for run in reported() if run.model == model}
        assert min(names, key=lambda name: values(model, name).mean()) == BOTH
    small, large = min(gap.mean() for gap in gaps), max(gap.mean() for gap in gaps)
    for page in ("docs/results.md", "docs/should-i-use-it.md", "README.md"):
        assert f"{small:.2f} to {large:.2f}" in words(page), page


def test_the_corrected_comparisons_are_named() -> None:
    found = primary_comparisons(gather_grid(reported()))
    decided = {(each.optimizer.size.model, each.optimizer.variant.name): each.outcome for each in found}
    better = {key for key, outcome in decided.items() if outcome == "better"}
    assert f"over these {len(decided)} comparisons, {len(better)} losses are significantly lower" in text()
    assert "worse" not in decided.values()
    assert {(model, BOTH) for model in TOKENS} <= better


def test_isotropy_is_that_of_the_stored_runs() -> None:
    for model, tokens in TOKENS.items():
        pair = [f"{values(model, name, 'iso').mean():.2f}" for name in (FACTORED, BOTH)]
        assert f"{pair[0]} and {pair[1]} at {tokens:,}" in text()
