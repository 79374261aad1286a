"""A few documents of each of the paper's tasks, with the fields of the datasets on the Hub, and a run to evaluate.

All texts are made up here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from export_models import write_corpus, write_run

from coupled_adam.data.manifest import MANIFEST_FILE, Shard, Split, read_manifest, write_manifest
from coupled_adam.models.language_model import LanguageModel

PROBLEMS = [
    {"question": "The fox is   _  .", "answer": "B", "options": ["red", "quick", "lazy", "old"]},
    {"question": "Who barked?", "answer": "D", "options": ["foxes", "cats", "words", "dogs"]},
]
FALSE = {"choices": ["yes", "no, never", "it's 1234"], "labels": [1, 0, 0]}
TRUTHS = {"choices": ["yes", "they've barked", "no, never"], "labels": [1, 1, 0]}

DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "arc_easy_test.jsonl": [
        {
            "id": f"a{number}",
            "question": question,
            "choices": {"text": ["dog", "fox", "a text", "naïveté"], "label": ["A", "B", "C", "D"]},
            "answerKey": answer,
        }
        for number, (question, answer) in enumerate([("What jumps?", "B"), ("What barked?", "A"), ("What is 1?", "D")])
    ],
    "arc_challenge_test.jsonl": [
        {
            "id": "c1",
            "question": "How far is the kennel?",
            "choices": {"text": ["1234 m", "56 m", "0 m"], "label": ["1", "2", "3"]},
            "answerKey": "1",
        },
        {
            "id": "c2",
            "question": "Is it?",
            "choices": {"text": ["yes", "no", "both", "a", "b"], "label": ["A", "B", "C", "D", "E"]},
            "answerKey": "E",
        },
    ],
    "hellaswag_validation.jsonl": [
        {
            "ind": number,
            "activity_label": "Walking [header] dogs",
            "ctx_a": "A man has a dog.",
            "ctx_b": start,
            "ctx": f"A man has a dog. {start}",
            "endings": ["runs.", "barks [title] twice.", "is a  text.", "ends."],
            "source_id": "x",
            "split": "val",
            "split_type": "indomain",
            "label": label,
        }
        for number, (start, label) in enumerate([("he", "0"), ("the dog", "1"), ("", "3")])
    ],
    "lambada_openai_test.jsonl": [
        {"text": "The quick brown fox jumps to the kennel"},
        {"text": "They've barked, and \"they've\" barked\n\nagain"},
    ],
    "race_high_test.jsonl": [
        {
            "example_id": f"high{i}.txt",
            "article": "The fox can't jump.",
            "answer": "B",
            "problems": str(PROBLEMS[: i + 1]),
        }
        for i in range(2)
    ],
    "truthfulqa_mc.jsonl": [
        {"question": question, "mc1_targets": FALSE, "mc2_targets": TRUTHS} for question in ("Is it?", "Do dogs bark?")
    ],
    "winogrande_xl_validation.jsonl": [
        {"sentence": "The fox beat the dog as _ was quick.", "option1": "fox", "option2": "dog", "answer": "1"},
        {"sentence": "The dog lost as _ was lazy.", "option1": "fox", "option2": "dog", "answer": "2"},
    ],
}


def write_tasks(folder: Path) -> Path:
    """Write a folder for `--task-data`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in DOCUMENTS.items():
        lines = [json.dumps(document, ensure_ascii=False) for document in documents]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_evaluated_run(folder: Path, steps: Sequence[int] = (10,), **changes: object) -> LanguageModel:
    """Write a run and its corpus with a test split into `folder`; return the model of the last step.

    The context is short, so that the prompts of RACE and TruthfulQA are truncated.
    """
    corpus = write_corpus(folder / "corpus").folder
    tokens = (np.arange(203) % 290).astype(np.uint16)
    tokens.tofile(corpus / "test.bin")
    manifest = read_manifest(corpus / MANIFEST_FILE)
    test = Split(tokens=len(tokens), shards=[Shard(file="test.bin", tokens=len(tokens))])
    write_manifest(corpus / MANIFEST_FILE, manifest.model_copy(update={"splits": {**manifest.splits, "test": test}}))
    overrides = [f"{key}={value}" for key, value in {"model.context": 48, "training.device": "cpu", **changes}.items()]
    return write_run(folder / "run", corpus, steps, overrides)
