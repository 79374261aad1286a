"""A small study whose corpus has a tokenizer, so that tasks can be evaluated; and running it in this process."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from study_runs import ADAMW, COUPLED, plan, study_corpus, write_study

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from export_models import ROWS, TOKENS, write_tokenizer_json
from tiny_tasks import write_tasks

from coupled_adam.config.study_config import with_settings
from coupled_adam.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    UNIGRAM_FILE,
    read_manifest,
    write_manifest,
)
from coupled_adam.study.cell import Status, Task, run_cell
from coupled_adam.study.expansion import cells_of, chosen
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.results import Result

PAIR = ADAMW + COUPLED


def write_text_study(folder: Path, optimizers: str = PAIR, *, evaluation: str = "", **sections: Any) -> Path:
    """Write a study of small models, and the files of its tasks in `folder / "tasks"`."""
    write_tasks(folder / "tasks")
    corpus = study_corpus(folder / "corpus")
    write_tokenizer_json(corpus / TOKENIZER_FILE)
    counts = np.load(corpus / UNIGRAM_FILE)
    np.save(corpus / UNIGRAM_FILE, np.pad(counts, (0, TOKENS - len(counts))))
    known = {"tokenizer": TOKENIZER_FILE, "vocabulary_size": TOKENS, "separator": 0}
    write_manifest(corpus / MANIFEST_FILE, read_manifest(corpus / MANIFEST_FILE).model_copy(update=known))
    sections = {"model": {"vocabulary_size": ROWS}, **sections}
    return write_study(folder, optimizers, more=f"evaluation = {{ {evaluation} }}\n", **sections)


def do(file: Path, out: Path, *settings: str, only: tuple[str, ...] = ()) -> dict[str, tuple[Status, str]]:
    """Run all runs without a result, one after the other; return how each ended."""
    study, left = with_settings(plan(file)[0], settings)
    cells = cells_of(study, left)
    folder = StudyFolder(out)
    folder.require_fit(study, cells)
    folder.prepare(study)
    todo = [cell for cell in chosen(cells, only) if folder.result(cell, study.evaluation) is None]
    ended = {cell.label: run_cell(Task(out.absolute(), study.name, cell, study.evaluation)) for cell in todo}
    folder.gather(cells)
    return ended


def by_label(results: list[Result]) -> dict[str, Result]:
    return {f"{result.cell}/seed-{result.seed}": result for result in results}
