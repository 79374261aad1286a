"""Which optimizers of a study are baselines: AdamW, but not AdamW with a further method beside AdamW without it."""

from pathlib import Path
from typing import Any

import pytest
from fabricated_study import COUPLED, STANDARD, fabricate

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.pair_tables import pairs_of
from coupled_adam.report.primary_comparisons import primary_comparisons
from coupled_adam.study.results import read_results

ADDED: dict[str, dict[str, Any]] = {
    "centred": {"centre": True},
    "mu-loss": {"mu_loss": 1e-4},
    "z-loss": {"z_loss": 1e-4},
    "capped": {"logit_cap": 30.0},
    "slower decay": {"tables": {"beta2": 0.99, "lr_factor": 3.0}},
    "input without momentum": {"input_table": {"beta1": 0.0, "lr_factor": 3.0}},
}


def compared(folder: Path, optimizers: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Names of baseline and optimizer in the primary comparisons."""
    results = read_results(
        fabricate(folder / "study", optimizers=optimizers, sizes=(("S", 1000, 4000),), with_runs=False)
    )
    return [
        (each.baseline.variant.name, each.optimizer.variant.name) for each in primary_comparisons(gather_grid(results))
    ]


@pytest.mark.parametrize("name", list(ADDED))
def test_adamw_with_a_method_is_compared_with_plain_adamw(name: str, tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, name: {**STANDARD, **ADDED[name]}, "coupled": COUPLED}
    assert compared(tmp_path, optimizers) == [("standard", name), ("standard", "coupled")]


def test_a_method_that_every_optimizer_has_leaves_adamw_the_baseline(tmp_path: Path) -> None:
    optimizers = {name: {**own, "z_loss": 1e-4} for name, own in (("standard", STANDARD), ("coupled", COUPLED))}
    assert compared(tmp_path, optimizers) == [("standard", "coupled")]


def test_another_learning_rate_of_the_tables_is_no_method(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "faster": {**STANDARD, "tables": {"lr_factor": 3.0}}, "coupled": COUPLED}
    assert compared(tmp_path, optimizers) == [("standard", "coupled"), ("faster", "coupled")]


def test_two_methods_are_compared_with_the_plain_one_and_not_with_each_other(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD} | {name: {**STANDARD, **own} for name, own in ADDED.items()}
    assert set(compared(tmp_path, optimizers)) == {("standard", name) for name in ADDED}


def test_a_method_is_compared_only_in_the_same_setup(tmp_path: Path) -> None:
    biased = {**STANDARD, "output_bias": "unigram"}
    optimizers = {"standard": STANDARD, "bias": biased, "bias mu-loss": {**biased, "mu_loss": 1e-4}}
    assert compared(tmp_path, optimizers) == [("bias", "bias mu-loss")]


def test_the_table_of_comparisons_has_the_same_baselines(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "coupled": COUPLED, "mu-loss": {**STANDARD, "mu_loss": 1e-4}}
    results = read_results(
        fabricate(tmp_path / "study", optimizers=optimizers, sizes=(("S", 1000, 4000),), with_runs=False)
    )
    [place] = gather_grid(results).places
    names = [cell.variant.name for cell in place.cells]
    pairs = {(names[first], names[second]) for first, second in pairs_of(place.cells)}
    assert pairs == {("standard", "mu-loss"), ("standard", "coupled"), ("coupled", "mu-loss")}
