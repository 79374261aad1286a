"""Worker process that does the runs of a study one after another: `python -m coupled_adam.study.worker`.

Tasks arrive as lines of JSON on stdin, and answers go to stdout as lines of JSON; all other output goes to stderr. A
worker does many runs, because loading torch takes seconds. It is a separate process, so that a crash or out-of-memory
error ends one run and not the study.

An answer says whether it is the last one: after an internal error the worker exits and is replaced. On a signal, or at
the end of stdin (the study is gone), training saves and the worker exits.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from coupled_adam.base.cpu import limit_instructions
from coupled_adam.training.interruption import signals_to_watch

Tasks = queue.SimpleQueue[dict[str, Any] | None]


def main() -> None:
    """Do tasks from stdin until it ends."""
    with _answers() as answers:
        for number in signals_to_watch():
            signal.signal(number, signal.default_int_handler)
        tasks: Tasks = queue.SimpleQueue()
        threading.Thread(target=_read_tasks, args=(tasks,), daemon=True).start()

        def answer(status: str, message: str, *, is_last: bool = False) -> None:
            answers.write(json.dumps({"status": status, "message": message, "is_last": is_last}) + "\n")
            answers.flush()

        limit_instructions()  # again: this may be another machine than the one that started the study
        try:
            # Load torch while waiting for the first task.
            import coupled_adam.study.measurement
            import coupled_adam.training.run  # noqa: F401

            while (task := tasks.get()) is not None:
                _do(task, answer)
        except KeyboardInterrupt:
            answer("stopped", "", is_last=True)


def _do(values: dict[str, Any], answer: Callable[..., None]) -> None:
    from coupled_adam.study.cell import Task, run_cell
    from coupled_adam.study.folder import OUTPUT
    from coupled_adam.study.measurement import release_memory

    task = Task.from_json(values)
    try:
        with printing_to(task.folder / OUTPUT):
            status, message = run_cell(task)
        release_memory()
    except Exception as error:
        # The device may be unusable after an internal error; another process takes over.
        answer("failed", f"{type(error).__name__}: {error}", is_last=True)
        sys.exit(1)
    answer(status, message)


def _read_tasks(tasks: Tasks) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    tasks.put(None)
    # The study has ended or is gone: training saves, everything else stops.
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _answers() -> Iterator[TextIO]:
    """Reserve stdout for answers; output of libraries goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers


@contextmanager
def printing_to(path: Path) -> Iterator[None]:
    """Append all output of the process to a file, including that of C libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, former in zip((1, 2), before, strict=True):
            os.dup2(former, number)
            os.close(former)


if __name__ == "__main__":
    main()
