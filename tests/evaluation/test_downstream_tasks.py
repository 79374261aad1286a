"""The paper's seven tasks through lm-eval: three ways that must agree; results are never mixed or repeated."""

import json
import logging
import math
import os
import socket
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from export_models import write_tokenizer_json
from tiny_tasks import DOCUMENTS, write_evaluated_run, write_tasks

from coupled_adam.evaluation.downstream import evaluate, harness, hub_folder
from coupled_adam.evaluation.downstream.evaluate import evaluate_run
from coupled_adam.evaluation.downstream.harness_model import answering_model
from coupled_adam.evaluation.downstream.hub_folder import evaluate_folder
from coupled_adam.evaluation.downstream.offline_scoring import answer_requests, evaluate_scores, write_task_requests
from coupled_adam.evaluation.downstream.requests_file import Score
from coupled_adam.evaluation.downstream.task_data import LOCAL_TASKS, read_documents
from coupled_adam.evaluation.downstream.task_results import Downstream, file_name, read_downstream, read_file
from coupled_adam.evaluation.run_export import export_run
from coupled_adam.evaluation.run_tokenizer import open_json_tokenizer
from coupled_adam.metrics import TASKS
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.paper_tasks import PAPER_NAMES, PAPER_TASKS


class Evaluated:
    """A run, its tasks, and their results from `evaluate_run`."""

    def __init__(self, folder: Path) -> None:
        self.model = write_evaluated_run(folder)
        self.run, self.tasks = folder / "run", write_tasks(folder / "tasks")
        self.seen: list[tuple[str, int, int]] = []
        self.found = evaluate_run(
            self.run, tasks=PAPER_NAMES, task_data=self.tasks, on_progress=lambda *step: self.seen.append(step)
        )


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", no_network)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        evaluated = Evaluated(folder)
    assert not (folder / "cache").exists(), "lm-eval's datasets left files behind"
    return evaluated


def no_network(*_: object) -> None:
    raise AssertionError("local tasks asked the network")


def task_metrics(found: Downstream) -> dict[str, dict[str, float]]:
    return {name: task.metrics for name, task in found.tasks.items()}


def assert_same_scores(found: Downstream, expected: Downstream) -> None:
    assert found.tasks.keys() == expected.tasks.keys()
    for name, task in expected.tasks.items():
        assert found.tasks[name].metrics == pytest.approx(task.metrics, rel=1e-4, nan_ok=True), name
        assert (found.tasks[name].examples, found.tasks[name].version) == (task.examples, task.version)


def test_exported_model_has_the_same_scores_through_lm_evals_own_class(evaluated: Evaluated, tmp_path: Path) -> None:
    export_run(evaluated.run, tmp_path / "model", on_skip=print)
    corpus = evaluated.run.parent / "corpus"
    seen: list[tuple[str, int, int]] = []
    found = evaluate_folder(
        tmp_path / "model",
        tasks=PAPER_NAMES,
        task_data=evaluated.tasks,
        device="cpu",
        data=corpus,
        on_progress=lambda *step: seen.append(step),
    )
    assert_same_scores(found, evaluated.found)
    assert found.subject.tokenizer == evaluated.found.subject.tokenizer
    assert found.loss is not None
    assert evaluated.found.loss is not None
    assert found.loss.loss == pytest.approx(evaluated.found.loss.loss, rel=1e-5)
    assert found.loss.standard_error == pytest.approx(evaluated.found.loss.standard_error, rel=1e-3)
    assert ("winogrande", 4, 4) in seen
    assert read_downstream(tmp_path / "model") == found
    # All results exist: the model is not even loaded.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_folder, "hugging_face_model", None)
        again = evaluate_folder(tmp_path / "model", tasks=PAPER_NAMES, task_data=evaluated.tasks, device="cpu")
    assert again.tasks == found.tasks


def test_two_machines_have_the_same_scores_and_results(evaluated: Evaluated, tmp_path: Path) -> None:
    requests, scores = tmp_path / "requests.safetensors", tmp_path / "scores.safetensors"
    tokens = open_json_tokenizer(evaluated.run.parent / "corpus" / "tokenizer.json")
    write_task_requests(requests, tokens, tasks=PAPER_NAMES, task_data=evaluated.tasks, limit=None)
    answer_requests(evaluated.run, requests, scores)
    found, path = evaluate_scores(scores, run=evaluated.run, out=tmp_path / "results.json", task_data=evaluated.tasks)
    assert path == tmp_path / "results.json"
    assert task_metrics(found) == task_metrics(evaluated.found)
    assert found.subject == evaluated.found.subject
    assert found.loss is not None
    assert evaluated.found.loss is not None
    assert found.loss.loss == evaluated.found.loss.loss


