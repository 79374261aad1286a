"""A pool of worker processes that apply a function to items.

Unlike multiprocessing workers, they load only the module of that function (not torch, and not the user's script again),
and they end whenever their parent ends, because their input closes.
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

# Items in flight per process: one in work and one queued.
IN_FLIGHT = 2


def available_processes() -> int:
    """Number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(AbstractContextManager["Workers"]):
    """A pool that maps a function over items, in order.

    Args:
        processes: number of processes; 1 runs the function in this process.
        make: called once in each process, returns the function. It must be importable by name.
        arguments: arguments of `make`.

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
        self._threads = ThreadPoolExecutor(processes)  # one thread waits for each process
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes if processes > 1 else 0):
            self._workers.append(_Worker(make, arguments))
            self._idle.put(self._workers[-1])

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the results in the order of the items; take only as many items as can be in flight."""
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
    """A worker process, as seen by its parent."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
        package = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
            # One process per core: more threads would only compete.
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
                f"a worker process ended (exit code {self.process.wait()}), possibly for lack of memory; run the same "
                "command again with fewer --processes"
            ) from error
        if not succeeded:
            raise result
        return result

    def end(self) -> None:
        with suppress(OSError):  # closing flushes, which fails if the process is gone
            self.items.close()
        self.process.wait()
        self.results.close()


def work() -> None:
    """Main function of a worker: read the function from the first message, then send one result per item."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    items, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into the results
    module, name, arguments = pickle.load(items)
    function = getattr(importlib.import_module(module), name)(*arguments)
    with suppress(EOFError, BrokenPipeError):  # the parent ended
        while True:
            item = pickle.load(items)
            try:
                answer = pickle.dumps((True, function(item)), pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                answer = pickle.dumps((False, error))
            results.write(answer)
            results.flush()
