"""Numbers of the study `muon` outside the tables of docs/results.md, recomputed from the stored runs."""

import numpy as np
from page_text import ROOT, words
from scipy import stats

from coupled_adam.study.results import Result, read_results

PARTIAL = "partial y=0.25 mean-free"


def reported() -> list[Result]:
    return [run for run in read_results(ROOT / "docs/results/muon") if not run.is_candidate]


def losses(optimizer: str) -> np.ndarray:
    """Test losses of seeds 1, 2 and 3."""
    by_seed = {run.seed: run.metrics["loss"] for run in reported() if run.optimizer == optimizer}
    return np.array([by_seed[seed] for seed in (1, 2, 3)])


def test_the_readme_shows_the_lead_with_muon_and_its_interval() -> None:
    test = stats.ttest_rel(losses("standard"), losses(PARTIAL))
    low, high = test.confidence_interval(0.95)
    lead = (losses("standard") - losses(PARTIAL)).mean()
    assert f"{lead:.2f} with Muon (95% interval {low:.3f} to {high:.3f})" in words("README.md")


def test_the_advice_page_shows_the_losses_with_muon() -> None:
    shown = [
        f"{losses(name).mean():.2f}({100 * losses(name).std(ddof=1):.0f}) for {label}"
        for name, label in ((PARTIAL, "partially coupled Adam"), ("coupled", "Coupled Adam"), ("standard", "AdamW"))
    ]
    assert f"{shown[0]}, {shown[1]} and {shown[2]} (three seeds each" in words("docs/should-i-use-it.md")


def test_the_results_page_names_the_commits_of_the_reported_runs() -> None:
    commits = {(run.optimizer, run.seed): run.commit for run in reported()}
    assert commits.pop((PARTIAL, 3)) == "03feb3e"
    assert set(commits.values()) == {"37ccd74"}
    assert "Seed 3 of partially coupled Adam: commit 03feb3e" in words("docs/results.md")
