"""Studies over `model.output_bias`: distinct names and hashes, one size, and results that a report compares."""

from pathlib import Path

import pytest
from study_runs import ADAMW, COUPLED, run_here, write_study

from coupled_adam.config.run_config import load_config
from coupled_adam.config.study_config import load_study, with_settings
from coupled_adam.models.model_config import parameter_count
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.published import paper_optimizers
from coupled_adam.report.result_tables import build_tables
from coupled_adam.study.config_hash import config_hash
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.results import read_results

UNIGRAM = COUPLED + 'set = { "model.output_bias" = "unigram" }\n'
LEARNED = COUPLED + 'set = { "model.output_bias" = "learned" }\n'
NAMED = '[[optimizers]]\nname = "ours"\nembeddings = "adamw"\nset = { "model.output_bias" = "learned" }\n'


def test_each_optimizer_may_have_its_own_bias_and_is_named_after_it(tmp_path: Path) -> None:
    cells = cells_of(load_study(str(write_study(tmp_path, COUPLED + UNIGRAM + LEARNED + NAMED))))
    of_first_seed = [cell for cell in cells if cell.seed == 1]
    assert [cell.optimizer for cell in of_first_seed] == [
        *("coupled", "coupled unigram bias", "coupled learned bias", "ours")
    ]
    assert [cell.config.model.output_bias for cell in of_first_seed] == ["none", "unigram", "learned", "learned"]
    assert of_first_seed[1].id.endswith("-coupled-unigram-bias")
    assert len({cell.config_hash for cell in cells}) == len(cells)
    assert len({cell.parameters for cell in cells}) == 1


def test_a_bias_can_be_set_for_single_models_or_for_all_runs(tmp_path: Path) -> None:
    models = "".join(
        f'[[models]]\nname = "{kind}"\nset = {{ "model.output_bias" = "{kind}" }}\n' for kind in ("unigram", "learned")
    )
    file = str(write_study(tmp_path, ADAMW + COUPLED + models))
    cells = cells_of(load_study(file))
    assert {(cell.model, cell.config.model.output_bias) for cell in cells} == {
        (kind, kind) for kind in ("unigram", "learned")
    }
    study, left = with_settings(load_study(file), ["model.output_bias=none"])
    assert {cell.config.model.output_bias for cell in cells_of(study, left)} == {"none"}


def test_an_unknown_bias_is_reported_before_anything_starts(tmp_path: Path) -> None:
    file = write_study(tmp_path, COUPLED + 'set = { "model.output_bias" = "bigram" }\n')
    with pytest.raises(ValueError, match=r'model\.output_bias = "bigram"'):
        cells_of(load_study(str(file)))


def test_only_a_bias_that_is_set_changes_the_hash() -> None:
    """The hash of a run without one is that of version 0.1.0, which `test_study_rows` checks."""
    plain = load_config("tiny")
    assert config_hash(plain) == config_hash(load_config("tiny", ["model.output_bias=none"]))
    hashes = {config_hash(load_config("tiny", [f"model.output_bias={kind}"])) for kind in ("unigram", "learned")}
    assert len(hashes | {config_hash(plain)}) == 3


@pytest.mark.usefixtures("trained_here")
def test_a_report_compares_runs_with_and_without_a_bias_at_one_size(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED + LEARNED)
    run_here(file, tmp_path / "out")
    results = read_results(tmp_path / "out")
    assert {result.settings.get("output_bias") for result in results} == {None, "learned"}
    assert {result.parameters for result in results} == {
        parameter_count(cells_of(load_study(str(file)))[0].config.to_model_config())
    }
    grid = gather_grid(results)
    assert len(grid.sizes) == 1
    (comparisons,) = (table for table in build_tables(grid) if table.name == "comparisons")
    compared = {tuple(cell.text for cell in row[2:4]) for row in comparisons.rows}
    assert ("coupled", "coupled learned bias") in compared
    assert [variant.name for variant in grid.main_pair or ()] == ["standard", "coupled"]
    losses = {result.optimizer: result.metrics["loss"] for result in results if result.seed == 1}
    assert losses["coupled"] != losses["coupled learned bias"]


def test_published_numbers_are_not_shown_for_a_model_with_a_bias() -> None:
    assert paper_optimizers({"embeddings": "adamw"})
    assert not paper_optimizers({"embeddings": "adamw", "output_bias": "unigram"})
