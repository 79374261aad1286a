"""CPU threads that share the rows of a table, without OpenMP.

A torch operation gives each thread an equal share and waits for the last thread at a barrier. If another process is
busy, one of the threads loses time slices, and a step of many short operations waits for it at every barrier. Here,
each thread takes the next piece of rows when it has finished one, and the only barrier is at the end of the table.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def run_on_threads(work: Callable[[], object], threads: int) -> None:
    """Call `work` in up to `threads` threads, including the current one, and return when all calls have returned.

    Args:
        work: processes pieces until none is left; the number of calls must not matter.
        threads: maximum number of threads.

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

    def work_without_autograd() -> None:  # autograd modes are per thread
        with torch.inference_mode(inference), torch.no_grad():  # inference_mode(False) enables gradients
            work()

    pool = _pool(os.getpid(), threads)
    others = [pool.submit(work_without_autograd) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for other in others:
            if not other.cancel():  # do not wait for calls that have not started: no work is left
                other.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Create the pool of this process: a parent's threads do not survive a fork."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix=f"coupled-adam-{process}")
