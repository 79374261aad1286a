"""`coupled-adam eval` as a user runs it."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from export_models import write_tokenizer_json
from tiny_tasks import write_evaluated_run, write_tasks
from typer.main import get_command
from typer.testing import CliRunner

from coupled_adam.base.text import shorthand
from coupled_adam.cli import app
from coupled_adam.commands import eval as eval_command
from coupled_adam.evaluation.downstream import harness
from coupled_adam.evaluation.downstream.requests_file import (
    RequestFile,
    TokenRequest,
    read_scores,
    write_requests,
    write_scores,
)
from coupled_adam.evaluation.downstream.results import read_downstream
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.run_export import export_run
from coupled_adam.evaluation.weights import load_run
from coupled_adam.metrics import TASK_LIMIT
from coupled_adam.study.results import EVALUATION, FILE_NAME, read_results, to_json
from coupled_adam.study.results import Result as StudyResult

TASKS = "arc_easy,winogrande"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    write_evaluated_run(folder)
    write_tasks(folder / "tasks")
    export_run(folder / "run", folder / "model", on_skip=print)
    return folder


@pytest.fixture(autouse=True)
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's tasks from the folders of the paper's alone: all of them take seconds to read."""
    whole = harness._manager
    monkeypatch.setattr(harness, "_manager", lambda _: whole(True))


