"""docs/results-further.md on two tables, one of them without momentum: tables and numbers match the stored runs."""

from functools import cache

import numpy as np
from page_text import ROOT, cells_of, section, words
from paired_differences import interval, mean_and_interval

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import corrected_count, primary_comparisons
from coupled_adam.study.results import Result, read_results

STORED = ROOT / "docs" / "results"
OUTPUT = "untied-momentum"
BOTH, FACTORED = "standard b1=0 b2=0.99", "y=1 b1=0 b2=0.99"
WITH_MEAN = f"{FACTORED} with mean"
NONE = "\N{EN DASH}"


@cache
def runs(study: str) -> list[Result]:
    return read_results(STORED / study)


def values(optimizer: str, metric: str = "loss", study: str = OUTPUT) -> np.ndarray:
    """A metric of seeds 1, 2 and 3."""
    own = [run for run in runs(study) if run.optimizer == optimizer and not run.is_candidate]
    by_seed = {run.seed: run.metrics[metric] for run in own}
    return np.array([by_seed[seed] for seed in (1, 2, 3)], dtype=np.float64)


def trials(study: str, key: str) -> dict[tuple[str, str], float]:
    """Validation losses of the candidates by optimizer and factor."""
    return {
        (run.optimizer, f"{run.trial.value:g}"): run.metrics["val_loss"] or 0.0
        for run in runs(study)
        if run.trial is not None and run.is_candidate and run.trial.key == key
    }


def text() -> str:
    return section("Which beta2").split("### With two tables")[1].split("### ")[0]


def assert_trials(mark: str, study: str, key: str, names: tuple[str, ...]) -> None:
    head, _, *rows = cells_of(mark)
    found = trials(study, key)
    winners = {name: min((loss, factor) for (own, factor), loss in found.items() if own == name)[1] for name in names}
    for name, (_, *cells) in zip(names, rows, strict=True):
        for factor, cell in zip(head[1:], cells, strict=True):
            loss = found.get((name, "0.333333" if factor == "1/3" else factor))
            shown = NONE if loss is None else f"{loss:.3f}"
            assert cell == (f"**{shown}**" if factor == winners[name] else shown), (name, factor)


def test_the_losses_with_two_tables_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("untied-momentum losses")
    expected = []
    for name in ("standard", BOTH, FACTORED, WITH_MEAN):
        loss, iso, ratio = (values(name, key) for key in ("loss", "iso", "mu_norm_ratio"))
        gap = NONE if name == "standard" else mean_and_interval(loss - values("standard"))
        shown = f"{loss.mean():.3f}({1000 * loss.std(ddof=1):.0f})"
        expected.append([shown, gap, f"{iso.mean():.2f}", f"{ratio.mean():.2f}"])
    assert [row[1:] for row in rows] == expected


def test_mean_free_updates_change_no_loss_of_an_output_table() -> None:
    difference = values(FACTORED) - values(WITH_MEAN)
    assert np.abs(difference).max() < 3e-6
    assert "the losses differ by at most 3e-6" in text()
    assert (values(FACTORED, "iso") > values(WITH_MEAN, "iso") + 0.2).all()


def test_the_text_on_the_output_table_matches_the_stored_runs() -> None:
    above, from_both = values(FACTORED) - values("standard"), values(FACTORED) - values(BOTH)
    both = values(BOTH) - values("standard")
    assert f"{both.mean():.2f} ({interval(both)}) above AdamW" in text()
    assert f"{above.mean():.2f} ({interval(above)})" in text()
    assert f"{from_both.mean():.2f} above AdamW with both betas ({interval(from_both)})" in text()
    found = primary_comparisons(gather_grid([run for run in runs(OUTPUT) if not run.is_candidate]))
    assert corrected_count(found) == 3
    assert {each.outcome for each in found} == {"worse"}
    assert "Corrected by Holm's method over these three comparisons, all three are significant" in text()
    said = f"{above.mean():.2f} above AdamW ({interval(above)}"
    for page in ("README.md", "docs/should-i-use-it.md", "docs/results.md"):
        assert said in words(page), page


def test_the_trials_with_two_tables_match_the_stored_runs() -> None:
    names = ("standard", BOTH, FACTORED)
    assert_trials("untied-momentum trials", OUTPUT, "optimizer.tables.lr_factor", names)


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
        expected.append([f"{loss.mean():.3f}({1000 * loss.std(ddof=1):.0f})", gap, f"{iso.mean():.2f}"])
    assert [row[1:] for row in rows] == expected
    assert_trials("input-momentum trials", INPUT, "optimizer.input_table.lr_factor", OF_INPUT)


def test_the_text_on_the_input_table_matches_the_stored_runs() -> None:
    longer, both = (values("standard", study=INPUT) - values(name, study=INPUT) for name in OF_INPUT[1:])
    assert min(*longer, *both) > 0  # "with every seed"
    assert f"lowers the loss by {both.mean():.3f} ({interval(both)})" in text_on_the_input_table()
    assert f"alone gains {longer.mean():.3f} ({interval(longer)})" in text_on_the_input_table()
    said = f"lowered the loss by {both.mean():.3f} ({interval(both)})"
    assert said in words("docs/should-i-use-it.md")
    found = primary_comparisons(gather_grid([run for run in runs(INPUT) if not run.is_candidate]))
    assert [each.outcome for each in found] == ["better", "better"]
    assert "Corrected by Holm's method over these two comparisons, both are significant." in text_on_the_input_table()
    assert {run.commit for run in runs(INPUT)} == {"ae8d3ac"}
    assert {run.commit for run in runs(UNSTABLE)} == {"2139f5a"}


def test_the_first_design_of_the_input_table_was_unstable() -> None:
    losses = {name: values(name, study=UNSTABLE) for name in OF_INPUT}
    apart = [loss - own.min() for own in losses.values() for loss in own if loss - own.min() > 0.1]
    assert len(apart) == 3
    assert f"three of its nine runs ended {min(apart):.2f} to {max(apart):.2f} above" in text_on_the_input_table()