@pytest.mark.parametrize("name", PAPER_NAMES)
def test_requests_match_lm_evals_own_task(name: str, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own class, with the documents as loaded from the Hub."""
    documents = datasets.Dataset.from_list(DOCUMENTS[LOCAL_TASKS[name].file])
    hub = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), documents))
    ours = harness.load_task(name, evaluated.tasks)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: hub)
    theirs = harness.load_task(name, None)
    with harness.quiet():
        for task in (ours, theirs):
            task.build_all_requests()
    assert len(ours.instances) > 0
    assert [each.args for each in ours.instances] == [each.args for each in theirs.instances]
    assert [ours.doc_to_target(doc) for doc in ours.eval_docs] == [
        theirs.doc_to_target(doc) for doc in theirs.eval_docs
    ]
    assert ours.aggregation() == theirs.aggregation()


def test_an_infinite_perplexity_is_refused(evaluated: Evaluated) -> None:
    tokens = open_json_tokenizer(evaluated.run.parent / "corpus" / "tokenizer.json")
    hopeless = answering_model(tokens, lambda requests: [Score(-1000.0, False)] * len(requests))
    task = harness.load_task("lambada_openai", evaluated.tasks)
    with pytest.raises(ValueError, match=r"\blm-eval\b.*\bcheckpoint\b"):
        harness.evaluate_task(hopeless, "lambada_openai", task, None)


def test_notes_of_other_libraries_do_not_break_the_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with harness.quiet():
        for name in ("lm_eval", "datasets", "huggingface_hub.utils", "transformers"):
            assert not logging.getLogger(name).isEnabledFor(logging.WARNING), name
        print("a note")
    assert capsys.readouterr().out == ""


def log_likelihood(model: LanguageModel, context: str, continuation: str, tokenizer: Any) -> tuple[float, bool]:
    """Compute one text after the other, in float64."""
    before, whole = tokenizer.encode(context).ids, tokenizer.encode(context + continuation).ids
    tokens = torch.tensor(whole)[-(model.config.context + 1) :]
    wanted = torch.tensor(whole[len(before) :])
    with torch.no_grad():
        logits = model(tokens[None, :-1])[0, -len(wanted) :].double()
    log_p = logits.log_softmax(-1).gather(1, wanted[:, None])
    return float(log_p.sum()), bool((logits.argmax(-1) == wanted).all())


def test_metrics_follow_the_definitions_of_the_tasks(evaluated: Evaluated, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_json(tmp_path / "tokenizer.json")

    def score(context: str, continuation: str) -> float:
        return log_likelihood(evaluated.model, context, continuation, tokenizer)[0]

    right = []
    for doc in DOCUMENTS["arc_easy_test.jsonl"]:
        choices = [score(f"Question: {doc['question']}\nAnswer:", f" {text}") for text in doc["choices"]["text"]]
        right.append(choices.index(max(choices)) == "ABCD".index(doc["answerKey"]))
    assert evaluated.found.tasks["arc_easy"].metrics["acc"] == pytest.approx(sum(right) / len(right))

    pairs = [doc["text"].rsplit(" ", 1) for doc in DOCUMENTS["lambada_openai_test.jsonl"]]
    words = [log_likelihood(evaluated.model, text, f" {word}", tokenizer) for text, word in pairs]
    lambada = evaluated.found.tasks["lambada_openai"].metrics
    assert lambada["acc"] == sum(greedy for _, greedy in words) / len(words)
    assert lambada["perplexity"] == pytest.approx(math.exp(-sum(value for value, _ in words) / len(words)), rel=1e-4)

    masses = []
    for doc in DOCUMENTS["truthfulqa_mc.jsonl"]:
        # The few-shot examples do not fit into the context: the last part is the same.
        context = f"The 1992 Olympics were held in Barcelona, Spain.\n\nQ: {doc['question']}\nA:"
        targets = doc["mc2_targets"]
        p = [math.exp(score(context, f" {choice}")) for choice in targets["choices"]]
        masses.append(sum(p[i] for i, label in enumerate(targets["labels"]) if label) / sum(p))
    assert evaluated.found.tasks["truthfulqa_mc2"].metrics["acc"] == pytest.approx(sum(masses) / 2, rel=1e-4)


def test_results_have_the_names_of_a_study_and_the_mean(evaluated: Evaluated) -> None:
    metrics = evaluated.found.metrics()
    assert [*metrics] == [*(metric.key for metric in TASKS), "acc"]
    seven = [evaluated.found.tasks[task.name].metrics["acc"] for task in PAPER_TASKS]
    assert metrics["acc"] == pytest.approx(sum(seven) / 7)
    assert read_downstream(evaluated.run) == evaluated.found


def test_progress_reaches_the_end_of_every_task(evaluated: Evaluated) -> None:
    for name in PAPER_NAMES:
        steps = [(done, total) for task, done, total in evaluated.seen if task == name]
        assert steps[0] == (0, 1)
        assert steps[-1][0] == steps[-1][1] > 1


class Counted:
    """Counts the tasks that are evaluated, and stops at one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: str | None = None) -> None:
        self.names: list[str] = []
        whole = harness.evaluate_task

        def evaluate_task(model: Any, name: str, *rest: Any) -> harness.Scored:
            if name == stop_at:
                raise KeyboardInterrupt
            self.names.append(name)
            return whole(model, name, *rest)

        monkeypatch.setattr(evaluate.harness, "evaluate_task", evaluate_task)


