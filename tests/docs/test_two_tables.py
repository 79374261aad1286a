"""docs/results-further.md on input and output tables without momentum, by length: its numbers match the stored runs."""

import numpy as np
from page_text import cells_of, section, words
from paired_differences import contains_zero, interval, mean_and_interval, mean_and_spread
from stored_runs import of_seeds, reported

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import corrected_count, primary_comparisons
from coupled_adam.study.results import Result

# Steps and the factor of the output table's learning rate.
SHORT, LONG, BEST = (750, 9), (3000, 9), (3000, 3)
STUDIES = {9: "two-tables", 3: "two-tables-rate-3", 1: "two-tables-rate-1", 27: "two-tables-rate-27"}
TOKENS = {750: 768_000, 3000: 3_072_000}
ADAMW, OUTPUT, FACTORED = "standard", "output b1=0 b2=0.99", "output y=1 b1=0 b2=0.99"
BOTH, BOTH_FACTORED = "both b1=0 b2=0.99", "both, output y=1 b1=0 b2=0.99"
NAMES = (ADAMW, OUTPUT, FACTORED, BOTH, BOTH_FACTORED)
NONE = "\N{EN DASH}"


def runs(of: tuple[int, int]) -> list[Result]:
    steps, factor = of
    found = [run for run in reported(STUDIES[factor]) if run.tokens == TOKENS[steps]]
    assert {run.settings.get("tables", {}).get("lr_factor", 1) for run in found} == {factor}
    return found


def gap(optimizer: str, baseline: str, of: tuple[int, int]) -> np.ndarray:
    """Difference in test loss for seeds 1, 2 and 3."""
    return of_seeds(runs(of), optimizer) - of_seeds(runs(of), baseline)


def text() -> str:
    return section("Which beta2").split("### Both tables without momentum")[1].split("### ")[0]


def test_the_losses_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("two-tables losses")
    expected = []
    for of in (SHORT, LONG, BEST):
        for name in NAMES:
            measures = [f"{of_seeds(runs(of), name, key).mean():.2f}" for key in ("iso", "mu_norm_ratio")]
            difference = NONE if name == ADAMW else mean_and_interval(gap(name, ADAMW, of))
            expected.append([mean_and_spread(of_seeds(runs(of), name)), difference, *measures])
    assert [row[4:] for row in rows] == expected
    assert [row[:2] for row in rows if row[0]] == [["750", "9 times"], ["3,000", "9 times"], ["3,000", "3 times"]]
    assert rows[0][2:4] == ["AdamW", "AdamW"]
    assert {run.commit for study in STUDIES.values() for run in reported(study)} == {"28370ac"}


def test_all_differences_are_significant() -> None:
    for study, count in (("two-tables", 8), (STUDIES[3], 4)):
        found = primary_comparisons(gather_grid(reported(study)))
        assert {each.outcome for each in found} == {"better"}
        assert corrected_count(found) == count
    said = "over the eight comparisons with 9 times the learning rate, and over the four with 3 times, all are"
    assert f"{said} significant." in text()


def test_the_losses_of_seed_1_by_learning_rate_match_the_stored_runs() -> None:
    header, _, *rows = cells_of("two-tables rates")
    assert header[2:] == ["1", "3", "9", "27"]
    for name, (_, _, *cells) in zip((ADAMW, BOTH_FACTORED), rows, strict=True):
        losses = {
            factor: run.metrics["loss"] or 0.0
            for factor in (1, 3, 9, 27)
            for run in runs((3000, factor))
            if (run.optimizer, run.seed) == (name, 1)
        }
        lowest = min(losses, key=losses.__getitem__)
        assert cells == [f"**{loss:.3f}**" if factor == lowest else f"{loss:.3f}" for factor, loss in losses.items()]
        assert lowest == BEST[1]


def test_the_leads_match_the_stored_runs() -> None:
    both, output = -gap(BOTH_FACTORED, ADAMW, BEST), -gap(FACTORED, ADAMW, BEST)
    leads = [f"{lead.mean():.3f} below AdamW ({interval(lead)})" for lead in (both, output)]
    assert f"both tables without momentum end {leads[0]}" in text()
    assert f"the output table alone {mean_and_interval(output)}" in text()
    for page in ("README.md", "docs/results.md"):
        assert f"{output.mean():.3f} below ({interval(output)})" in words(page), page
    assert leads[1] in words("docs/should-i-use-it.md")
    assert f"with these betas for the input table, too, {mean_and_interval(both)}" in words("docs/should-i-use-it.md")
    before = -gap(BOTH_FACTORED, ADAMW, LONG)
    assert f"With 9 times the learning rate the lead of both is {mean_and_interval(before)}." in text()


def test_what_each_table_adds_matches_the_stored_runs() -> None:
    by_input = [-gap(BOTH_FACTORED, FACTORED, of) for of in (SHORT, LONG, BEST)]
    with_adamw = [-gap(BOTH, OUTPUT, of) for of in (SHORT, LONG, BEST)]
    assert all(contains_zero(gain) for gain in by_input)
    assert not contains_zero(with_adamw[2])
    added = mean_and_interval(by_input[2]), mean_and_interval(with_adamw[2])
    assert f"adds {added[0]} with factored Adam for the output table, and {added[1]} with AdamW" in text()
    means = [f"{gain.mean():.3f}" for pair in zip(with_adamw, by_input, strict=True) for gain in pair]
    said = f"they gain {means[0]} with AdamW for the output table and {means[1]} with factored Adam, after 3,000 steps"
    assert f"{said} {means[2]} and {means[3]}." in text()
    short = -gap(BOTH_FACTORED, ADAMW, SHORT)
    assert f"the sum of the gains above; it is {short.mean():.3f}" in text()


def test_factored_adam_and_adamw_with_the_same_betas_match_the_stored_runs() -> None:
    pairs = (FACTORED, OUTPUT), (BOTH_FACTORED, BOTH)
    assert max(abs(gap(*pair, of).mean()) for pair in pairs for of in (SHORT, LONG)) < 0.015
    below = [-gap(*pair, BEST) for pair in pairs]
    assert f"below AdamW with the same betas by {mean_and_interval(below[0])} if the input table has AdamW" in text()
    assert f"level if that has these betas, too ({below[1].mean():.3f} below, {interval(below[1])})" in text()
    assert [contains_zero(difference) for difference in below] == [False, True]
    assert all(contains_zero(gap(*pair, LONG)) for pair in pairs)
    iso = [f"{of_seeds(runs(of), FACTORED, 'iso').mean():.2f}" for of in (SHORT, LONG, BEST)]
    said = f"ISO falls from {iso[0]} after 750 steps to {iso[1]} with 9 times the learning rate and to {iso[2]} with 3"
    assert said in text()
