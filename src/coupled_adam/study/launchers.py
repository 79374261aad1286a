"""Launchers run the tasks of a study: in worker processes on this machine, or as cluster jobs.

A launcher starts tasks, reports how they ended, and can be asked to stop, which makes the runs save and exit.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coupled_adam.base.errors import UserOSError
from coupled_adam.base.extras import require
from coupled_adam.config.study_sections import SlurmSection
from coupled_adam.study.cell import Status, Task, is_finished, run_cell, write_error
from coupled_adam.study.energy import visible_gpus
from coupled_adam.study.folder import OUTPUT, tail

# How often a cluster job may reach its time limit; submitit would give up after three times.
MOST_TIME_LIMITS = 100
WORKER = (sys.executable, "-m", "coupled_adam.study.worker")


@dataclass(frozen=True)
class Answer:
    """A worker's report at the end of a task."""

    status: Status
    message: str
    is_last: bool
    """Whether the worker process exits now."""


@dataclass(frozen=True)
class Ended:
    """How a task ended."""

    task: Task
    status: Status
    message: str = ""


class RunLauncher(Protocol):
    """Interface of a launcher."""

    slots: int
    """Largest number of tasks at a time."""
    leaves_on_stop: bool
    """Whether runs continue without the runner after it is stopped."""

    def start(self, task: Task) -> None:
        """Start a task."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait up to `seconds` for a task to end; return the tasks that ended since the last call."""

    def stop(self) -> None:
        """Ask all runs to save and exit; called a second time, kill them."""

    def close(self) -> None:
        """Shut down idle workers."""


class Worker:
    """A worker process, seen from the runner."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  stays open as long as the process
        self.process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the runner, which forwards it
        )
        self.task: Task | None = None
        self.has_answered = False

    def begin(self, task: Task) -> None:
        """Send a task. If the worker has died, `answer` reports it."""
        self.task = task
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task.to_json()) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Answer | None:
        """Read the next answer; None if the process has exited."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.has_answered = True
        return Answer(**json.loads(line))

    def cause_of_death(self) -> str:
        """Why the process exited, as far as known."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"its process was killed by {name}" + (", possibly out of memory" if name == "SIGKILL" else "")
        self.errors.seek(0)
        printed = self.errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return f"its process failed with exit code {code}" + (f": {printed[-1]}" if printed else "")

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        # torchrun starts its ranks in their own process groups: find them before their parents are gone.
        below = processes_below(self.process.pid)
        self.signal_group(signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group, even if the process itself is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Shut down an idle process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def processes_below(pid: int) -> list[int]:
    """Descendants of a process, from /proc; empty without /proc."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *processes_below(child)]
    return found


class LocalLauncher:
    """Worker processes on this machine, each doing one run after another.

    Args:
        environments: one per worker, with its share of the GPUs.
    """

    leaves_on_stop = False

    def __init__(self, environments: Sequence[dict[str, str]]) -> None:
        self.slots = len(environments)
        self._environments = list(environments)
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._stops = 0
        # Start all workers now: they load torch while the data is prepared.
        for slot in range(self.slots):
            self._workers.append(self._new_worker(slot))

    def _new_worker(self, slot: int) -> Worker:
        worker = Worker(self._environments[slot])
        assert worker.process.stdout is not None
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, slot)
        return worker

    def start(self, task: Task) -> None:
        """Start a task in an idle worker."""
        next(worker for worker in self._workers if worker.task is None).begin(task)

    def wait(self, seconds: float) -> list[Ended]:
        """Return the tasks that have ended. The task of a worker that died has failed, and the worker is replaced."""
        ended = []
        for key, _ in self._selector.select(seconds):
            slot = key.data
            worker = self._workers[slot]
            answer, task = worker.answer(), worker.task
            if answer is not None:
                worker.task = None
                if task is not None:
                    ended.append(Ended(task, answer.status, answer.message))
                if not answer.is_last:
                    continue
                # The answer is complete; a hanging device could keep the process from exiting.
                worker.kill()
                cause = ""
            else:
                cause = worker.cause_of_death()
                worker.signal_group(signal.SIGTERM)  # for a torchrun it left behind: the ranks save and exit
                if task is not None:
                    ended.append(self._after_death(task, cause))
            self._selector.unregister(key.fileobj)
            worker.close()
            if answer is None and task is None and not self._stops and not worker.has_answered:
                # It died before its first task, so the next one would too.
                raise UserOSError(f"a study worker did not start: {cause}")
            self._workers[slot] = self._new_worker(slot) if not self._stops else worker
        return ended

    def _after_death(self, task: Task, cause: str) -> Ended:
        if is_finished(task):  # it died on exit
            return Ended(task, "finished")
        if self._stops:
            return Ended(task, "stopped")
        write_error(task.folder, cause, f"Last lines of {OUTPUT}:\n{tail(task.folder / OUTPUT)}")
        return Ended(task, "failed", cause)

    def stop(self) -> None:
        """Forward Ctrl-C; the second time, kill all processes."""
        self._stops += 1
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGINT) if self._stops == 1 else worker.kill()

    def close(self) -> None:
        """Shut down the workers, which are idle now."""
        for worker in self._workers:
            if worker.process.stdout is not None and not worker.process.stdout.closed:
                worker.close()
        self._selector.close()


