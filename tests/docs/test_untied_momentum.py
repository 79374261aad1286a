"""docs/results-further.md on two tables, one of them without momentum: tables and numbers match the stored runs."""

import numpy as np
from page_text import cells_of, section, words
from paired_differences import interval, mean_and_interval, mean_and_spread
from stored_runs import STORED, of_seeds, reported

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import corrected_count, primary_comparisons
from coupled_adam.study.results import read_results

OUTPUT, TUNED = "untied-momentum", "untied-momentum-tuned"
OUTPUT_RATE = "optimizer.tables.lr_factor"
BOTH, FACTORED = "standard b1=0 b2=0.99", "y=1 b1=0 b2=0.99"
WITH_MEAN = f"{FACTORED} with mean"
OF_OUTPUT = ("standard", BOTH, FACTORED)
NONE = "\N{EN DASH}"


def values(optimizer: str, metric: str = "loss", study: str = OUTPUT) -> np.ndarray:
    """A metric of seeds 1, 2 and 3."""
    return of_seeds(reported(study), optimizer, metric)


def trials(study: str, key: str) -> dict[tuple[str, str], float]:
    """Validation losses of the candidates by optimizer and factor."""
    return {
        (run.optimizer, f"{run.trial.value:g}"): run.metrics["val_loss"] or 0.0
        for run in read_results(STORED / study)
        if run.trial is not None and run.is_candidate and run.trial.key == key
    }


def text() -> str:
    return section("Which beta2").split("### With two tables")[1].split("### ")[0]


def assert_trials(rows: list[list[str]], factors: list[str], study: str, key: str, names: tuple[str, ...]) -> None:
    found = trials(study, key)
    winners = {name: min((loss, factor) for (own, factor), loss in found.items() if own == name)[1] for name in names}
    for name, cells in zip(names, rows, strict=True):
        for factor, cell in zip(factors, cells, strict=True):
            loss = found.get((name, factor))
            shown = NONE if loss is None else f"{loss:.3f}"
            assert cell == (f"**{shown}**" if factor == winners[name] else shown), (name, factor)


def test_the_losses_with_two_tables_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("untied-momentum losses")
    expected = []
    for study, names in ((TUNED, OF_OUTPUT), (OUTPUT, (*OF_OUTPUT, WITH_MEAN))):
        for name in names:
            loss, iso, ratio = (values(name, key, study) for key in ("loss", "iso", "mu_norm_ratio"))
            gap = NONE if name == "standard" else mean_and_interval(loss - values("standard", study=study))
            expected.append([mean_and_spread(loss), gap, f"{iso.mean():.2f}", f"{ratio.mean():.2f}"])
    assert [row[2:] for row in rows] == expected


def test_mean_free_updates_change_no_loss_of_an_output_table() -> None:
    difference = values(FACTORED) - values(WITH_MEAN)
    assert np.abs(difference).max() < 3e-6
    assert "the losses differ by at most 3e-6" in text()
    assert (values(FACTORED, "iso") > values(WITH_MEAN, "iso") + 0.2).all()
    found = trials(OUTPUT, OUTPUT_RATE)
    apart = [f"{found[FACTORED, factor] - found[WITH_MEAN, factor]:.3f}" for factor in ("9", "27")]
    assert f"(by {apart[0]} and {apart[1]} in the unstable trials at 9 and 27 times)" in text()


