"""docs/results.md on beta2 with Muon in the tiny model: what the text says matches the stored runs."""

import numpy as np
from page_text import section
from paired_differences import contains_zero, interval
from stored_runs import of_seeds, reported

STUDY = "table-beta2-muon"
LONGER, PARTIAL, LONGER_PARTIAL = "standard b2=0.99", "y=0.25", "y=0.25 b2=0.99"


def values(optimizer: str, metric: str = "loss", study: str = STUDY) -> np.ndarray:
    """A metric of seeds 1, 2 and 3."""
    return of_seeds(reported(study), optimizer, metric)


def text() -> str:
    return section("Which beta2").split("### With Muon, in the tiny model")[1]


def test_adamw_with_a_longer_memory_is_below_partially_coupled_adam() -> None:
    lead = values(PARTIAL) - values(LONGER)
    assert f"is {lead.mean():.2f} below partially coupled Adam ({interval(lead)})" in text()


def test_the_changes_with_muon_are_what_the_text_says() -> None:
    lead = values("standard") - values(PARTIAL)
    assert f"the lead is smaller: {lead.mean():.3f} ({interval(lead)})" in text()
    gain = values("standard") - values(LONGER)
    without = values("standard", study="table-beta2") - values(LONGER, study="table-beta2")
    assert f"than without Muon ({gain.mean():.3f} and {without.mean():.3f})" in text()
    small = values(PARTIAL) - values(LONGER_PARTIAL)
    assert f"almost nothing ({small.mean():.3f}, {interval(small)})" in text()
    assert contains_zero(small)
    iso = [f"{values(optimizer, 'iso').mean():.2f}" for optimizer in (PARTIAL, LONGER)]
    assert f"ISO is {iso[0]}, compared with {iso[1]} for AdamW with β₂ = 0.99" in text()


def test_every_optimizer_uses_the_same_factor_of_the_learning_rate() -> None:
    assert {run.settings["tables"]["lr_factor"] for run in reported(STUDY)} == {9.0}
    assert {run.settings["matrices"] for run in reported(STUDY)} == {"muon"}
    assert {run.commit for run in reported(STUDY)} == {"2990687"}