def test_table_says_what_was_found_and_where_it_is(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    result = run(tmp_path / "run", "--task-data", folder / "tasks", "--tasks", TASKS)
    assert result.exit_code == 0, result.output
    found = read_downstream(tmp_path / "run")
    assert found is not None
    assert found.loss is not None
    for words in ("ARC easy", "WinoGrande", "acc", "test split", "202 tokens", str(tmp_path / "run")):
        assert words in result.stdout
    assert f"{found.tasks['arc_easy'].metrics['acc']:.3f}(" in result.stdout
    assert f"{found.loss.loss:.3f}(" in result.stdout
    model, _, corpus = load_run(folder / "run")
    assert corpus is not None
    expected = loss_over(model, corpus.tokens("test"))
    assert (found.loss.loss, found.loss.standard_error) == (expected.loss, expected.standard_error)
    assert "\x1b" not in result.output


def test_json_is_all_that_is_printed(folder: Path, tmp_path: Path) -> None:
    """lm-eval would print bars, and that it draws samples for the error of LAMBADA's perplexity."""
    names = ["lambada_openai", "arc_easy"]
    result = run(
        *(folder / "run", "--task-data", folder / "tasks", "--tasks", ",".join(names), "--limit", 2, "--no-loss"),
        *("--out", tmp_path / "results.json", "--json"),
    )
    values = json.loads(result.stdout)
    assert result.stderr == "".join(f"{name} ...\n" for name in names)
    assert values["tasks"]["lambada_openai"]["metrics"]["perplexity_stderr"] > 0
    assert [values["tasks"]["arc_easy"][key] for key in ("examples", "documents")] == [2, 3]
    assert (values["acc"], values["loss"], values["subject"]["limit"]) == (None, None, 2)
    assert json.loads((tmp_path / "results.json").read_text())["tasks"] == values["tasks"]
    assert not list((folder / "run").glob("downstream*"))


def test_narrow_table_keeps_every_digit(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    arguments = ["eval", str(tmp_path / "run"), "--task-data", str(folder / "tasks"), "--tasks", TASKS]
    result = CliRunner(env={"COLUMNS": "44"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = read_downstream(tmp_path / "run")
    assert found is not None
    assert found.loss is not None
    assert shorthand(found.loss.loss, found.loss.standard_error, 3) in result.stdout
    for task in found.tasks.values():
        assert shorthand(task.metrics["acc"], task.metrics["acc_stderr"], 3) in result.stdout
    assert "…" not in result.stdout


def test_answers_are_printed_when_the_bar_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed beside a bar would stand on its line."""
    printed = []

    @contextmanager
    def bar() -> Iterator[Any]:
        yield lambda *_: None
        sys.stdout.flush()
        printed.append(sys.stdout.buffer.tell())

    monkeypatch.setattr(eval_command, "progress_bar", bar)
    requests = tmp_path / "requests.safetensors"
    here = ("--task-data", folder / "tasks", "--tasks", TASKS)
    for arguments in (
        ("--requests", requests, *here),
        ("--answer", requests, "--out", tmp_path / "scores.safetensors", "--no-loss"),
        ("--out", tmp_path / "results.json", *here),
    ):
        result = run(folder / "run", *arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout
    assert printed == [0, 0, 0]


def test_names_in_a_table_are_no_markup(folder: Path, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    write_requests(requests, RequestFile({"[/red]odd": [TokenRequest((1,), (2,))]}, {}))
    result = run(folder / "run", "--answer", requests, "--out", scores, "--no-loss")
    assert result.exit_code == 0, result.output
    assert "[/red]odd" in result.stdout


def test_single_document_has_no_error(folder: Path, tmp_path: Path) -> None:
    result = run(folder / "run", "--task-data", folder / "tasks", "--limit", 1, "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert values["acc_stderr"] is None
    assert re.search(rf"Acc +│ +{values['acc']:.3f} ", result.stdout)


def test_loss_alone_needs_no_lm_eval(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extras(monkeypatch)
    result = run(folder / "run", "--tasks", "none", "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    assert "202 tokens" in result.stdout


def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("lm_eval", "datasets", "tokenizers")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lm_eval", "datasets", "tokenizers", "tiktoken", "transformers", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)


def test_two_halves_need_lm_eval_here_and_only_torch_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    here = ("--task-data", folder / "tasks")
    result = run(folder / "run", "--requests", requests, "--tasks", TASKS, *here)
    assert result.exit_code == 0, result.output
    assert "16 requests of 2 tasks" in result.stdout

    there = tmp_path / "there"
    shutil.copytree(folder / "run", there)
    with monkeypatch.context() as patch:
        without_extras(patch)
        result = run(there, "--answer", requests, "--out", scores)
    assert result.exit_code == 0, result.output
    assert "arc_easy" in result.stdout

    shutil.rmtree(there / "checkpoints")  # they are large, and stay where the GPU is
    result = run(there, "--scores", scores, *here)
    assert result.exit_code == 0, result.output
    direct = run(folder / "run", "--tasks", TASKS, *here, "--out", tmp_path / "direct.json")
    assert direct.exit_code == 0, direct.output
    by_scores = json.loads((there / "downstream.json").read_text())
    by_run = json.loads((tmp_path / "direct.json").read_text())
    for name in TASKS.split(","):
        assert by_scores["tasks"][name]["metrics"] == by_run["tasks"][name]["metrics"]
    assert by_scores["loss"]["loss"] == by_run["loss"]["loss"]
    assert by_scores["subject"] == by_run["subject"]

    words = refused(there, "--scores", scores, "--task-data", write_tasks(tmp_path / "tasks"), "--tokenizer", "nope")
    assert "'nope' is neither a tokenizer.json nor gpt2" in words
    (tmp_path / "tasks" / "arc_easy_test.jsonl").write_text(
        (folder / "tasks" / "arc_easy_test.jsonl").read_text().replace("jumps", "leaps")
    )
    words = refused(there, "--scores", scores, "--task-data", tmp_path / "tasks", "--fresh")
    assert "Error: task arc_easy: the scores lack 4 of its 12 requests" in words
    lines = (folder / "tasks" / "arc_easy_test.jsonl").read_text().splitlines()
    (tmp_path / "tasks" / "arc_easy_test.jsonl").write_text(lines[0])
    words = refused(there, "--scores", scores, "--task-data", tmp_path / "tasks", "--fresh")
    assert "Error: task arc_easy: its documents here ask for 8 requests less than were scored" in words
    assert "--out" in refused("--scores", scores, *here)
    assert "no scores of race; it has arc_easy, winogrande" in refused(there, "--scores", scores, "--tasks", "race")


def test_scores_of_a_stopped_answer_or_of_another_optimizer_are_told(folder: Path, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    here = ("--task-data", folder / "tasks")
    assert run(folder / "run", "--requests", requests, "--tasks", TASKS, *here).exit_code == 0
    assert run(folder / "run", "--answer", requests, "--out", scores, "--no-loss").exit_code == 0
    whole = read_scores(scores)
    write_scores(scores, replace(whole, scores={"arc_easy": whole.scores["arc_easy"]}))
    result = run(folder / "run", "--scores", scores, *here, "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    assert "lacks winogrande: --answer was stopped" in " ".join(result.stderr.split())

    other = tmp_path / "other"
    other.mkdir()
    config = (folder / "run" / "config.toml").read_text()
    changed = re.sub(r"(?m)^lr = .*$", "lr = 0.123", config)
    assert changed != config
    (other / "config.toml").write_text(changed)
    message = refused(other, "--scores", scores, *here)
    assert re.search(r"these are scores of the run '\w+' \(coupled, seed \d+\), and the settings of .*other", message)


def test_run_of_a_study_adds_its_tasks_to_the_results(folder: Path, tmp_path: Path) -> None:
    rows = []
    for number, optimizer in enumerate(("coupled", "adamw")):
        place = tmp_path / "runs" / f"small-{optimizer}" / "seed-1"
        shutil.copytree(folder / "run", place)
        rows.append(
            StudyResult(
                *("small", f"small-{optimizer}", 1, optimizer, {}, "small", 1000, 100_000, {"loss": 3.0 + number}),
                *(1.0, None, None, "hash", "1", None, "2", "cpu", place.relative_to(tmp_path).as_posix()),
            )
        )
        (place / EVALUATION).write_text(to_json(rows[-1]) + "\n")
    (tmp_path / FILE_NAME).write_text("".join(to_json(row) + "\n" for row in rows))
    result = run(tmp_path / rows[1].run, "--task-data", folder / "tasks", "--tasks", TASKS, "--no-loss")
    assert result.exit_code == 0, result.output
    assert f"Added to the results of the study: {tmp_path}" in result.stdout
    found = read_downstream(tmp_path / rows[1].run)
    assert found is not None
    first, second = read_results(tmp_path)
    assert first.metrics == {"loss": 3.0}
    assert second.metrics == {"loss": 4.0, **found.metrics(), TASK_LIMIT: None}
    assert json.loads((tmp_path / rows[1].run / EVALUATION).read_text())["metrics"] == second.metrics
    # A try on a few documents is no result.
    run(tmp_path / rows[0].run, "--task-data", folder / "tasks", "--tasks", TASKS, "--no-loss", "--limit", 1)
    assert read_results(tmp_path)[0].metrics == {"loss": 3.0}


def test_unknown_names_and_other_kinds_of_tasks_are_refused(folder: Path) -> None:
    run_folder = folder / "run"
    assert "'arc_eazy': lm-eval 0.4.13 has no task of this name; did you mean arc_easy" in refused(
        run_folder, "--tasks", "arc_eazy"
    )
    assert "group of lm-eval; name its tasks: arc_challenge, arc_easy" in refused(run_folder, "--tasks", "ai2_arc")
    assert "kind generate_until" in refused(run_folder, "--tasks", "arc_challenge_chat")
    assert "'none' stands alone" in refused(run_folder, "--tasks", "none,race")
    assert "expected names with commas" in refused(run_folder, "--tasks", ",")


def test_missing_task_data_is_named(folder: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / 'no'} is not a folder" in refused(folder / "run", "--task-data", tmp_path / "no")
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "race_high_test.jsonl").unlink()
    words = refused(folder / "run", "--task-data", tasks)
    assert f"{tasks} has no race_high_test.jsonl; add the files, or leave out race" in words
    assert "files for arc_easy" in refused(folder / "run", "--task-data", tasks, "--tasks", "lambada_standard")


def test_missing_dataset_points_to_local_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    words = refused(folder / "run", "--tasks", "arc_easy", "--no-loss")
    assert "could not get its dataset (Couldn't reach" in words
    assert "--task-data DIR" in words


def test_results_that_cannot_be_written_are_told_before_the_work(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = refused(folder / "run", "--tasks", "none", "--out", tmp_path / "file" / "results.json")
    assert f"{tmp_path / 'file' / 'results.json'}: cannot be written (" in words
    assert "give another file with --out" in words
    assert "loss ..." not in words


def test_missing_lm_eval_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extras(monkeypatch)
    assert "[eval]" in refused(folder / "run")


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_is_taken_for_granted_of_a_corpus_is_a_note(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    for name in ("train", "test"):
        np.arange(600, dtype=np.uint16).tofile(nanogpt / f"{name}.bin")
    result = run(tmp_path / "model", "--tasks", "none", "--data", nanogpt)
    assert f"Note: {nanogpt} has no manifest.json: its tokens are taken as uint16" in result.stderr
    assert "Warning" not in result.output
    assert "50257, and the model's tokenizer has" in result.stderr  # which is true, and refused


def test_models_that_cannot_be_evaluated_are_refused(folder: Path, tmp_path: Path) -> None:
    here = ("--task-data", folder / "tasks", "--tasks", "arc_easy")
    assert "MODEL is missing" in refused()
    assert "is not a folder" in refused(tmp_path / "nowhere", *here)
    (tmp_path / "empty").mkdir()
    assert "not a run, it has no config.toml" in refused(tmp_path / "empty", *here)
    assert "is for runs" in refused(folder / "model", "--checkpoint", 10, *here)
    assert "has a corpus of its own" in refused(folder / "run", "--data", folder, *here)
    assert "give one at a time" in refused(folder / "run", "--answer", "a", "--scores", "b")
    assert "--limit has no meaning with --scores" in refused(folder / "run", "--limit", 5, "--scores", "b")
    assert "--checkpoint has no meaning with --requests" in refused("gpt2", "--checkpoint", 0, "--requests", "b")
    assert "give one with --data DIR" in refused(folder / "model", "--tasks", "none")
    assert "leaves nothing to evaluate" in refused(folder / "run", "--tasks", "none", "--no-loss")
    config = folder / "run" / "config.toml"
    assert "--out FILE" in refused(folder / "run", "--answer", config)
    assert "holds the requests" in refused(folder / "run", "--answer", config, "--out", config)

    shutil.copytree(folder / "model", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "model" / name).unlink()
    assert "has no tokenizer (no tokenizer.json)" in refused(tmp_path / "model", *here)
    assert "has no tokenizer.json" in refused(tmp_path / "model", "--requests", tmp_path / "requests", *here)
    (tmp_path / "model" / "tokenizer.json").write_bytes((folder / "model" / "tokenizer.json").read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    assert "transformers cannot open it" in refused(tmp_path / "model", *here)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "has no weights" in refused(tmp_path / "model", *here)


def test_answer_longer_than_the_context_names_the_task(folder: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    document = {"sentence": "As _ " + "was quick " * 20, "option1": "fox", "option2": "dog", "answer": "1"}
    (tasks / "winogrande_xl_validation.jsonl").write_text(json.dumps(document))
    here = ("--task-data", tasks, "--tasks", "winogrande", "--out", tmp_path / "results.json")
    for model in ("run", "model"):
        words = refused(folder / model, *here)
        said = r"Error: task winogrande: a request has a continuation of \d+ tokens, but the model's context is 48"
        assert re.search(said, words), words
    assert "[transformers]" not in words


def test_vocabulary_that_does_not_match_the_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    here = ("--task-data", folder / "tasks", "--tasks", "arc_easy")
    write_tokenizer_json(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<|large|>"})
    large = tmp_path / "large.json"
    large.write_text(json.dumps(content))
    words = refused(folder / "run", "--tokenizer", large, *here)
    assert "has 401 tokens, but the table of" in words
    assert "320 rows: the vocabulary does not match" in words

    content["added_tokens"] = []
    content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:256])
    content["model"]["merges"] = []
    small = tmp_path / "small.json"
    small.write_text(json.dumps(content))
    words = refused(folder / "run", "--tokenizer", small, *here)
    assert "has 256 tokens, but the corpus of" in words
    assert "the vocabulary does not match; leave --tokenizer out" in words

    requests = tmp_path / "requests.safetensors"
    assert run(large, "--requests", requests, *here).exit_code == 0
    words = refused(folder / "run", "--answer", requests, "--out", tmp_path / "scores")
    assert "a tokenizer of 401 tokens" in words
    assert "vocabulary does not match" in words


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(100))
    assert "cut off, or another kind of file" in refused(folder / "run", "--answer", file, "--out", tmp_path / "scores")
    assert "cut off, or another kind of file" in refused(folder / "run", "--scores", file)
    assert "no such file" in refused(folder / "run", "--scores", tmp_path / "none")


def test_help_teaches_all_three_ways() -> None:
    shown = " ".join(run("--help").output.split())
    ways = ("--task-data DIR", "--requests requests.safetensors", "--answer requests.safetensors", "--limit 50")
    for words in (*ways, "but for --answer and for the loss of a run alone"):
        assert words in shown


def test_page_has_every_option_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "eval.md").read_text()
    command = get_command(app).commands["eval"]
    options = {name for option in command.params for name in option.opts if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", page)) == options | {"--set"}  # of `train`
    for target in re.findall(r"\]\(([\w-]+\.md)", page):
        assert (Path(__file__).parents[2] / "docs" / target).is_file()
