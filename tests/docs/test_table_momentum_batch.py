"""docs/results-further.md on tables without momentum and batch sizes: its table and numbers match the stored runs."""

import numpy as np
from page_text import cells_of, section, words
from paired_differences import interval, mean_and_interval, mean_and_spread
from stored_runs import of_seeds, reported

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import corrected_count, primary_comparisons

STUDY = "table-momentum-batch"
TOKENS = {"batch-2": 256, "batch-8": 1024, "batch-32": 4096}
LONGER, BOTH, FACTORED = "standard b2=0.99", "standard b1=0 b2=0.99", "y=1 b1=0 b2=0.99"
WITH_MEAN = f"{FACTORED} with mean"
NOT_RUN = "\N{EN DASH}"


def values(model: str, optimizer: str, metric: str = "loss") -> np.ndarray:
    """A metric of seeds 1, 2 and 3; empty if the optimizer was not run with this batch size."""
    return of_seeds([run for run in reported(STUDY) if run.model == model], optimizer, metric)


def above(model: str, optimizer: str, baseline: str) -> np.ndarray:
    return values(model, optimizer) - values(model, baseline)


def text() -> str:
    return section("Which beta2").split("### Without momentum, with other batch sizes")[1].split("### ")[0]


def test_the_losses_by_batch_size_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("table-momentum-batch losses")
    assert rows == [
        [
            f"{tokens:,}",
            mean_and_spread(values(model, "standard")),
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
        names = {run.optimizer for run in reported(STUDY) if run.model == model}
        assert min(names, key=lambda name: values(model, name).mean()) == BOTH
    small, large = min(gap.mean() for gap in gaps), max(gap.mean() for gap in gaps)
    intervals = [interval(gap) for gap in reversed(gaps)]
    said = f"{small:.2f} to {large:.2f}", f"(intervals {intervals[0]}, {intervals[1]} and {intervals[2]})"
    for page in ("docs/results.md", "docs/should-i-use-it.md"):
        assert all(each in words(page) for each in said), page


def test_leads_over_adamw_and_the_cost_of_mean_free_updates_match_the_stored_runs() -> None:
    advice = words("docs/should-i-use-it.md")
    leads = [f"{-gap.mean():.2f} ({interval(-gap)})" for gap in (above(model, BOTH, "standard") for model in TOKENS)]
    assert f"by {leads[0]}, {leads[1]} and {leads[2]}" in advice
    longer = -above("batch-32", LONGER, "standard")
    assert f"{longer.mean():.2f} ({interval(longer)}) in another" in advice
    small, middle = (above(model, WITH_MEAN, BOTH) for model in ("batch-2", "batch-8"))
    assert f"({small.mean():.3f} above, {interval(small)})" in text()
    assert f"({small.mean():.3f} above, {interval(small)})" in advice
    for page in (text(), advice):
        assert f"{middle.mean():.2f} above at 1,024 ({interval(middle)})" in page
    costs = [above(model, FACTORED, WITH_MEAN) for model in ("batch-2", "batch-8")]
    shown = [f"{cost.mean():.2f} ({interval(cost)})" for cost in costs]
    assert f"Mean-free updates cost {shown[0]} at 256 and {shown[1]} at 1,024" in text()
    assert f"it is {costs[0].mean():.2f} and {costs[1].mean():.2f} below" in text()


def test_the_corrected_comparisons_are_named() -> None:
    found = primary_comparisons(gather_grid(reported(STUDY)))
    decided = {(each.optimizer.size.model, each.optimizer.variant.name): each.outcome for each in found}
    tested = corrected_count(found)
    better = {key for key, outcome in decided.items() if outcome == "better"}
    assert f"over the {tested} comparisons with three seeds, {len(better)} losses are significantly lower" in text()
    assert "worse" not in decided.values()
    assert {(model, BOTH) for model in TOKENS} <= better


def test_isotropy_is_that_of_the_stored_runs() -> None:
    for model, tokens in TOKENS.items():
        pair = [f"{values(model, name, 'iso').mean():.2f}" for name in (FACTORED, BOTH)]
        assert f"{pair[0]} and {pair[1]} at {tokens:,}" in text()
