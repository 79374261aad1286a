"""`coupled-adam eval` as a user runs it."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_cli import TASKS, refused, run, without_extras
from export_models import TOKENS, write_tokenizer_json
from tiny_tasks import write_tasks
from typer.main import get_command
from typer.testing import CliRunner

from coupled_adam.base.text import shorthand
from coupled_adam.cli import app
from coupled_adam.commands import eval as eval_command
from coupled_adam.commands import eval_offline
from coupled_adam.evaluation.downstream.task_results import read_downstream
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.weights import load_run
from coupled_adam.metrics import TASK_LIMIT
from coupled_adam.study.results import EVALUATION, RESULTS_FILE, read_results, to_json
from coupled_adam.study.results import Result as StudyResult

pytestmark = pytest.mark.usefixtures("small_index")


def test_the_table_shows_the_results_and_their_file(folder: Path, tmp_path: Path) -> None:
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


def test_only_json_is_printed(folder: Path, tmp_path: Path) -> None:
    """lm-eval itself would print bars and a message about bootstrapping LAMBADA's perplexity."""
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


def test_results_are_printed_after_the_bar_has_disappeared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the output would end up on the line of the bar."""
    printed = []

    @contextmanager
    def bar() -> Iterator[Any]:
        yield lambda *_: None
        sys.stdout.flush()
        printed.append(sys.stdout.buffer.tell())

    for module in (eval_command, eval_offline):
        monkeypatch.setattr(module, "task_bar", bar)
    requests = tmp_path / "requests.safetensors"
    here = ("--task-data", folder / "tasks", "--tasks", TASKS)
    for arguments in (
        ("requests", folder / "run", requests, *here),
        ("answer", folder / "run", requests, tmp_path / "scores.safetensors", "--no-loss"),
        (folder / "run", "--out", tmp_path / "results.json", *here),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout
    assert printed == [0, 0, 0]


def test_single_document_has_no_error(folder: Path, tmp_path: Path) -> None:
    result = run(folder / "run", "--task-data", folder / "tasks", "--limit", 1, "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert values["acc_stderr"] is None
    assert re.search(rf"Acc +│ +{values['acc']:.3f} ", result.stdout)


def test_the_loss_alone_needs_no_lm_eval(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extras(monkeypatch)
    result = run(folder / "run", "--tasks", "none", "--out", tmp_path / "results.json")
    assert result.exit_code == 0, result.output
    assert "202 tokens" in result.stdout


def two_runs_of_a_study(folder: Path, tmp_path: Path) -> list[StudyResult]:
    """A study in `tmp_path` whose two runs are copies of the run."""
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
    (tmp_path / RESULTS_FILE).write_text("".join(to_json(row) + "\n" for row in rows))
    return rows


def test_run_of_a_study_adds_its_tasks_to_the_results(folder: Path, tmp_path: Path) -> None:
    rows = two_runs_of_a_study(folder, tmp_path)
    result = run(tmp_path / rows[1].run, "--task-data", folder / "tasks", "--tasks", TASKS, "--no-loss")
    assert result.exit_code == 0, result.output
    assert f": {tmp_path}\n" in result.stdout
    found = read_downstream(tmp_path / rows[1].run)
    assert found is not None
    first, second = read_results(tmp_path)
    assert first.metrics == {"loss": 3.0}
    assert second.metrics == {"loss": 4.0, **found.metrics(), TASK_LIMIT: None}
    assert json.loads((tmp_path / rows[1].run / EVALUATION).read_text())["metrics"] == second.metrics
    # A trial on a few documents is not a result.
    run(tmp_path / rows[0].run, "--task-data", folder / "tasks", "--tasks", TASKS, "--no-loss", "--limit", 1)
    assert read_results(tmp_path)[0].metrics == {"loss": 3.0}


def test_only_json_is_printed_for_a_run_of_a_study(folder: Path, tmp_path: Path) -> None:
    rows = two_runs_of_a_study(folder, tmp_path)
    here = ("--task-data", folder / "tasks", "--tasks", "arc_easy", "--no-loss")
    result = run(tmp_path / rows[1].run, *here, "--json")
    assert list(json.loads(result.stdout)["tasks"]) == ["arc_easy"]
    assert str(tmp_path) in result.stderr
    assert read_results(tmp_path)[1].metrics["arc_easy"] is not None


def test_results_in_a_separate_file_are_not_added_to_the_study(folder: Path, tmp_path: Path) -> None:
    rows = two_runs_of_a_study(folder, tmp_path)
    aside = tmp_path / "aside" / "downstream.json"
    here = ("--task-data", folder / "tasks", "--tasks", "arc_easy", "--no-loss")
    result = run(tmp_path / rows[1].run, *here, "--out", aside)
    assert result.exit_code == 0, result.output
    assert list(json.loads(aside.read_text())["tasks"]) == ["arc_easy"]
    assert [each.metrics for each in read_results(tmp_path)] == [{"loss": 3.0}, {"loss": 4.0}]


def test_unknown_names_and_other_kinds_of_tasks_are_refused(folder: Path) -> None:
    run_folder = folder / "run"
    for given, named in (
        ("arc_eazy", rf"'arc_eazy'.*lm-eval {re.escape(version('lm-eval'))}.*\barc_easy\?"),
        ("ai2_arc", r"'ai2_arc'.*: arc_challenge, arc_easy$"),
        ("arc_challenge_chat", r"arc_challenge_chat.*\bgenerate_until\b"),
        ("none,race", "'none'"),
        (",", "','"),
    ):
        assert re.search(named, refused(run_folder, "--tasks", given)), given


def test_missing_task_data_is_named(folder: Path, tmp_path: Path) -> None:
    assert f"--task-data: {tmp_path / 'no'} " in refused(folder / "run", "--task-data", tmp_path / "no")
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "race_high_test.jsonl").unlink()
    words = refused(folder / "run", "--task-data", tasks)
    assert re.search(rf"--task-data: {tasks} .*race_high_test\.jsonl;.* race with --tasks", words), words
    assert ".jsonl" not in words.replace("race_high_test.jsonl", "")
    words = refused(folder / "run", "--task-data", tasks, "--tasks", "lambada_standard")
    assert re.search(r"--task-data .*\barc_easy, .*\blambada_standard\b", words), words


def test_missing_dataset_points_to_local_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    words = refused(folder / "run", "--tasks", "arc_easy", "--no-loss")
    assert re.search(r"task arc_easy: .*\(Couldn't reach 'allenai/ai2_arc'", words), words
    assert "--task-data DIR" in words


def test_an_unwritable_results_file_is_reported_before_the_evaluation(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = refused(folder / "run", "--tasks", "none", "--out", tmp_path / "file" / "results.json")
    assert re.search(rf"{tmp_path / 'file' / 'results.json'}: .*\(File exists\).* --out\b", words), words
    assert "loss ..." not in words


def test_missing_lm_eval_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_extras(monkeypatch)
    assert "[eval]" in refused(folder / "run")


@pytest.mark.filterwarnings("error::UserWarning")
def test_assumptions_about_a_corpus_are_printed_as_a_note(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    nanogpt = tmp_path / "nanogpt"
    nanogpt.mkdir()
    for name in ("train", "test"):
        np.arange(600, dtype=np.uint16).tofile(nanogpt / f"{name}.bin")
    result = run(tmp_path / "model", "--tasks", "none", "--data", nanogpt)
    assert re.search(rf"Note: {nanogpt} .*manifest\.json.*\buint16\b", result.stderr), result.stderr
    assert "Warning" not in result.output
    # the assumed vocabulary does not match the tokenizer
    assert re.search(rf"Error: --data: .*{nanogpt} .*\b50257\b.*\b{TOKENS}\b", result.stderr), result.stderr


def test_models_that_cannot_be_evaluated_are_refused(folder: Path, tmp_path: Path) -> None:
    here = ("--task-data", folder / "tasks", "--tasks", "arc_easy")
    run_folder, model, config = folder / "run", folder / "model", folder / "run" / "config.toml"
    (tmp_path / "empty").mkdir()
    for arguments, named in (
        ((), r"\bMODEL\b"),
        ((tmp_path / "nowhere", *here), f"{tmp_path / 'nowhere'} .*`export`"),
        ((tmp_path / "empty", *here), rf"{tmp_path / 'empty'}: .*config\.toml.*`coupled-adam train`"),
        ((model, "--checkpoint", 10, *here), f"--checkpoint .*{model}"),
        ((run_folder, "--data", folder, *here), f"--data .*{run_folder}"),
        (("score", run_folder, "b", "--limit", 5), "--limit"),
        (("requests", "gpt2", "b", "--checkpoint", 0), "--checkpoint"),
        (("score", run_folder, "b", "c"), rf"SCORES.*\b3\b.*: {run_folder} b c$"),
        (("score", run_folder, "--out", tmp_path / "results.json"), f"{run_folder} .*SCORES.*`eval answer`"),
        ((model, "--tasks", "none"), f"{model} .*--data DIR"),
        ((run_folder, "--tasks", "none", "--no-loss"), "--tasks none.*--no-loss"),
        (("answer", run_folder, config), r"\bOUT\b"),
        (("answer", run_folder, config, config), f"OUT: {config}"),
    ):
        words = refused(*arguments)
        assert re.search(named, words), words

    shutil.copytree(model, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "model" / name).unlink()
    words = refused(tmp_path / "model", *here)
    assert re.search(rf"{tmp_path / 'model'}: .*tokenizer\.json.*--tokenizer", words), words
    words = refused("requests", tmp_path / "model", tmp_path / "requests", *here)
    assert re.search(rf"{tmp_path / 'model'}\b.*tokenizer\.json", words), words
    (tmp_path / "model" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    words = refused(tmp_path / "model", *here)
    assert re.search(rf"{tmp_path / 'model'}: transformers .*header.*export", words), words
    (tmp_path / "model" / "model.safetensors").unlink()
    words = refused(tmp_path / "model", *here)
    assert re.search(rf"{tmp_path / 'model'}: .*safetensors or ", words), words


def test_answer_longer_than_the_context_names_the_task(folder: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    document = {"sentence": "As _ " + "was quick " * 20, "option1": "fox", "option2": "dog", "answer": "1"}
    (tasks / "winogrande_xl_validation.jsonl").write_text(json.dumps(document))
    here = ("--task-data", tasks, "--tasks", "winogrande", "--out", tmp_path / "results.json")
    for model in ("run", "model"):
        words = refused(folder / model, *here)
        said = r"Error: task winogrande: .*continuation of \d+ tokens.*\bcontext is 48\b"
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
    assert re.search(rf"{large} .*\b401 tokens.*{folder / 'run'}.*\b320 rows", words), words

    content["added_tokens"] = []
    content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:256])
    content["model"]["merges"] = []
    small = tmp_path / "small.json"
    small.write_text(json.dumps(content))
    words = refused(folder / "run", "--tokenizer", small, *here)
    assert re.search(rf"{small} .*\b256 tokens.*{folder / 'run'}.*\b{TOKENS}\b.*--tokenizer", words), words

    requests = tmp_path / "requests.safetensors"
    assert run("requests", large, requests, *here).exit_code == 0
    words = refused("answer", folder / "run", requests, tmp_path / "scores")
    assert re.search(rf"{requests} .*{large}.*\b401 tokens.*{folder / 'run'}.*\b320 rows", words), words


def test_a_folder_named_like_a_sub_command_can_be_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "run", tmp_path / "answer")
    monkeypatch.chdir(tmp_path)
    here = ("--tasks", "none", "--fresh")
    for arguments in (("./answer", *here), (*here, "answer"), (*here, "--", "answer")):
        (tmp_path / "answer" / "downstream.json").unlink(missing_ok=True)
        assert run(*arguments).exit_code == 0
        assert (tmp_path / "answer" / "downstream.json").is_file()
    assert "RUN" in refused("answer")


def test_a_mistyped_sub_command_suggests_the_right_one() -> None:
    assert "eval answer`" in refused("anwser", "run", "requests", "scores")
    assert "one MODEL" in refused("run-1", "run-2")


@pytest.mark.parametrize("command", [(), ("requests",), ("answer",), ("score",)])
def test_help_has_an_example_and_hides_the_old_options(command: tuple[str, ...]) -> None:
    shown = " ".join(run(*command, "--help").output.split())
    assert f"Try: {' '.join(('coupled-adam', 'eval', *command))} " in shown
    assert not re.search(r"--(requests|answer|scores)\b", shown)


def test_help_shows_all_three_ways() -> None:
    shown = " ".join(run("--help").output.split())
    ways = ("--task-data DIR", "eval requests RUN", "eval answer RUN", "eval score RUN", "--limit 50", "--tasks none")
    for words in ways:
        assert words in shown


def test_the_page_lists_exactly_the_existing_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "eval.md").read_text()
    command = get_command(app).commands["eval"]
    params = [param for each in (command, *command.commands.values()) for param in each.params]
    options = {name for param in params for name in param.opts if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", page)) == options | {"--set"}  # of `train`
    assert all(f"eval {name} " in page for name in command.commands)
    for target in re.findall(r"\]\(([\w-]+\.md)", page):
        assert (Path(__file__).parents[2] / "docs" / target).is_file()
