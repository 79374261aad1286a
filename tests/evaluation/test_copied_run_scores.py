"""`coupled-adam eval score` for a run of a study that was copied from another machine, without its corpus."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from eval_cli import refused, run
from tiny_tasks import write_evaluated_run, write_tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from fabricated_study import fabricate

from coupled_adam.study.results import read_results, write_evaluation

pytestmark = pytest.mark.usefixtures("small_index")
ELSEWHERE = "/mnt/of-another-machine/corpus"


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its corpus and documents, as on the machine that trained it."""
    folder = tmp_path_factory.mktemp("there")
    write_evaluated_run(folder)
    write_tasks(folder / "tasks")
    return folder


@pytest.fixture
def scores(there: Path, tmp_path: Path) -> Path:
    """Scores of the run, whose requests were written with a tokenizer.json that is no longer at its place."""
    tokenizer = shutil.copy(there / "corpus" / "tokenizer.json", tmp_path)
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    for result in (
        run("requests", tokenizer, requests, "--tasks", "winogrande", "--task-data", there / "tasks"),
        run("answer", there / "run", requests, scores, "--no-loss"),
    ):
        assert result.exit_code == 0, result.output
    Path(tokenizer).unlink()
    return scores


@pytest.fixture
def copied(there: Path, tmp_path: Path) -> Path:
    """The run in a study folder, as copied: its data folder exists only on the other machine."""
    study = fabricate(tmp_path / "study", with_runs=False)
    first = read_results(study)[0]
    first.run_folder.mkdir(parents=True)
    config = (there / "run" / "config.toml").read_text()
    assert str(there / "corpus") in config
    (first.run_folder / "config.toml").write_text(config.replace(str(there / "corpus"), ELSEWHERE))
    write_evaluation(first)
    return first.run_folder


def test_scores_of_a_copied_run_are_added_to_its_study(there: Path, scores: Path, copied: Path) -> None:
    given = ("--task-data", there / "tasks", "--tokenizer", there / "corpus" / "tokenizer.json", "--json")
    result = run("score", copied, scores, *given)
    assert result.exit_code == 0, result.output
    study = copied.parents[2]
    assert str(study) in result.stderr.replace("\n", "")
    accuracy = json.loads(result.stdout)["tasks"]["winogrande"]["metrics"]["acc"]
    [found] = [each for each in read_results(study) if each.run_folder == copied]
    assert found.metrics["winogrande"] == accuracy


def test_without_the_tokenizer_the_error_names_what_is_missing_and_the_option(
    there: Path, scores: Path, copied: Path, tmp_path: Path
) -> None:
    for arguments, missing in (((copied, scores), ELSEWHERE), ((scores, "--out", tmp_path / "out.json"), "")):
        words = refused("score", *arguments, "--task-data", there / "tasks")
        assert missing in words
        assert "--tokenizer" in words
        assert str(tmp_path / "tokenizer.json") in words  # what the requests were written with
