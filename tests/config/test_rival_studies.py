"""The studies of rivals: each entry's settings, equal numbers of trials, and that the page names all entries."""

import re
from pathlib import Path
from typing import Any

import pytest

from coupled_adam.base.errors import UserError
from coupled_adam.config.study_config import load_study
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.learning_rates import rate_curves
from coupled_adam.report.study_plans import _planned
from coupled_adam.study.expansion import Cell, cells_of, chosen
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.selection import cells_in

PAGE = Path(__file__).parents[2] / "docs" / "rivals.md"
# The settings in which an entry differs from plain AdamW, by dotted key.
RIVALS: dict[str, dict[str, Any]] = {
    "standard": {},
    "standard b2=0.99": {"optimizer.tables.beta2": 0.99},
    "standard centred": {"optimizer.centre": True},
    "mu-loss": {"optimizer.mu_loss": 1e-4},
    "z-loss": {"optimizer.z_loss": 1e-4},
    "soft cap 30": {"model.logit_cap": 30.0},
    "coupled": {"optimizer.embeddings": "coupled"},
    "partial y=0.25 mean-free": {
        "optimizer.embeddings": "coupled",
        "optimizer.row_exponent": 0.25,
        "optimizer.mean_free": True,
    },
    "factored": {"optimizer.embeddings": "coupled", "optimizer.row_exponent": 1.0},
    "factored b1=0": {
        "optimizer.embeddings": "coupled",
        "optimizer.row_exponent": 1.0,
        "optimizer.tables.beta1": 0.0,
    },
    "per-row": {
        "optimizer.embeddings": "coupled",
        "optimizer.row_exponent": 1.0,
        "optimizer.column_exponent": 0.0,
    },
    "per-table": {"optimizer.embeddings": "coupled", "optimizer.column_exponent": 0.0},
    "sgd": {"optimizer.embeddings": "sgd"},
}
SELECTED = ("optimizer.tables.lr_factor", "optimizer.sgd_factor", "seed", "name")


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def candidates(name: str, tmp_path: Path) -> dict[str, list[Cell]]:
    """The candidates before any run is finished, by optimizer."""
    found: dict[str, list[Cell]] = {}
    for cell in cells_in(StudyFolder(tmp_path), load_study(name)):
        if cell.is_candidate:
            found.setdefault(cell.optimizer, []).append(cell)
    return found


def test_an_entry_differs_from_plain_adamw_only_in_its_own_settings(tmp_path: Path) -> None:
    found = candidates("rivals", tmp_path)
    assert list(found) == list(RIVALS)
    plain = flat(found["standard"][0].config.model_dump())
    for name, cells in found.items():
        own = flat(cells[0].config.model_dump())
        different = {key: value for key, value in own.items() if value != plain[key] and key not in SELECTED}
        assert different == RIVALS[name], name


@pytest.mark.parametrize(("name", "first"), [("rivals", 2), ("muon", 3)])
def test_every_entry_has_the_same_number_of_trials_on_a_seed_that_is_not_reported(
    name: str, first: int, tmp_path: Path
) -> None:
    study = load_study(name)
    assert study.seeds == [1, 2, 3]
    # With two values the winner is always at an edge, so that at least a third is tried.
    assert first + study.select.extend >= 3
    for cells in candidates(name, tmp_path).values():
        assert len({cell.config_hash for cell in cells}) == first
        assert {cell.seed for cell in cells} == {0}


def test_all_entries_under_muon_train_the_matrices_by_muon() -> None:
    cells = cells_of(load_study("muon"))
    assert {cell.config.optimizer.matrices for cell in cells} == {"muon"}
    tables = {cell.optimizer: cell.config.optimizer.tables for cell in cells}
    assert {name: (own.beta1, own.beta2) for name, own in tables.items()} == {
        "standard": (None, None),
        "coupled": (None, None),
        "partial y=0.25 mean-free": (None, None),
        "standard b2=0.99": (None, 0.99),
        "partial y=0.25 mean-free b2=0.99": (None, 0.99),
        "standard b1=0 b2=0.99": (0.0, 0.99),
        "factored mean-free b1=0 b2=0.99": (0.0, 0.99),
    }


def test_a_pattern_without_a_run_names_reported_runs_before_trials_and_not_all_of_them(tmp_path: Path) -> None:
    cells = cells_in(StudyFolder(tmp_path), load_study("rivals"))
    with pytest.raises(UserError) as error:
        chosen(cells, ["nothing"])
    message = str(error.value)
    named = {cell.id: cell for cell in cells if re.search(rf"{re.escape(cell.id)}(,| and )", message)}
    assert 3 <= len(named) <= 10
    assert not any(cell.is_candidate for cell in named.values())


def test_learning_rates_are_three_curves_of_five_rates_each() -> None:
    cells = cells_of(load_study("learning-rates"))
    curves = rate_curves(gather_grid([], _planned(cells)))
    assert {curve.name for curve in curves} == {"standard", "coupled", "partial y=0.25 mean-free"}
    for curve in curves:
        assert [lr for lr, _ in curve.cells] == [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]


def test_the_page_of_rivals_names_every_entry_and_tests_that_exist() -> None:
    text = PAGE.read_text()
    for name in RIVALS:
        assert f"| `{name}` |" in text, name
    for part in text.split("`"):
        if part.startswith("tests/"):
            assert (PAGE.parents[1] / part).is_file(), part
