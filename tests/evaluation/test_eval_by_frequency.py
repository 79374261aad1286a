"""`coupled-adam eval`: the loss by token frequency is printed, stored and not measured twice."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_cli import TASKS, run, without_extras
from export_models import TOKENS

from coupled_adam.base.text import shorthand
from coupled_adam.data.manifest import UNIGRAM_FILE
from coupled_adam.evaluation.downstream import evaluate, harness
from coupled_adam.evaluation.downstream.task_results import read_downstream
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.loss_by_frequency import FrequencyBin
from coupled_adam.evaluation.weights import load_run

pytestmark = pytest.mark.usefixtures("small_index")
COUNTS = 2 ** (np.arange(TOKENS) % 12)


@pytest.fixture(scope="module", autouse=True)
def counted(folder: Path) -> None:
    """The corpus of the run, with token counts."""
    np.save(folder / "corpus" / UNIGRAM_FILE, COUNTS)


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run with the original corpus."""
    shutil.copytree(folder / "run", tmp_path / "run")
    return tmp_path / "run"


def expected_bins(folder: Path, counts: np.ndarray = COUNTS) -> Sequence[FrequencyBin]:
    model, _, corpus = load_run(folder / "run")
    assert corpus is not None
    found = loss_over(model, corpus.tokens("test"), training_counts=counts).by_frequency
    assert found is not None
    return found


def stored_bins(place: Path) -> Sequence[FrequencyBin]:
    found = read_downstream(place)
    assert found is not None
    assert found.loss is not None
    assert found.loss.by_frequency is not None
    return found.loss.by_frequency


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("this was done before")


def test_table_has_a_row_for_every_bin_with_tokens(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extras(monkeypatch)
    result = run(place, "--tasks", "none")
    assert result.exit_code == 0, result.output
    bins = stored_bins(place)
    assert list(bins) == list(expected_bins(folder))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    shown = {row[0]: row[1:] for row in rows if row[0].isdigit()}
    assert [int(number) for number in shown] == [number for number, each in enumerate(bins, 1) if each.tokens]
    for number, (_, tokens, targets, loss, calibration) in shown.items():
        each = bins[int(number) - 1]
        assert (tokens, targets) == (f"{each.tokens:,}", f"{each.targets:,}")
        assert each.loss is not None
        assert loss == shorthand(each.loss, each.standard_error, 3)
        assert calibration == f"{each.calibration:.3f}"


def test_json_has_every_bin_and_their_mean_is_the_loss(place: Path) -> None:
    result = run(place, "--tasks", "none", "--json")
    loss = json.loads(result.stdout, parse_constant=pytest.fail)["loss"]
    bins = loss["by_frequency"]
    assert len(bins) == 10
    assert all(each.keys() == FrequencyBin.__dataclass_fields__.keys() for each in bins)
    assert sum(each["tokens"] for each in bins) == TOKENS
    assert sum(each["targets"] for each in bins) == loss["targets"]
    total = sum(each["targets"] * (each["loss"] or 0) for each in bins)
    assert total / loss["targets"] == pytest.approx(loss["loss"], rel=1e-9)


def test_it_is_added_to_results_without_it_and_no_task_is_repeated(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (place, "--task-data", folder / "tasks", "--tasks", TASKS)
    assert run(*arguments).exit_code == 0
    file = place / "downstream.json"
    whole = json.loads(file.read_text())
    old = json.loads(file.read_text())
    del old["loss"]["by_frequency"]  # as version 0.1.0 writes it
    file.write_text(json.dumps(old))
    monkeypatch.setattr(harness, "evaluate_task", forbidden)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    new = json.loads(file.read_text())
    del whole["loss"]["seconds"], new["loss"]["seconds"]
    assert new == whole


def test_existing_results_are_not_measured_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(place, "--tasks", "none").exit_code == 0
    before = (place / "downstream.json").read_text()
    monkeypatch.setattr(evaluate, "loss_over", forbidden)
    result = run(place, "--tasks", "none")
    assert result.exit_code == 0, result.output
    assert (place / "downstream.json").read_text() == before


def with_corpus(folder: Path, place: Path, tmp_path: Path) -> Path:
    """A copy of the corpus, used by the run."""
    corpus = tmp_path / "corpus"
    shutil.copytree(folder / "corpus", corpus)
    config = place / "config.toml"
    config.write_text(config.read_text().replace(json.dumps(str(folder / "corpus")), json.dumps(str(corpus))))
    return corpus


def test_a_corpus_without_counts_is_counted(folder: Path, place: Path, tmp_path: Path) -> None:
    corpus = with_corpus(folder, place, tmp_path)
    (corpus / UNIGRAM_FILE).unlink()
    shards = json.loads((corpus / "manifest.json").read_text())["splits"]["train"]["shards"]
    tokens = np.concatenate([np.fromfile(corpus / shard["file"], "<u2") for shard in shards])
    assert run(place, "--tasks", "none").exit_code == 0
    assert list(stored_bins(place)) == list(expected_bins(folder, np.bincount(tokens, minlength=TOKENS)))


def test_unreadable_counts_give_a_note_and_the_loss_is_still_measured(
    folder: Path, place: Path, tmp_path: Path
) -> None:
    corpus = with_corpus(folder, place, tmp_path)
    (corpus / UNIGRAM_FILE).write_bytes(b"no array")
    result = run(place, "--tasks", "none", "--json")
    assert result.exit_code == 0, result.output
    assert str(corpus / UNIGRAM_FILE) in result.stderr
    loss = json.loads(result.stdout)["loss"]
    assert loss["by_frequency"] is None
    assert loss["loss"] > 0
    # After the file is repaired, the same command adds the missing part.
    np.save(corpus / UNIGRAM_FILE, COUNTS)
    assert run(place, "--tasks", "none").exit_code == 0
    assert list(stored_bins(place)) == list(expected_bins(folder))


def test_damaged_bins_are_refused_and_fresh_ones_replace_them(place: Path) -> None:
    assert run(place, "--tasks", "none").exit_code == 0
    file = place / "downstream.json"
    values = json.loads(file.read_text())
    values["loss"]["by_frequency"][3] = {"tokens": 1}
    file.write_text(json.dumps(values))
    result = run(place, "--tasks", "none")
    assert result.exit_code == 2
    assert str(file) in result.stderr
    assert "--fresh" in result.stderr
    assert run(place, "--tasks", "none", "--fresh").exit_code == 0
    assert len(stored_bins(place)) == 10


def test_hugging_face_folder_of_the_same_model_has_the_same_bins(folder: Path, tmp_path: Path) -> None:
    arguments = ("--tasks", "none", "--data", folder / "corpus", "--precision", "float32", "--device", "cpu")
    result = run(folder / "model", *arguments, "--out", tmp_path / "results.json", "--json")
    assert result.exit_code == 0, result.output
    found = [FrequencyBin(**each) for each in json.loads(result.stdout)["loss"]["by_frequency"]]
    for each, expected in zip(found, expected_bins(folder), strict=True):
        assert (each.tokens, each.targets) == (expected.tokens, expected.targets)
        assert each.loss == pytest.approx(expected.loss, rel=1e-5)
        assert each.calibration == pytest.approx(expected.calibration, abs=1e-5)


def test_scores_from_another_machine_include_it(folder: Path, place: Path, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    tasks = ("--task-data", folder / "tasks")
    for arguments in (
        ("requests", place, requests, *tasks, "--tasks", "arc_easy"),
        ("answer", place, requests, scores),
        ("score", place, scores, *tasks),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
    assert list(stored_bins(place)) == list(expected_bins(folder))