class ClusterLauncher:
    """Slurm jobs, through submitit; without Slurm, submitit runs them as processes on this machine.

    Args:
        folder: for submitit's files.
        settings: resources to request from the cluster.
        jobs: largest number of jobs at a time; None for no limit with Slurm, and 1 without.
    """

    leaves_on_stop = True

    def __init__(self, folder: Path, settings: SlurmSection, jobs: int | None) -> None:
        # No "%j" in the folder's name: without Slurm, submitit would create a folder of that literal name. File names
        # start with the job number anyway.
        submitit = require("submitit", "cluster", "for --launcher slurm")
        executor = submitit.AutoExecutor(folder=str(folder), slurm_max_num_timeout=MOST_TIME_LIMITS)
        self.is_slurm = executor.cluster == "slurm"
        self.slots = jobs or (sys.maxsize if self.is_slurm else 1)
        executor.update_parameters(**_parameters(settings))
        if not self.is_slurm:
            # submitit would also list GPUs that do not exist, and then torch sees none.
            executor.update_parameters(gpus_per_node=min(1, len(visible_gpus())))
        self._executor: Any = executor
        self._jobs: dict[str, tuple[Task, Any]] = {}

    def start(self, task: Task) -> None:
        """Submit a job."""
        self._jobs[task.cell.label] = task, self._executor.submit(ClusterJob(), task.to_json())

    def wait(self, seconds: float) -> list[Ended]:
        """Return the jobs that are done."""
        until = time.monotonic() + seconds
        while True:
            done = [label for label, (_, job) in self._jobs.items() if job.done()]
            if done or time.monotonic() >= until:
                return [self._ended(*self._jobs.pop(label)) for label in done]
            time.sleep(min(0.2, seconds))

    def _ended(self, task: Task, job: Any) -> Ended:
        try:
            status, message = job.result()
        except Exception as error:  # anything may have happened on the other machine
            if is_finished(task):
                return Ended(task, "finished")
            lines = str(error).strip().splitlines()
            reason = f"job {job.job_id} failed: {lines[-1] if lines else type(error).__name__}"
            write_error(task.folder, reason, str(error))
            return Ended(task, "failed", reason)
        return Ended(task, status, message)

    def stop(self) -> None:
        """Forget the jobs, which keep running on the cluster."""
        self._jobs.clear()

    def close(self) -> None:
        """Do nothing: there are no workers."""


class ClusterJob:
    """Function of a cluster job. At its time limit it is resubmitted and resumes from its last checkpoint."""

    def __call__(self, values: dict[str, Any]) -> tuple[Status, str]:
        """Train and measure one run."""
        return run_cell(Task.from_json(values))

    def checkpoint(self, values: dict[str, Any]) -> Any:
        """Resubmit the job; submitit calls this shortly before the time limit."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, values)


def _parameters(settings: SlurmSection) -> dict[str, Any]:
    """Translate the section [slurm] into submitit's parameters."""
    parameters: dict[str, Any] = {
        "name": "coupled-adam",
        "timeout_min": max(1, round(60 * settings.hours)),
        "gpus_per_node": settings.gpus,
        "cpus_per_task": settings.cpus,
        "slurm_partition": settings.partition,
        "slurm_account": settings.account,
        "mem_gb": settings.memory_gb,
        "slurm_additional_parameters": settings.options or None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def worker_environments(jobs: int, gpus: Sequence[str], gpus_each: int) -> list[dict[str, str]]:
    """Environment of each worker, with its own GPUs; workers share GPUs if there are too few.

    Args:
        jobs: number of workers.
        gpus: all GPUs that may be used.
        gpus_each: GPUs per worker.

    Example:
        >>> [each["CUDA_VISIBLE_DEVICES"] for each in worker_environments(3, ["0", "1"], 1)]
        ['0', '1', '0']
        >>> [each["CUDA_VISIBLE_DEVICES"] for each in worker_environments(2, ["0", "1", "2", "3"], 2)]
        ['0,1', '2,3']
        >>> worker_environments(1, ["0", "1"], 1)[0]["CUDA_VISIBLE_DEVICES"]
        '0'
    """
    # Same as in cli.py: OpenMP threads that spin while waiting slow each other down.
    common = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | dict(os.environ)
    if "CUDA_VISIBLE_DEVICES" not in common:
        common["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # `gpus` has nvidia-smi's indices
    if not gpus:
        return [dict(common) for _ in range(jobs)]
    shares = []
    for slot in range(jobs):
        own = [gpus[(slot * gpus_each + i) % len(gpus)] for i in range(gpus_each)]
        shares.append(common | {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))})
    return shares
