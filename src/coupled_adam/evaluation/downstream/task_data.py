"""The paper's tasks from local files, for machines without internet: one JSON document per line, with the fields of the
dataset on the Hugging Face Hub.

Only the source of the documents changes; prompts, functions and metrics are lm-eval's. So the documents must have the
layout that lm-eval expects, and every line is checked.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import parse_json

Text = Annotated[str, Field(min_length=1)]


class Document(BaseModel):
    """The fields of a document that its task uses; others are ignored. Types are those of the Hub: "2" is not 2."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ArcChoices(Document):
    text: list[Text] = Field(min_length=2)
    label: list[Text]


class Arc(Document):
    question: Text
    choices: ArcChoices
    answerKey: str

    @model_validator(mode="after")
    def _has_its_answer(self) -> Self:
        if len(self.choices.text) != len(self.choices.label):
            raise UserError("choices: expected as many entries in `text` as in `label`")
        if self.answerKey not in self.choices.label:
            raise UserError(f"answerKey: {self.answerKey!r} is not among the labels of the choices")
        return self


class HellaSwag(Document):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[Text] = Field(min_length=4, max_length=4)
    label: Literal["0", "1", "2", "3"]


class Lambada(Document):
    text: Annotated[str, Field(pattern=" ")]  # the task is to predict the last word


class RaceProblem(Document):
    question: str
    answer: Literal["A", "B", "C", "D"]
    options: list[Text] = Field(min_length=4, max_length=4)


class Race(Document):
    article: Text
    problems: str

    @model_validator(mode="after")
    def _has_problems(self) -> Self:
        try:
            problems = ast.literal_eval(self.problems)  # as lm-eval reads it
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            problems = None
        if not isinstance(problems, list) or not problems:
            raise UserError("problems: expected the text of a Python list of {'question', 'answer', 'options'}")
        for problem in problems:
            RaceProblem.model_validate(problem)
        return self


class Targets(Document):
    choices: list[Text] = Field(min_length=1)
    labels: list[Literal[0, 1]]

    @model_validator(mode="after")
    def _has_a_truth(self) -> Self:
        if len(self.choices) != len(self.labels) or 1 not in self.labels:
            raise UserError("expected a label 0 or 1 for every choice, and at least one 1")
        return self


class TruthfulQA(Document):
    question: Text
    mc1_targets: Targets
    mc2_targets: Targets


class WinoGrande(Document):
    sentence: Annotated[str, Field(pattern="_")]
    option1: Text
    option2: Text
    answer: Literal["1", "2"]


@dataclass(frozen=True)
class LocalTask:
    """File and layout of a task's documents."""

    file: str
    split: Literal["test", "validation"]
    """The split that lm-eval evaluates on."""
    layout: type[Document]
    origin: str
    """The dataset on the Hub that has this layout."""


LOCAL_TASKS = {
    "arc_easy": LocalTask("arc_easy_test.jsonl", "test", Arc, "allenai/ai2_arc, ARC-Easy"),
    "arc_challenge": LocalTask("arc_challenge_test.jsonl", "test", Arc, "allenai/ai2_arc, ARC-Challenge"),
    "hellaswag": LocalTask("hellaswag_validation.jsonl", "validation", HellaSwag, "Rowan/hellaswag"),
    "lambada_openai": LocalTask("lambada_openai_test.jsonl", "test", Lambada, "EleutherAI/lambada_openai"),
    "race": LocalTask("race_high_test.jsonl", "test", Race, "EleutherAI/race, high"),
    "truthfulqa_mc2": LocalTask("truthfulqa_mc.jsonl", "validation", TruthfulQA, "truthfulqa/truthful_qa"),
    "winogrande": LocalTask("winogrande_xl_validation.jsonl", "validation", WinoGrande, "allenai/winogrande, xl"),
}


@dataclass(frozen=True)
class LocalDocuments:
    """The documents of one task."""

    split: str
    documents: list[dict[str, Any]]


def check_files(folder: Path, tasks: Sequence[str]) -> None:
    """Check all task files, which takes a moment, so that errors appear before the first task."""
    if not folder.is_dir():
        raise UserError(f"--task-data: {folder} is not a folder; pass a folder with {_names(list(LOCAL_TASKS))}")
    unknown = [name for name in tasks if name not in LOCAL_TASKS]
    if unknown:
        raise UserError(
            f"--task-data supports only {', '.join(LOCAL_TASKS)}; evaluate {', '.join(unknown)} without it, on a "
            "machine with internet"
        )
    missing = [name for name in tasks if not (folder / LOCAL_TASKS[name].file).is_file()]
    if missing:
        others = f", or skip {', '.join(missing)} with --tasks" if len(missing) < len(tasks) else ""
        raise UserError(f"--task-data: {folder} lacks {_names(missing)}; add the files{others}")
    for name in tasks:
        read_documents(folder, name)


def read_documents(folder: Path, task: str) -> LocalDocuments:
    """Read and check all documents of a task."""
    local = LOCAL_TASKS[task]
    path = folder / local.file
    documents = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            documents.append(local.layout.model_validate(parse_json(line, f"line {number}")).model_dump())
        except ValidationError as error:
            raise UserError(
                f"{path}, line {number}: {_first_problem(error)}; expected the fields of {local.origin} on the Hub"
            ) from None
        except ValueError as error:  # not JSON, or not UTF-8
            raise UserError(f"{path}, {error}; expected one document per line") from None
    if not documents:
        raise UserError(f"{path}: no documents; expected one JSON document per line")
    return LocalDocuments(local.split, documents)


def _names(tasks: Sequence[str]) -> str:
    return ", ".join(LOCAL_TASKS[name].file for name in tasks)


def _first_problem(error: ValidationError) -> str:
    """Short description of the first invalid field."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    value = "" if first["type"] in ("missing", "value_error") else f", not {_shortened(first['input'])}"
    return f"{field}: {message}{value}" if field else f"{message}{value}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
