"""Studies with members of the family of second moments: names, settings, and runs that are already finished."""

from pathlib import Path

import pytest
from study_evaluations import do
from study_runs import ADAMW, COUPLED, plan, write_study

from coupled_adam.base.errors import UserError
from coupled_adam.config.run_config import load_config
from coupled_adam.config.study_config import load_study, parse_study, with_settings
from coupled_adam.config.study_sections import OptimizerAxis
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_writer import write_report
from coupled_adam.study.config_hash import config_hash
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.optimizer_variants import variants_of
from coupled_adam.study.results import gather_results, read_results

PARTIAL = '[[optimizers]]\nembeddings = "coupled"\nrow_exponent = 0.25\nmean_free = true\n'
NAME = "partial y=0.25 mean-free"
STORED = Path(__file__).parents[2] / "docs" / "results"


def names(**values: object) -> list[str]:
    return [variant.name for variant in variants_of(OptimizerAxis.model_validate({"embeddings": "coupled", **values}))]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"row_exponent": 0.25, "mean_free": True}, [NAME]),
        ({"row_exponent": [0, 0.25, 1.0]}, ["coupled", "partial y=0.25", "factored"]),
        ({"row_exponent": 1.0, "column_exponent": [0.0, 1.0]}, ["per-row", "factored"]),
        ({"row_exponent": 0.5, "couple": "all"}, ["partial all y=0.5"]),
        ({"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": "10%"}, ["partial y=1-0.25"]),
        ({"scale_exponent": [0, 2], "mean_free": True}, ["coupled mean-free", "coupled mean-free n=2"]),
        ({"name": "mine", "row_exponent": [0.25, 0.5]}, ["mine y=0.25", "mine y=0.5"]),
        ({"name": "mine", "row_exponent": 0.25, "mean_free": True}, ["mine"]),
        ({"embeddings": "adamw", "centre": True}, ["standard centred"]),
        ({"embeddings": "sgd", "sgd_factor": [100, 300]}, ["sgd f=100", "sgd f=300"]),
    ],
)
def test_names_follow_from_the_settings(values: dict[str, object], expected: list[str]) -> None:
    assert names(**values) == expected


def test_partially_coupled_shares_its_first_two_optimizers_with_single_gpu() -> None:
    cells = cells_of(load_study("partially-coupled"))
    assert len(cells) == 18
    single = {cell.label: cell.config_hash for cell in cells_of(load_study("single-gpu"))}
    found = {cell.label: cell.config_hash for cell in cells}
    assert {label: found[label] for label in single} == single
    third = [cell for cell in cells if cell.optimizer == NAME]
    assert {cell.id for cell in third} == {f"30M-{tokens}-partial-y0.25-mean-free" for tokens in ("82M", "262M")}
    for cell in third:
        optimizer = cell.config.optimizer
        assert (optimizer.row_exponent, optimizer.column_exponent, optimizer.mean_free) == (0.25, 1.0, True)
        assert optimizer.row_exponent_start is None


def test_a_study_is_read_back_unchanged() -> None:
    study = load_study("partially-coupled")
    assert parse_study(to_toml(study), "copy", Path()) == study


@pytest.mark.parametrize("name", ["single-gpu", "centring", "single-gpu-scaled"])
def test_published_results_have_the_current_hashes_of_their_studies(name: str) -> None:
    study, settings = with_settings(load_study(name), ["data.folder=data/enwiki", "data.source=none"])
    planned = {(cell.id, cell.seed): cell.config_hash for cell in cells_of(study, settings)}
    stored = {(result.cell, result.seed): result.config_hash for result in read_results(STORED / name)}
    assert stored
    assert {run: planned[run] for run in stored} == stored


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ("row_exponent=0.0", True),
        ("column_exponent=1.0", True),
        ("mean_free=false", True),
        ("anneal=none", True),
        ("row_exponent=0.25", False),
        ("column_exponent=0.5", False),
        ("mean_free=true", False),
    ],
)
def test_a_new_key_changes_the_hash_of_a_run_only_if_it_is_set(change: str, is_same: bool) -> None:
    assert (config_hash(load_config("tiny", [f"optimizer.{change}"])) == config_hash(load_config("tiny"))) is is_same


def test_a_third_optimizer_can_join_a_study_without_changing_its_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = write_study(tmp_path, ADAMW + COUPLED)
    out = tmp_path / "out"
    do(file, out)
    before = {path: path.read_bytes() for path in out.glob("runs/*/seed-*/evaluation.json")}
    assert len(before) == 4
    study, cells = plan(write_study(tmp_path, ADAMW + COUPLED + PARTIAL))
    folder = StudyFolder(out)
    folder.require_fit(study, cells)
    states = {cell.label: folder.status(cell, study.evaluation) for cell in cells}
    assert [label for label, state in states.items() if state != "finished"] == [
        f"small-1.536k-partial-y0.25-mean-free/seed-{seed}" for seed in (1, 2)
    ]
    do(tmp_path / "study.toml", out, only=("*-partial-*",))
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {cell.label: folder.status(cell, study.evaluation) for cell in cells} == dict.fromkeys(states, "finished")
    gather_results(out, [folder.run(cell) for cell in cells])
    results = read_results(out)
    assert [variant.name for variant in gather_grid(results).variants] == ["standard", "coupled", NAME]
    assert {result.settings["mean_free"] for result in results if result.optimizer == NAME} == {True}
    folder.prepare(study)
    assert "partially coupled (y = 0.25, mean-free)" in write_report([out], out).read_text()


def test_mistake_in_an_exponent_is_named_with_its_optimizer(tmp_path: Path) -> None:
    wrong = PARTIAL.replace("0.25", "1.5")
    with pytest.raises(UserError, match=r"\[\[optimizers\]\] number 3: row_exponent"):
        plan(write_study(tmp_path, ADAMW + COUPLED + wrong))
    with pytest.raises(UserError, match=r"optimizer\.anneal is missing"):
        plan(write_study(tmp_path, ADAMW + PARTIAL + "row_exponent_start = 1.0\n"))