THREE = ("arc_easy", "arc_challenge", "winogrande")


def test_a_task_that_fails_does_not_prevent_the_others(tmp_path: Path, evaluated: Evaluated) -> None:
    tasks, out = write_tasks(tmp_path / "tasks"), tmp_path / "results.json"
    long = {**DOCUMENTS["arc_challenge_test.jsonl"][0], "question": "Which?"}
    long["choices"] = {**long["choices"], "text": ["a text " * 200, "56 m", "0 m"]}
    (tasks / "arc_challenge_test.jsonl").write_text(json.dumps(long) + "\n")
    said = r"(?s)^task arc_challenge: .*continuation of \d+ tokens.*\bcontext is 48\b"
    with pytest.raises(ValueError, match=said + rf".*\n.*: {out}$"):
        evaluate_run(evaluated.run, tasks=THREE, task_data=tasks, out=out, with_loss=False)
    stored = read_file(out)
    assert stored is not None
    assert {*stored.tasks} == {"arc_easy", "winogrande"}
    requests = tmp_path / "requests.safetensors"
    tokens = open_json_tokenizer(evaluated.run.parent / "corpus" / "tokenizer.json")
    write_task_requests(requests, tokens, tasks=["arc_challenge"], task_data=tasks, limit=None)
    with pytest.raises(ValueError, match=said):
        answer_requests(evaluated.run, requests, tmp_path / "scores.safetensors", with_loss=False)


