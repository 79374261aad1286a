"""docs/results-further.md on longer runs without momentum: its table and numbers match the stored runs."""

import numpy as np
from page_text import cells_of, section, words
from paired_differences import interval, mean_and_interval, mean_and_spread
from stored_runs import of_seeds, reported

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import corrected_count, primary_comparisons
from coupled_adam.study.results import Result

SHORT, LONG = ("table-momentum-batch", 768_000), ("table-momentum-length", 3_072_000)
BOTH, FACTORED = "standard b1=0 b2=0.99", "y=1 b1=0 b2=0.99"
WITH_MEAN = f"{FACTORED} with mean"


def runs(study: str, tokens: int) -> list[Result]:
    return [run for run in reported(study) if run.tokens == tokens and run.model in ("tiny", "batch-8")]


def values(optimizer: str, of: tuple[str, int], metric: str = "loss") -> np.ndarray:
    """A metric of seeds 1, 2 and 3."""
    return of_seeds(runs(*of), optimizer, metric)


def text() -> str:
    return section("Which beta2").split("### Without momentum, in longer runs")[1].split("### ")[0]


def test_the_losses_by_length_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("table-momentum-length losses")
    expected = []
    for of, steps in ((SHORT, "750"), (LONG, "3,000")):
        adamw = values("standard", of)
        gaps = [mean_and_interval(values(name, of) - adamw) for name in (BOTH, FACTORED, WITH_MEAN)]
        expected.append([steps, mean_and_spread(adamw), *gaps])
    assert rows == expected


def test_the_text_on_longer_runs_matches_the_stored_runs() -> None:
    below = values("standard", LONG) - values(FACTORED, LONG)
    assert f"is {below.mean():.3f} below AdamW ({interval(below)})" in text()
    behind = values(FACTORED, LONG) - values(BOTH, LONG)
    assert f"{behind.mean():.3f} above AdamW with both betas ({interval(behind)})" in text()
    cost = values(FACTORED, LONG) - values(WITH_MEAN, LONG)
    assert f"cost {cost.mean():.3f} ({interval(cost)})" in text()
    found = primary_comparisons(gather_grid(runs(*LONG)))
    assert {each.outcome for each in found} == {"better"}
    assert corrected_count(found) == 3
    assert "Corrected by Holm's method over the three comparisons after 3,000 steps, all are significant." in text()
    iso = [f"{values(name, LONG, 'iso').mean():.2f}" for name in (FACTORED, BOTH, "standard")]
    assert f"ISO is {iso[0]}, compared with {iso[1]} for AdamW with both betas and {iso[2]} for AdamW" in text()
    assert {run.commit for run in runs(*LONG)} == {"22774c5"}
    results = words("docs/results.md")
    assert f"it is {below.mean():.2f} below AdamW ({interval(below)})" in results
    assert f"{behind.mean():.2f} below it in longer runs ({interval(behind)})" in results
    advice = f"{below.mean():.2f} below AdamW ({interval(below)}), and {behind.mean():.2f} above AdamW with both betas"
    assert f"{advice} ({interval(behind)})" in words("docs/should-i-use-it.md")
