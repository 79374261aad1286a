"""Studies with `model.vocabulary_size = "auto"`: runs, hashes and folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from study_runs import ADAMW, COUPLED, run_here, write_study

from coupled_adam.config.run_config import load_config
from coupled_adam.config.study_config import load_study, parse_study, with_settings
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.study.config_hash import config_hash, settings_that_differ
from coupled_adam.study.expansion import cells_of, with_rows_in_numbers
from coupled_adam.study.results import read_results

STORED = Path(__file__).parents[2] / "docs" / "results"
LEFT_OPEN = {"model": {"vocabulary_size": "auto"}}


@pytest.mark.parametrize("name", ["single-gpu", "single-gpu-scaled", "centring", "untied-heads"])
def test_runs_of_the_first_version_are_still_runs_of_their_study(name: str) -> None:
    """Their presets had a fixed number of rows, which is part of the hash."""
    text = ["data.folder=data/enwiki", "data.source=none"]
    now = {cell.label: cell.config_hash for cell in cells_of(*with_settings(load_study(name), text))}
    stored = read_results(STORED / name)
    assert stored
    assert {f"{each.cell}/seed-{each.seed}": each.config_hash for each in stored}.items() <= now.items()


def test_automatic_rows_have_the_hash_of_their_number() -> None:
    for preset, rows in (("tiny", 4096), ("gpt2-125m", 50304)):
        numbered = load_config(preset, [f"model.vocabulary_size={rows}"])
        assert config_hash(load_config(preset)) == config_hash(numbered)
        assert settings_that_differ(load_config(preset), numbered) == []
        assert settings_that_differ(load_config(preset), load_config(preset, ["model.vocabulary_size=60000"])) == [
            "model.vocabulary_size"
        ]


@pytest.mark.parametrize("models", ["", '[[models]]\nname = "S"\n'])
@pytest.mark.parametrize("override", [{}, {"model.vocabulary_size": "auto"}])
def test_a_study_folder_gives_the_same_runs_without_the_corpus(
    models: str, override: dict[str, Any], tmp_path: Path
) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED + models, **LEFT_OPEN)
    study = load_study(str(file)).model_copy(update={"override": override})
    cells = cells_of(study)
    assert {cell.config.rows for cell in cells} == {64}
    kept = with_rows_in_numbers(study, cells)
    before = [(cell.label, cell.config_hash) for cell in cells]
    shutil.rmtree(tmp_path / "corpus")
    assert {cell.config.rows for cell in cells_of(study)} == {50304}
    assert [(cell.label, cell.config_hash) for cell in cells_of(kept)] == before
    assert [(cell.label, cell.config_hash) for cell in cells_of(parse_study(to_toml(kept), "copy", Path()))] == before


def test_a_number_of_rows_in_the_study_is_kept(tmp_path: Path) -> None:
    study = load_study(str(write_study(tmp_path, COUPLED, model={"vocabulary_size": 128})))
    assert with_rows_in_numbers(study, cells_of(study)) == study


def test_a_tokenizer_of_unknown_size_is_reported_with_its_runs() -> None:
    with pytest.raises(ValueError, match=r"study demo: .*data\.tokenizer = \"o400k\".*\(tiny, standard .*\b1\b"):
        cells_of(*with_settings(load_study("demo"), ["data.folder=data/not-there", "data.tokenizer=o400k"]))


@pytest.mark.usefixtures("trained_here")
def test_a_study_runs_and_records_its_rows(tmp_path: Path) -> None:
    file = write_study(tmp_path, COUPLED, **LEFT_OPEN)
    outcome, _ = run_here(file, tmp_path / "out", only=("*/seed-1",))
    assert (outcome.finished, outcome.failed) == (1, {})
    (result,) = read_results(tmp_path / "out")
    assert load_config(str(result.run_folder)).model.vocabulary_size == 64
    shutil.rmtree(tmp_path / "corpus")
    cells = cells_of(load_study(str(tmp_path / "out")))
    assert result.config_hash == cells[0].config_hash
