"""docs/results.md on beta2 with other batch sizes: its table, pictures and numbers match the stored runs."""

from types import ModuleType

import numpy as np
import pytest
from page_text import cells_of, section, words
from paired_differences import contains_zero, interval, mean_and_interval, mean_and_spread
from stored_runs import of_seeds, reported
from svg_files import DOCS, load_script

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import primary_comparisons

STUDY = "table-beta2-batch"
TOKENS = {"batch-2": 256, "batch-8": 1024, "batch-32": 4096}
ROWS = 4096
LONGER, PARTIAL = "standard b2=0.99", "y=0.25"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    return load_script(DOCS / "results" / "pictures.py")


def losses(model: str, optimizer: str) -> np.ndarray:
    """Test losses of seeds 1, 2 and 3."""
    return of_seeds([run for run in reported(STUDY) if run.model == model], optimizer)


def changes(optimizer: str) -> dict[str, np.ndarray]:
    """The difference in test loss from AdamW with beta2 = 0.95, by batch size and seed."""
    return {model: losses(model, optimizer) - losses(model, "standard") for model in TOKENS}


def text() -> str:
    return section("Which beta2").split("### With other batch sizes")[1]


def test_the_losses_by_batch_size_match_the_stored_runs() -> None:
    _, _, *rows = cells_of("table-beta2-batch losses")
    longer, partial = changes(LONGER), changes(PARTIAL)
    assert rows == [
        [
            f"{tokens:,}",
            f"{tokens / ROWS:.2f}",
            *(mean_and_spread(losses(model, optimizer)) for optimizer in ("standard", LONGER)),
            mean_and_interval(longer[model]),
            mean_and_spread(losses(model, PARTIAL)),
            mean_and_interval(partial[model]),
        ]
        for model, tokens in TOKENS.items()
    ]


def test_the_gain_shrinks_with_the_batch_as_the_text_says() -> None:
    gains = [f"{-change.mean():.2f}" for change in changes(LONGER).values()]
    said = f"lowers AdamW's loss by {gains[0]} with 256 tokens per step, by {gains[1]} with 1,024, and not with 4,096"
    assert said in text()
    assert [contains_zero(change) for change in changes(LONGER).values()] == [False, False, True]
    shown = [interval(-change) for change in changes(LONGER).values()]
    advice = (
        f"{gains[0]} with 0.06 tokens per step and vocabulary row ({shown[0]}), {gains[1]} with 0.25 ({shown[1]}), and"
    )
    assert f"{advice} almost nothing with 1: {gains[2].removeprefix('-')} ({shown[2]})" in words(
        "docs/should-i-use-it.md"
    )


def test_the_corrected_comparisons_are_named() -> None:
    found = primary_comparisons(gather_grid(reported(STUDY)))
    decided = {(each.optimizer.size.model, each.optimizer.variant.name): each.outcome for each in found}
    assert decided == {
        ("batch-2", LONGER): "better",
        ("batch-2", PARTIAL): "better",
        ("batch-8", LONGER): "better",
        ("batch-8", PARTIAL): "open",
        ("batch-32", LONGER): "open",
        ("batch-32", PARTIAL): "open",
    }
    assert "over these six comparisons, three losses are significantly lower" in text()
    assert "with β₂ = 0.99 at 256 and at 1,024 tokens per step, and row exponent 0.25 at 256" in text()
    means = {optimizer: losses("batch-32", optimizer).mean() for optimizer in ("standard", LONGER, PARTIAL)}
    assert min(means, key=lambda name: means[name]) == PARTIAL  # "it has the lowest mean"
    assert changes(PARTIAL)["batch-8"].mean() > 0  # "at 1,024 it is above AdamW"


def test_the_gain_by_occurrence_is_what_the_text_says(pictures: ModuleType) -> None:
    found = {batches.label: pictures.gain_by_occurrence(batches) for batches in pictures.BATCHES}
    assert len(found) == 4
    frequent = [gain for points in found.values() for k, gain in points if k < 5]
    assert f"at least every five steps gain {-min(frequent):.2f} nats at most" in text()
    assert f"up to {-min(gain for _, gain in found['tiny, 1,024']):.1f} with 1,024 tokens per step" in text()
    assert sum(k > 10 for k, _ in found["tiny, 4,096"]) == 2
    assert [gain > 0 for _, gain in found["tiny, 256 tokens per step"]] == [False] * 8 + [True] * 2


def test_the_gain_by_occurrence_is_the_table_of_the_rivals(pictures: ModuleType) -> None:
    """The same numbers, computed for the section on the rivals."""
    _, _, intervals, gains, _ = cells_of("rivals intervals")
    [of_rivals] = [batches for batches in pictures.BATCHES if batches.study == "rivals"]
    for (k, gain), steps, cell in zip(pictures.gain_by_occurrence(of_rivals), intervals[1:], gains[1:], strict=True):
        assert steps == (f"{k:.1f}" if k < 10 else f"{k:.0f}")
        assert cell.strip("[]") == f"{gain:.2f}"


def test_the_runs_have_one_commit_and_no_winner_at_an_edge() -> None:
    commits = {run.commit for run in reported(STUDY)}
    assert len(commits) == 1
    assert f"commit {commits.pop()}" in text()
    assert not any(run.trial.edge for run in reported(STUDY) if run.trial is not None)