def test_a_stopped_evaluation_resumes_with_the_current_task(
    tmp_path: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tasks": THREE, "task_data": evaluated.tasks, "out": tmp_path / "results.json"}
    with monkeypatch.context() as patch:
        stopped = Counted(patch, stop_at="arc_challenge")
        with pytest.raises(KeyboardInterrupt):
            evaluate_run(evaluated.run, **options)
    assert stopped.names == ["arc_easy"]
    counted = Counted(monkeypatch)
    found = evaluate_run(evaluated.run, **options)
    assert counted.names == ["arc_challenge", "winogrande"]
    assert task_metrics(found) == {name: evaluated.found.tasks[name].metrics for name in THREE}
    again = evaluate_run(evaluated.run, **{**options, "tasks": ["winogrande"]}, fresh=True)
    assert counted.names[2:] == ["winogrande"]
    assert task_metrics(again) == task_metrics(found)


def test_other_documents_or_another_model_are_evaluated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_evaluated_run(tmp_path, steps=(10, 20))
    tasks, notes = write_tasks(tmp_path / "tasks"), []
    options: dict[str, Any] = {"tasks": ["winogrande", "arc_easy"], "task_data": tasks, "on_note": notes.append}
    counted = Counted(monkeypatch)
    first = evaluate_run(tmp_path / "run", **options)
    file = tasks / "winogrande_xl_validation.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    second = evaluate_run(tmp_path / "run", **options)
    assert counted.names == ["winogrande", "arc_easy", "winogrande"]
    assert second.tasks["winogrande"].documents == 1
    assert second.tasks["arc_easy"] == first.tasks["arc_easy"]
    assert not notes
    bf16 = evaluate_run(tmp_path / "run", **{**options, "tasks": ["winogrande"]}, precision="bf16")
    assert [*bf16.tasks] == ["winogrande"]
    assert "replacing" in notes[-1]
    # An older checkpoint and a limited number of documents have separate files.
    evaluate_run(tmp_path / "run", **{**options, "tasks": ["arc_easy"]}, checkpoint=10, limit=2)
    names = {path.name for path in (tmp_path / "run").glob("downstream*")}
    assert names == {"downstream.json", "downstream-step-10-limit-2.json"}
    limited = read_downstream(tmp_path / "run", checkpoint=10, limit=2)
    assert limited is not None
    assert (limited.tasks["arc_easy"].examples, limited.tasks["arc_easy"].documents) == (2, 3)
    assert read_downstream(tmp_path / "run") == bf16


def changed(file: str, **fields: object) -> str:
    return json.dumps({**DOCUMENTS[file][0], **fields})


@pytest.mark.parametrize(
    ("task", "line", "words"),
    [
        ("arc_easy", "{", "not valid JSON"),
        ("arc_easy", changed("arc_easy_test.jsonl", answerKey="Z"), "answerKey: 'Z'"),
        ("arc_easy", '{"question": "?"}', "choices: "),
        ("hellaswag", changed("hellaswag_validation.jsonl", label=3), "label: "),
        ("hellaswag", changed("hellaswag_validation.jsonl", endings=["a"]), "endings: "),
        ("lambada_openai", '{"text": "word"}', "text: "),
        ("race", changed("race_high_test.jsonl", problems=[{}]), "problems: "),
        ("race", changed("race_high_test.jsonl", problems="[{'question': '?'}]"), "answer: "),
        ("race", changed("race_high_test.jsonl", problems="__import__('os')"), "{'question', "),
        ("truthfulqa_mc2", changed("truthfulqa_mc.jsonl", mc2_targets={"choices": ["a"], "labels": [0]}), "one 1"),
        ("winogrande", changed("winogrande_xl_validation.jsonl", answer=1), "answer: "),
        ("winogrande", changed("winogrande_xl_validation.jsonl", sentence="none"), "sentence: "),
    ],
)
def test_document_of_another_layout_is_named_by_line_and_field(
    task: str, line: str, words: str, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    path = tmp_path / LOCAL_TASKS[task].file
    path.write_text(path.read_text() + "\n" + line + "\n")
    number = len(DOCUMENTS[path.name]) + 2  # after an empty line
    with pytest.raises(ValueError, match=f"line {number}: ") as error:
        read_documents(tmp_path, task)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_wrong_document_of_the_last_task_is_found_before_the_first_is_evaluated(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    (folder / "winogrande_xl_validation.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"winogrande_xl_validation\.jsonl, line 1"):
        harness.check_tasks(["arc_easy", "winogrande"], folder)


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    (tmp_path / file_name(None, None)).write_text('{"format": 1, "tasks": {}')
    with pytest.raises(ValueError, match=r"downstream.json: .*--fresh"):
        read_downstream(tmp_path)
    (tmp_path / file_name(None, None)).write_text('{"format": 7}')
    with pytest.raises(ValueError, match=r"\bformat\b.*\b7\b.*\b1\b"):
        read_downstream(tmp_path)
    assert read_downstream(tmp_path / "elsewhere") is None


with_real_tasks = pytest.mark.skipif(
    "COUPLED_ADAM_TEST_DATA" not in os.environ, reason="COUPLED_ADAM_TEST_DATA names no folder with the tasks in eval/"
)


@with_real_tasks
@pytest.mark.parametrize("name", PAPER_NAMES)
def test_real_documents_have_the_layout(name: str) -> None:
    found = read_documents(Path(os.environ["COUPLED_ADAM_TEST_DATA"]) / "eval", name)
    counts = dict(zip(PAPER_NAMES, (2376, 1172, 10042, 5153, 1045, 817, 1267), strict=True))
    assert len(found.documents) == counts[name]


@with_real_tasks
def test_real_documents_have_the_same_scores_with_the_exported_model(tmp_path: Path) -> None:
    write_evaluated_run(tmp_path, **{"model.context": 640})
    export_run(tmp_path / "run", tmp_path / "model", on_skip=print)
    (tmp_path / "tasks").mkdir()
    for task in LOCAL_TASKS.values():  # lm-eval prepares all documents of a file, which is slow
        with (Path(os.environ["COUPLED_ADAM_TEST_DATA"]) / "eval" / task.file).open(encoding="utf-8") as file:
            (tmp_path / "tasks" / task.file).write_text("".join(islice(file, 4)), encoding="utf-8")
    options: dict[str, Any] = {"tasks": PAPER_NAMES, "task_data": tmp_path / "tasks", "limit": 3, "device": "cpu"}
    ours = evaluate_run(tmp_path / "run", **options)
    assert_same_scores(evaluate_folder(tmp_path / "model", **options), ours)
    assert all(task.examples == 3 for task in ours.tasks.values())


def test_without_the_corpus_an_earlier_loss_is_used_or_it_is_refused(tmp_path: Path) -> None:
    write_evaluated_run(tmp_path)
    corpus, gone, notes = tmp_path / "corpus", tmp_path / "gone", list[str]()
    corpus.rename(gone)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'run'}: .*--tasks"):
        evaluate_run(tmp_path / "run", tasks=[], on_note=notes.append)
    assert [note for note in notes if "test loss" in note and str(corpus) in note] == notes != []
    assert read_downstream(tmp_path / "run") is None

    gone.rename(corpus)
    found = evaluate_run(tmp_path / "run", tasks=[], on_note=pytest.fail)
    corpus.rename(gone)
    assert evaluate_run(tmp_path / "run", tasks=[], on_note=pytest.fail).loss == found.loss is not None
