"""Numbers of the study `muon` outside the tables of docs/results.md, recomputed from the stored runs."""

import numpy as np
from page_text import section, words
from paired_differences import interval
from stored_runs import of_seeds, reported

PARTIAL = "partial y=0.25 mean-free"
LONGER = "standard b2=0.99"
FACTORED = "factored mean-free b1=0 b2=0.99"


def losses(optimizer: str, metric: str = "loss") -> np.ndarray:
    """Test losses, or another metric, of seeds 1, 2 and 3."""
    return of_seeds(reported("muon"), optimizer, metric)


def test_the_lead_over_adamw_with_a_longer_memory_matches_the_stored_runs() -> None:
    longer = losses(LONGER) - losses(FACTORED)
    assert f"{longer.mean():.2f} with Muon ({interval(longer)})" in section("# Results")
    assert f"and {longer.mean():.3f} with Muon ({interval(longer)})" in words("README.md")


def test_the_advice_page_shows_the_losses_with_muon() -> None:
    labels = {
        FACTORED: "factored without momentum",
        LONGER: "AdamW with β₂ = 0.99 for the table",
        PARTIAL: "partially coupled Adam",
        "coupled": "Coupled Adam",
        "standard": "AdamW",
    }
    shown = [
        f"{losses(name).mean():.2f}({100 * losses(name).std(ddof=1):.0f}) for {label}" for name, label in labels.items()
    ]
    assert f"{', '.join(shown[:-1])} and {shown[-1]} (three seeds each" in words("docs/should-i-use-it.md")


def test_the_pages_show_the_leads_without_momentum_and_their_intervals() -> None:
    to_adamw, to_longer, to_partial = (losses(name) - losses(FACTORED) for name in ("standard", LONGER, PARTIAL))
    text = section("With Muon for the matrices")
    assert f"factored without momentum ends {to_adamw.mean():.2f} below AdamW ({interval(to_adamw)})" in text
    by_seed = "{:.3f}, {:.3f} and {:.3f} below AdamW with the three seeds".format(*to_adamw)
    assert f"Factored without momentum is {by_seed}" in text
    assert f"{to_longer.mean():.2f} below AdamW with β₂ = 0.99 ({interval(to_longer)})" in text
    assert f"{to_partial.mean():.2f} below partially coupled Adam ({interval(to_partial)})" in text
    for page in ("docs/using-coupledadamw.md", "docs/should-i-use-it.md"):
        lead = f"{to_adamw.mean():.3f}"
        shown = f"{lead} with Muon ({interval(to_adamw)})", f"{lead} ({interval(to_adamw)}) with Muon"
        assert any(text in words(page) for text in shown), page
    frequent = losses(LONGER, "frequency_loss_1") - losses(FACTORED, "frequency_loss_1")
    assert f"{frequent.mean():.2f} nats lower on the most frequent half of the text ({interval(frequent)})" in text
    lost = losses(FACTORED, "loss_int4_row") - losses(FACTORED)
    assert f"{lost.mean():.2f}" == "0.04"  # "as does factored without momentum"


def test_what_a_longer_memory_changes_matches_the_stored_runs() -> None:
    text = section("With Muon for the matrices")
    lead = losses("standard") - losses(f"{PARTIAL} b2=0.99")
    assert f"it is then {lead.mean():.3f} below AdamW at 0.95, {interval(lead)})" in text
    similarity = losses(PARTIAL, "r_cos") - losses(LONGER, "r_cos")
    said = f"and {similarity.mean():.1f} below partially coupled Adam's ({interval(similarity, 1)})"
    assert said in text


def test_the_results_page_names_the_commits_of_the_reported_runs() -> None:
    commits = {(run.optimizer, run.seed): run.commit for run in reported("muon")}
    assert commits.pop((PARTIAL, 3)) == "03feb3e"
    expected = {LONGER: "6780b24", f"{PARTIAL} b2=0.99": "6780b24", FACTORED: "1f59359"}
    assert all(commit == expected.get(optimizer, "37ccd74") for (optimizer, _), commit in commits.items())
    assert "Seed 3 of partially coupled Adam: commit 03feb3e" in words("docs/results.md")