def test_the_text_on_the_output_table_matches_the_stored_runs() -> None:
    gaps = {study: values(FACTORED, study=study) - values("standard", study=study) for study in (TUNED, OUTPUT)}
    below, above = -gaps[TUNED], gaps[OUTPUT]
    assert f"is {below.mean():.3f} below AdamW ({interval(below)})" in text()
    assert f"AdamW leads by {above.mean():.2f} ({interval(above)})" in text()
    for page in ("README.md", "docs/should-i-use-it.md", "docs/results.md"):
        assert f"{below.mean():.3f} below AdamW ({interval(below)})" in words(page), page
        assert f"{above.mean():.3f} above ({interval(above)})" in words(page), page
    higher = [values(name).mean() - values(name, study=TUNED).mean() for name in OF_OUTPUT]
    assert f"all losses are {min(higher):.2f} to {max(higher):.2f} higher" in text()
    tuned, other = (values(FACTORED, study=study) - values(BOTH, study=study) for study in (TUNED, OUTPUT))
    assert f"({-tuned.mean():.2f} below with 27 times, {interval(-tuned)};" in text()
    assert f"{other.mean():.2f} above with 1 times, {interval(other)})" in text()
    outcomes = []
    for study, expected in ((TUNED, "better"), (OUTPUT, "worse")):
        found = primary_comparisons(gather_grid(reported(study)))
        assert {each.outcome for each in found} == {expected}
        outcomes += found
    assert corrected_count(outcomes) == 5
    assert "over the two and the three comparisons with AdamW, all five are significant" in text()
    assert {run.commit for run in reported(TUNED)} == {"71f9f72"}
    assert {run.commit for run in reported(OUTPUT)} == {"22774c5"}


def test_the_trials_with_two_tables_match_the_stored_runs() -> None:
    head, _, *rows = cells_of("untied-momentum trials")
    for study, block in ((TUNED, rows[:3]), (OUTPUT, rows[3:])):
        assert_trials([row[2:] for row in block], head[2:], study, OUTPUT_RATE, OF_OUTPUT)


INPUT, UNSTABLE = "input-momentum", "input-momentum-unstable"
OF_INPUT = ("standard", "input b2=0.99", "input b1=0 b2=0.99")


def text_on_the_input_table() -> str:
    return section("Which beta2").split("### The input table of two")[1].split("### ")[0]


def test_the_losses_with_another_input_table_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("input-momentum losses")
    expected = []
    for name in OF_INPUT:
        loss, iso = values(name, study=INPUT), values(name, "input_iso", study=INPUT)
        gap = NONE if name == "standard" else mean_and_interval(loss - values("standard", study=INPUT))
        expected.append([mean_and_spread(loss), gap, f"{iso.mean():.2f}"])
    assert [row[1:] for row in rows] == expected
    head, _, *rows = cells_of("input-momentum trials")
    assert_trials([row[1:] for row in rows], head[1:], INPUT, "optimizer.input_table.lr_factor", OF_INPUT)
    gain = values("standard", study=TUNED) - values(BOTH, study=TUNED)
    assert f"The output side gains more, {gain.mean():.3f}" in text_on_the_input_table()


def test_the_text_on_the_input_table_matches_the_stored_runs() -> None:
    longer, both = (values("standard", study=INPUT) - values(name, study=INPUT) for name in OF_INPUT[1:])
    assert min(*longer, *both) > 0  # "with every seed"
    assert f"lowers the loss by {both.mean():.3f} ({interval(both)})" in text_on_the_input_table()
    assert f"alone gains {longer.mean():.3f} ({interval(longer)})" in text_on_the_input_table()
    said = f"lowered the loss by {both.mean():.3f} ({interval(both)})"
    assert said in words("docs/should-i-use-it.md")
    found = primary_comparisons(gather_grid(reported(INPUT)))
    assert [each.outcome for each in found] == ["better", "better"]
    assert "Corrected by Holm's method over these two comparisons, both are significant." in text_on_the_input_table()
    assert {run.commit for run in reported(INPUT)} == {"ae8d3ac"}
    assert {run.commit for run in reported(UNSTABLE)} == {"2139f5a"}


def test_the_first_design_of_the_input_table_was_unstable() -> None:
    losses = {name: values(name, study=UNSTABLE) for name in OF_INPUT}
    apart = [loss - own.min() for own in losses.values() for loss in own if loss - own.min() > 0.1]
    assert len(apart) == 3
    assert f"three of its nine runs ended {min(apart):.2f} to {max(apart):.2f} above" in text_on_the_input_table()
