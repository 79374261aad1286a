"""Processes that each run one function on one item after another.

Unlike those of multiprocessing, they load nothing but the module of that function (no torch, and not the user's script
again), and they end when their parent ends, however it ends: their input is at its end then.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from coupled_adam.base.errors import UserError, UserOSError

# Items under way for each process: one that it works on, and one that waits for it.
IN_FLIGHT = 2


def available_processes() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(AbstractContextManager["Workers"]):
    """A pool that maps a function over items, in their order.

    Args:
        processes: how many; 1 runs the function in this one.
        make: called once in each process, it returns the function. It must be importable by its name.
        arguments: of `make`.

    Example:
        >>> from operator import methodcaller
        >>> with Workers(2, methodcaller, "upper") as workers:
        ...     list(workers.map(["a", "b", "c"]))
        ['A', 'B', 'C']
    """

    def __init__(self, processes: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        if processes < 1:
            raise UserError(f"processes is {processes}, expected 1 or more")
        self._function = make(*arguments) if processes == 1 else None
        self._threads = ThreadPoolExecutor(processes)  # one waits for each process
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes if processes > 1 else 0):
            self._workers.append(_Worker(make, arguments))
            self._idle.put(self._workers[-1])

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """The results in the order of the items; only as many items are taken as can be worked on."""
        if self._function is not None:
            yield from map(self._function, items)
            return
        pending: deque[Future[Any]] = deque()
        for item in items:
            pending.append(self._threads.submit(self._run, item))
            if len(pending) == IN_FLIGHT * len(self._workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _run(self, item: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.run(item)
        finally:
            self._idle.put(worker)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process, seen from its parent."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
        package = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            # There is a process for every core; threads of their own would only get in each other's way.
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", f"from {__name__} import work; work()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.items, self.results = self.process.stdin, self.process.stdout
        pickle.dump((make.__module__, make.__qualname__, arguments), self.items)
        self.items.flush()

    def run(self, item: Any) -> Any:
        try:
            pickle.dump(item, self.items, pickle.HIGHEST_PROTOCOL)
            self.items.flush()
            succeeded, result = pickle.load(self.results)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.process.kill()
            raise UserOSError(
                f"a worker process ended (exit code {self.process.wait()}), perhaps for lack of memory; run the same "
                "command again with fewer --processes"
            ) from error
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        with suppress(OSError):  # something was still to be written, and the process is gone
            self.items.close()
        self.process.wait()
        self.results.close()


def work() -> None:
    """The life of a worker: what to run comes in the first message; then one result goes out for each item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    items, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the results
    module, name, arguments = pickle.load(items)
    function = getattr(importlib.import_module(module), name)(*arguments)
    with suppress(EOFError, BrokenPipeError):  # the parent has ended
        while True:
            item = pickle.load(items)
            try:
                answer = pickle.dumps((True, function(item)), pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                answer = pickle.dumps((False, error))
            results.write(answer)
            results.flush()
