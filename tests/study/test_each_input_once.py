"""A study reads each input once: checkpoint files for their hash, and the corpus at the start."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from study_cli import study
from study_evaluations import do, write_text_study
from study_runs import COUPLED, FAKE_WORKER, plan, write_study

from coupled_adam.base.errors import UserError
from coupled_adam.data import corpus
from coupled_adam.data.corpus import Corpus
from coupled_adam.evaluation.downstream.evaluate import evaluate_run
from coupled_adam.study import launchers, runner
from coupled_adam.study.folder import StudyFolder
from coupled_adam.theory.measure import theory_of_run
from coupled_adam.training.checkpoint import save_and_load
from coupled_adam.training.checkpoint.checkpoint_folder import STATE_FILE, StoredFile, read_record, stored_file

THEORY = ("evaluation.theory=true", "evaluation.theory_batches=1")
TASKS = 'task_data = "{}", tasks = ["winogrande"]'


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of times that each checkpoint file is hashed, by step and name."""
    counts: Counter[str] = Counter()

    def noted(path: Path) -> StoredFile:
        counts[f"{path.parent.name}/{path.name}"] += 1
        return stored_file(path)

    monkeypatch.setattr(save_and_load, "stored_file", noted)
    return counts


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The corpora that are opened; all code opens them through this function."""
    folders: list[Path] = []
    open_without_shards = corpus.open_without_shards

    def noted(folder: str | Path) -> Corpus:
        folders.append(Path(folder))
        return open_without_shards(folder)

    monkeypatch.setattr(corpus, "open_without_shards", noted)
    return folders


def every_file_once(checkpoints: Path) -> dict[str, int]:
    return {
        f"{folder.name}/{name}": 1
        for folder in checkpoints.iterdir()
        if (folder / STATE_FILE).is_file()
        for name in read_record(folder).files
    }


def test_training_tasks_theory_and_measures_read_a_checkpoint_once_for_its_hash(
    tmp_path: Path, hashed: Counter[str]
) -> None:
    pytest.importorskip("lm_eval")
    tasks = TASKS.format(tmp_path / "tasks")
    file = write_text_study(tmp_path, COUPLED, evaluation=tasks, checkpoints={"milestones": 2, "every": 6})
    ((status, _),) = do(file, tmp_path / "out", *THEORY, only=("*/seed-1",)).values()
    assert status == "finished"
    (run,) = tmp_path.glob("out/runs/*/seed-1")
    checkpoints = run / "checkpoints"
    assert len(list(checkpoints.iterdir())) == 2
    assert hashed == every_file_once(checkpoints)
    evaluate_run(run, tasks=[])
    theory_of_run(run, batches=2, fresh=True)
    assert hashed == every_file_once(checkpoints)


@pytest.mark.parametrize("rows", ["auto", "320"])
def test_the_corpus_of_all_runs_is_opened_once_before_they_start(
    rows: str, tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "SimLex-999.txt").write_text("old\tnew\t1.58\nsmart\tintelligent\t9.2\n")
    asked = f'{TASKS.format(tmp_path / "tasks")}, wordsim = "{tmp_path / "pairs"}"'
    file = write_text_study(tmp_path, evaluation=asked)

    def refuse(*arguments: Any) -> None:
        raise UserError("no run begins")

    monkeypatch.setattr(launchers, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(StudyFolder, "prepare", refuse)  # the first call after all checks
    settings = ("--set", f"model.vocabulary_size={rows}")
    ended = study("run", str(file), "--out", str(tmp_path / "out"), "--jobs", "1", *settings)
    assert ended.exit_code == 2
    assert "no run begins" in ended.output
    assert opened == [tmp_path / "corpus"]


def test_a_corpus_without_a_manifest_is_opened_once_with_one_note(tmp_path: Path, opened: list[Path]) -> None:
    file = write_study(tmp_path, COUPLED, model={"vocabulary_size": "auto"})
    (tmp_path / "corpus" / "manifest.json").unlink()
    said: list[str] = []
    (found,) = runner.prepare_data(plan(file)[1], said.append).values()
    assert opened == [found.folder] == [tmp_path / "corpus"]
    assert [note for note in said if "manifest.json" in note] == [f"Note: {found.notes[0]}"]
