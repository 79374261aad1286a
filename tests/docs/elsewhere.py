"""Examples that need their own processes: all examples with the same launcher are started together."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from page_examples import Example, imported_modules, save_files

OPTIONAL_LIBRARIES = {"transformers", "accelerate", "lightning", "peft", "trl"}
SECONDS = 300  # for all examples with the same launcher


def marked(example: Example) -> object:
    """An example as a parameter of a test."""
    marks = [pytest.mark.gpu] if example.run == "gpu" else []
    return pytest.param(example, id=example.title, marks=marks)


def run_elsewhere(
    examples: Iterable[Example], way: str, checks: str, folder: Path, pages_with_files: Iterable[Path] = ()
) -> None:
    """Run all examples that need their own process, or all that run on some ranks under torchrun.

    Args:
        examples: the examples of one page, or of several with different titles.
        way: how they are run; selects the examples.
        checks: the module whose `CHECKS` has the check of each example by title.
        folder: gets a folder for each example.
        pages_with_files: other pages whose files the examples import.
    """
    chosen = [example for example in examples if example.run == way]
    for example in chosen:
        (folder / example.folder).mkdir()
        for page in (example.page, *pages_with_files):
            save_files(page, folder / example.folder)
    command = [sys.executable]
    if way != "process":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", way.removeprefix("torchrun ")]
    command += [str(Path(__file__).with_name("run_example.py")), str(folder), checks]
    command += [f"{example.page}::{example.title}" for example in chosen]
    # The examples for several ranks run on CPUs, and there may be only one core for each.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{way}.log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS, check=False)


def assert_ran_elsewhere(example: Example, folder: Path) -> None:
    """Read the results that the ranks of an example wrote."""
    for library in {module.partition(".")[0] for module in imported_modules(example)} & OPTIONAL_LIBRARIES:
        # importorskip would import it, which takes seconds; this process does not need it.
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    for rank in range({"process": 1, "torchrun 2": 2}[example.run]):
        outcome = folder / example.folder / f"outcome.rank{rank}"
        log = folder / f"{example.run}.log"
        assert outcome.exists(), f"{example}, rank {rank}: killed, or never started\n{log.read_text()[-6000:]}"
        assert outcome.read_text() == "ok", f"{example}, rank {rank}\n{outcome.read_text()}"
