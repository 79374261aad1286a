"""docs/study.md: the rates of runs that share a GPU are those of the stored results."""

import re
import statistics

from page_examples import ROOT

from coupled_adam.study.results import read_results

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def median_rate(study: str, commit: str) -> float:
    """Tokens per second of a stored study's runs at a commit."""
    found = [run for run in read_results(ROOT / "docs" / "results" / study) if run.commit == commit]
    return statistics.median(run.tokens_per_second for run in found if run.tokens_per_second is not None)


def test_the_rates_of_one_and_of_three_runs_on_a_gpu_match_the_stored_results() -> None:
    [tip] = re.findall(r"^### Several small runs on one GPU\n(.*?)^##", PAGE, re.MULTILINE | re.DOTALL)
    words = " ".join(tip.split())
    each = median_rate("muon", "37ccd74")
    assert f"about {round(each, -4):,.0f} tokens/s each, {3 * each / 1e6:.1f}M together" in words
    alone = re.search(r"alone trains at ([\d.]+)M tokens/s \(commit (\w+)\)", words)
    assert alone is not None
    assert f"{median_rate('single-gpu', alone[2]) / 1e6:.2f}" == alone[1]
