"""The key numbers of the first screen: their selection, their text, and their bars and dots."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fabricated_study import fabricate
from scipy.stats import ttest_ind

from coupled_adam.config.study_sections import ReportSection
from coupled_adam.metrics import METRICS
from coupled_adam.report.grid import Grid, gather_grid
from coupled_adam.report.key_numbers import KeyNumber, KeyNumbers, key_numbers
from coupled_adam.study.results import read_results

MEASURED = ("loss", "acc", "mu_norm_ratio", "iso", "kappa", "rho_log")
ONE, TWO = (("S", 1000, 10**6),), (("S", 1000, 10**6), ("S", 1000, 2 * 10**6))


def grid_of(folder: Path, sizes: Sequence[tuple[str, int, int]] = ONE, gain: float = 0.1) -> Grid:
    """Made-up runs of two optimizers, with every metric that can be a key number."""
    found = read_results(fabricate(folder, sizes=sizes, gain=gain, metrics=MEASURED, with_runs=False))
    return gather_grid([replace(run, metrics={**run.metrics, "r_cos": 50.0 + run.seed}) for run in found])


def numbers_of(grid: Grid, report: ReportSection | None = None) -> KeyNumbers:
    found = key_numbers(grid, report or ReportSection())
    assert found is not None
    return found


def number_of(found: KeyNumbers, key: str) -> KeyNumber:
    (number,) = (each for each in found.numbers if each.label.startswith(METRICS[key].label))
    return number


def test_if_the_embeddings_lead_four_of_their_numbers_come_first_and_the_loss_last(tmp_path: Path) -> None:
    found = numbers_of(grid_of(tmp_path / "s"), ReportSection(lead="embeddings")).numbers
    labels = [each.label.partition("\N{NO-BREAK SPACE}")[0] for each in found]
    assert labels == [METRICS[key].label for key in ("mu_norm_ratio", "iso", "r_cos", "kappa", "loss")]


def test_bars_start_at_zero_so_only_table_metrics_have_them(tmp_path: Path) -> None:
    grid = grid_of(tmp_path / "s")
    found = numbers_of(grid)
    assert number_of(found, "loss").bars is None
    assert number_of(found, "acc").bars is None
    means = [
        sum(values) / len(values)
        for variant in grid.variants
        if (values := [run.metrics["iso"] or 0.0 for run in grid.results if run.optimizer == variant.name])
    ]
    bars = number_of(found, "iso").bars
    assert bars is not None
    assert bars == tuple(round(100 * mean / max(means), 1) for mean in means)


def test_the_p_value_next_to_a_claim_is_small_whichever_optimizer_is_better(tmp_path: Path) -> None:
    for gain, side in ((0.1, "greater"), (-0.1, "less")):
        grid = grid_of(tmp_path / str(gain), gain=gain)
        losses = [[run.metrics["loss"] for run in grid.results if run.optimizer == each.name] for each in grid.variants]
        p = ttest_ind(*losses, alternative=side).pvalue
        assert p < 0.05
        shown = number_of(numbers_of(grid), "loss").p_value
        assert float(shown.removeprefix("<")) < 0.05


def test_a_number_of_one_size_mentions_the_result_of_both_sizes(tmp_path: Path) -> None:
    assert number_of(numbers_of(grid_of(tmp_path / "a")), "loss").over_sizes == ""
    found = numbers_of(grid_of(tmp_path / "b", TWO))
    assert "2 of 2 sizes" in number_of(found, "loss").over_sizes
    assert "D = 2M" in found.place
