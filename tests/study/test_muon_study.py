"""Studies over `optimizer.matrices`: names, hashes, results in a report, and unchanged runs without Muon."""

from pathlib import Path

import pytest
from study_runs import ADAMW, COUPLED, run_here, write_study

from coupled_adam.config.study_config import load_study, with_override, with_settings
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.published import paper_optimizers
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.results import read_results

MUON = 'set = { "optimizer.matrices" = "muon", "optimizer.muon.lr_factor" = 2.0 }\n'
NAMED = '[[optimizers]]\nname = "ours"\nembeddings = "adamw"\n' + MUON


def names(file: Path, *settings: str) -> list[str]:
    study, left = with_settings(load_study(str(file)), settings)
    cells = cells_of(study, left)
    assert [cell.label for cell in cells] == [cell.label for cell in cells_of(with_override(study, left))]
    return [cell.optimizer for cell in cells if cell.seed == 1]


def test_the_label_names_muon_if_the_matrices_differ_within_a_study(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED + ADAMW + MUON + COUPLED + MUON + NAMED)
    assert names(file) == ["standard", "coupled", "standard Muon", "coupled Muon", "ours"]
    cells = cells_of(load_study(str(file)))
    assert [cell.config.optimizer.muon.lr_factor for cell in cells if cell.seed == 1] == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert next(cell.id for cell in cells if cell.optimizer == "coupled Muon").endswith("-coupled-Muon")
    assert len({cell.config_hash for cell in cells}) == len(cells) - len({cell.seed for cell in cells})


def test_the_label_does_not_name_muon_if_all_have_it(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED)
    assert names(file, "optimizer.matrices=muon") == ["standard", "coupled"]
    assert names(file) == ["standard", "coupled"]


def test_an_entry_may_use_adamw_if_all_others_use_muon(tmp_path: Path) -> None:
    text = write_study(tmp_path, COUPLED + ADAMW + 'set = { "optimizer.matrices" = "adamw" }\n').read_text()
    head, _, entries = text.partition("[[optimizers]]")
    file = tmp_path / "mixed.toml"
    models = '[[models]]\nname = "S"\nset = { "optimizer.matrices" = "muon" }\n'
    file.write_text(f"{head}{models}[[optimizers]]{entries}")
    assert names(file) == ["coupled Muon", "standard"]


@pytest.mark.usefixtures("trained_here")
def test_a_result_has_the_settings_of_muon_only_if_they_are_set(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED + COUPLED + MUON)
    run_here(file, tmp_path / "out")
    results = read_results(tmp_path / "out")
    by_name = {result.optimizer: result for result in results}
    assert by_name["coupled Muon"].settings["matrices"] == "muon"
    assert by_name["coupled Muon"].settings["muon"] == {"lr_factor": 2.0}
    assert not {"matrices", "muon", "tables", "input_table"} & by_name["coupled"].settings.keys()
    grid = gather_grid(results)
    assert [variant.name for variant in grid.variants] == ["standard", "coupled", "coupled Muon"]
    assert [variant.name for variant in grid.main_pair or ()] == ["standard", "coupled"]
    losses = {result.optimizer: result.metrics["loss"] for result in results if result.seed == 1}
    assert losses["coupled"] != losses["coupled Muon"]


def test_published_numbers_are_not_shown_for_runs_with_muon_or_separate_table_settings() -> None:
    assert paper_optimizers({"embeddings": "adamw"})
    assert not paper_optimizers({"embeddings": "adamw", "matrices": "muon"})
    assert not paper_optimizers({"embeddings": "adamw", "tables": {"lr_factor": 2.0}})
