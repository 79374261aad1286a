"""`coupled-adam eval requests`, `answer` and `score`, and their former options of version 0.1.0."""

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from eval_cli import TASKS, refused, run, without_extras
from tiny_tasks import write_tasks

from coupled_adam.evaluation.downstream.requests_file import (
    RequestFile,
    TokenRequest,
    read_requests,
    read_scores,
    write_requests,
    write_scores,
)
from coupled_adam.evaluation.downstream.task_results import read_downstream
from coupled_adam.evaluation.weights import load_run

pytestmark = pytest.mark.usefixtures("small_index")


def test_names_in_a_table_are_not_markup(folder: Path, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    write_requests(requests, RequestFile({"[/red]odd": [TokenRequest((1,), (2,))]}, {}))
    result = run("answer", folder / "run", requests, scores, "--no-loss")
    assert result.exit_code == 0, result.output
    assert "[/red]odd" in result.stdout


def test_two_machines_need_lm_eval_here_and_only_torch_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    here = ("--task-data", folder / "tasks")
    result = run("requests", folder / "run", requests, "--tasks", TASKS, *here)
    assert result.exit_code == 0, result.output
    assert "16 requests of 2 tasks" in result.stdout

    there = tmp_path / "there"
    shutil.copytree(folder / "run", there)
    with monkeypatch.context() as patch:
        without_extras(patch)
        result = run("answer", there, requests, scores)
    assert result.exit_code == 0, result.output
    assert "arc_easy" in result.stdout

    shutil.rmtree(there / "checkpoints")  # they are large and stay on the GPU machine
    result = run("score", there, scores, *here)
    assert result.exit_code == 0, result.output
    direct = run(folder / "run", "--tasks", TASKS, *here, "--out", tmp_path / "direct.json")
    assert direct.exit_code == 0, direct.output
    by_scores = json.loads((there / "downstream.json").read_text())
    by_run = json.loads((tmp_path / "direct.json").read_text())
    for name in TASKS.split(","):
        assert by_scores["tasks"][name]["metrics"] == by_run["tasks"][name]["metrics"]
    assert by_scores["loss"]["loss"] == by_run["loss"]["loss"]
    assert by_scores["subject"] == by_run["subject"]

    words = refused("score", there, scores, "--task-data", write_tasks(tmp_path / "tasks"), "--tokenizer", "nope")
    assert re.search(r"'nope'.*tokenizer\.json.*\bgpt2\b", words), words
    (tmp_path / "tasks" / "arc_easy_test.jsonl").write_text(
        (folder / "tasks" / "arc_easy_test.jsonl").read_text().replace("jumps", "leaps")
    )
    words = refused("score", there, scores, "--task-data", tmp_path / "tasks", "--fresh")
    assert re.search(r"Error: task arc_easy: .*\b4\b.*\b12 requests\b", words), words
    lines = (folder / "tasks" / "arc_easy_test.jsonl").read_text().splitlines()
    (tmp_path / "tasks" / "arc_easy_test.jsonl").write_text(lines[0])
    words = refused("score", there, scores, "--task-data", tmp_path / "tasks", "--fresh")
    assert re.search(r"Error: task arc_easy: .*\b8 requests\b", words), words
    assert "--out" in refused("score", scores, *here)
    words = refused("score", there, scores, "--tasks", "race")
    assert re.search(rf"{scores}: .*\brace\b.*\barc_easy, winogrande$", words), words


def test_incomplete_scores_and_scores_of_another_optimizer_are_reported(folder: Path, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    here = ("--task-data", folder / "tasks")
    assert run("requests", folder / "run", requests, "--tasks", TASKS, *here).exit_code == 0
    assert run("answer", folder / "run", requests, scores, "--no-loss").exit_code == 0
    whole = read_scores(scores)
    write_scores(scores, replace(whole, scores={"arc_easy": whole.scores["arc_easy"]}))
    result = run("score", folder / "run", scores, *here, "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    assert re.search(rf"{scores} .*\bwinogrande\b.*`eval answer`", " ".join(result.stderr.split())), result.stderr

    other = tmp_path / "other"
    other.mkdir()
    config = (folder / "run" / "config.toml").read_text()
    changed = re.sub(r"(?m)^lr = .*$", "lr = 0.123", config)
    assert changed != config
    (other / "config.toml").write_text(changed)
    message = refused("score", other, scores, *here)
    described = r"'\w+' \(coupled, seed \d+\)"
    assert re.search(rf"{scores}: .*{described}.*{other}, {described}", message), message


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(100))
    for arguments, named in (
        (("answer", folder / "run", file, tmp_path / "scores"), r"file: .*\(.*header.*\).*`coupled-adam eval requests"),
        (("score", folder / "run", file), r"file: .*\(.*header.*\).*`coupled-adam eval answer"),
        (("score", folder / "run", tmp_path / "none"), "none: .*`coupled-adam eval answer"),
    ):
        words = refused(*arguments)
        assert re.search(f"^Error: {tmp_path}/{named}", words), words


def test_scores_need_no_shards_of_the_corpus(folder: Path, tmp_path: Path) -> None:
    """The folder of the corpus may contain only its manifest and tokenizer."""
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    here = ("--task-data", folder / "tasks")
    config = (folder / "run" / "config.toml").read_text()
    corpus = Path(load_run(folder / "run")[1].data.folder)
    for name in ("light", "empty"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "corpus").mkdir()
        changed = config.replace(str(corpus), str(tmp_path / name / "corpus"))
        assert changed != config
        (tmp_path / name / "run" / "config.toml").write_text(changed)
    for name in ("manifest.json", "tokenizer.json"):
        shutil.copy(corpus / name, tmp_path / "light" / "corpus")
    light = tmp_path / "light" / "run"
    for result in (
        run("requests", light, requests, "--tasks", TASKS, *here),
        run("answer", folder / "run", requests, scores, "--no-loss"),
        run("score", light, scores, *here),
        run("score", tmp_path / "empty" / "run", scores, *here, "--tokenizer", corpus / "tokenizer.json"),
    ):
        assert result.exit_code == 0, result.output
    found = read_downstream(light)
    assert found is not None
    assert sorted(found.tasks) == sorted(TASKS.split(","))
    assert "--tokenizer" in refused("score", tmp_path / "empty" / "run", scores, *here, "--fresh")


def test_options_of_version_0_1_0_still_work_and_name_the_new_command(folder: Path, tmp_path: Path) -> None:
    here = ("--task-data", folder / "tasks")
    model, tokenizer = folder / "run", folder / "model" / "tokenizer.json"
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    requests, scores = "requests.safetensors", "scores.safetensors"
    calls = [
        (
            (model, "--requests", old / requests, "--tasks", TASKS, *here, "--limit", 2),
            ("requests", model, new / requests, "--tasks", TASKS, *here, "--limit", 2),
        ),
        (
            (model, "--answer", old / requests, "--out", old / scores, "--no-loss"),
            ("answer", model, new / requests, new / scores, "--no-loss"),
        ),
        (
            (model, "--scores", old / scores, *here, "--out", old / "results.json"),
            ("score", model, new / scores, *here, "--out", new / "results.json"),
        ),
        (
            ("--scores", old / scores, *here, "--tokenizer", tokenizer, "--out", old / "runless.json"),
            ("score", new / scores, *here, "--tokenizer", tokenizer, "--out", new / "runless.json"),
        ),
    ]
    for before, now in calls:
        for arguments in (before, now):
            result = run(*arguments)
            assert result.exit_code == 0, result.output
            assert ("Note: --" in result.stderr) == (arguments is before)
            if arguments is before:
                named = shlex.split(result.stderr.splitlines()[0].partition("use: coupled-adam eval ")[2])
                same = [str(word).replace(str(new), str(old)) for word in now]
                assert (named[:2], sorted(named)) == (same[:2], sorted(same))
    assert read_requests(old / requests) == read_requests(new / requests)
    assert read_scores(old / scores).scores == read_scores(new / scores).scores
    for name in ("results.json", "runless.json"):
        tasks = [json.loads((each / name).read_text())["tasks"] for each in (old, new)]
        assert [task["metrics"] for task in tasks[0].values()] == [task["metrics"] for task in tasks[1].values()]

    run(tokenizer, "--requests", old / "other", "--tokenizer", tokenizer, "--tasks", TASKS, *here, "--limit", 2)
    assert (old / "other").is_file()
    assert "--answer and --scores" in refused(model, "--answer", "a", "--scores", "b")
    assert "--limit" in refused(model, "--limit", 5, "--scores", "b")
    assert "--checkpoint" in refused("gpt2", "--checkpoint", 0, "--requests", "b")
    assert "OUT" in refused(model, "--answer", "a")
    assert "MODEL" in refused("--answer", "a", "--out", "b")
