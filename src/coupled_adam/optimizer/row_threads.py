"""Threads of the CPU that share the rows of a table without OpenMP.

A torch operation gives each of its threads an equal share and waits at a barrier for the last one. Beside another busy
process one of them loses time slices, and a step of many short operations waits for it at every barrier. Here each
thread takes the next piece of rows as soon as it is done with one, and the only barrier is the end of the table.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def run_on_threads(work: Callable[[], object], threads: int) -> None:
    """Call `work` in up to `threads` threads at a time, this one included, and return when all calls have.

    Args:
        work: takes pieces until there are none left; it must not matter how many of its calls start.
        threads: how many, at most.

    Example:
        >>> from collections import deque
        >>> pieces, done = deque(range(5)), []
        >>> def work():
        ...     while pieces:
        ...         done.append(pieces.popleft())
        >>> run_on_threads(work, threads=1)
        >>> done
        [0, 1, 2, 3, 4]
    """
    if threads <= 1:
        work()
        return
    inference = torch.is_inference_mode_enabled()

    def work_without_autograd() -> None:  # every thread has its own modes
        with torch.inference_mode(inference), torch.no_grad():  # inference_mode(False) turns gradients on
            work()

    pool = _pool(os.getpid(), threads)
    others = [pool.submit(work_without_autograd) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            if not other.cancel():  # one that has not started is not waited for: nothing is left to do
                other.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A pool of this process: the threads of a parent do not survive a fork."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix=f"coupled-adam-{process}")
