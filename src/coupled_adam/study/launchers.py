"""Where the runs of a study take place: in processes on this machine, or as jobs of a cluster.

A launcher takes tasks, says which have ended and how, and can be asked to stop: the trainings then save and end.
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

# So often a job of a cluster may reach its time limit; submitit would give up after three times.
MOST_TIME_LIMITS = 100
WORKER = (sys.executable, "-m", "coupled_adam.study.worker")


@dataclass(frozen=True)
class Answer:
    """What a worker says at the end of a task."""

    status: Status
    message: str
    is_last: bool
    """Whether the process ends now."""


@dataclass(frozen=True)
class Ended:
    """How a task ended."""

    task: Task
    status: Status
    message: str = ""


class RunLauncher(Protocol):
    """What the runner needs of a launcher."""

    slots: int
    """How many tasks may be under way."""
    leaves_on_stop: bool
    """Whether runs go on without the runner when it is stopped."""

    def start(self, task: Task) -> None:
        """Begin a task."""

    def wait(self, seconds: float) -> list[Ended]:
        """The tasks that have ended since the last call; waits so long for one."""

    def stop(self) -> None:
        """Ask all runs to save and end; called again, end them at once."""

    def close(self) -> None:
        """End what is idle."""


class Worker:
    """A worker process, seen from the runner."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  it lives as long as the process
        self.process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal comes to the runner alone, which hands it on
        )
        self.task: Task | None = None
        self.has_answered = False

    def begin(self, task: Task) -> None:
        """Hand over a task; a worker that has died meanwhile is found out when its answer is read."""
        self.task = task
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task.to_json()) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Answer | None:
        """The next answer; None when the process is gone."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.has_answered = True
        return Answer(**json.loads(line))

    def cause_of_death(self) -> str:
        """Why the process is gone, as far as that can be known."""
        code = self.process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"its process was ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
        self.errors.seek(0)
        printed = self.errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return f"its process ended with exit code {code}" + (f": {printed[-1]}" if printed else "")

    def kill(self) -> None:
        """End the process at once, and all that it has started."""
        # torchrun gives its ranks groups of their own, so they are looked for before their parents are gone.
        below = processes_below(self.process.pid)
        self.signal_group(signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def signal_group(self, number: signal.Signals) -> None:
        """A signal for the process and what it has started, also when the process itself is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Let an idle process end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def processes_below(pid: int) -> list[int]:
    """The children of a process and theirs, as /proc has them; none where there is no /proc."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *processes_below(child)]
    return found


class LocalLauncher:
    """Worker processes on this machine, each doing one run after the other.

    Args:
        environments: of the workers, one each: says which GPU is whose.
    """

    leaves_on_stop = False

    def __init__(self, environments: Sequence[dict[str, str]]) -> None:
        self.slots = len(environments)
        self._environments = list(environments)
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._stops = 0
        # All at once, and before there is anything to do: they load torch meanwhile.
        for slot in range(self.slots):
            self._workers.append(self._new_worker(slot))

    def _new_worker(self, slot: int) -> Worker:
        worker = Worker(self._environments[slot])
        assert worker.process.stdout is not None
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, slot)
        return worker

    def start(self, task: Task) -> None:
        """Begin a task in an idle worker."""
        next(worker for worker in self._workers if worker.task is None).begin(task)

    def wait(self, seconds: float) -> list[Ended]:
        """The tasks that have ended; a worker that died ends its task as failed. Whichever has ended is replaced."""
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
                # It has said all; a device that does not answer any more could keep it from ending.
                worker.kill()
                cause = ""
            else:
                cause = worker.cause_of_death()
                worker.signal_group(signal.SIGTERM)  # torchrun, which it leaves behind: the ranks save and end
                if task is not None:
                    ended.append(self._after_death(task, cause))
            self._selector.unregister(key.fileobj)
            worker.close()
            if answer is None and task is None and not self._stops and not worker.has_answered:
                # It died with nothing to do, so the next would too.
                raise UserOSError(f"a worker of the study did not start: {cause}")
            self._workers[slot] = self._new_worker(slot) if not self._stops else worker
        return ended

    def _after_death(self, task: Task, cause: str) -> Ended:
        if is_finished(task):  # it died as it ended
            return Ended(task, "finished")
        if self._stops:
            return Ended(task, "stopped")
        write_error(task.folder, cause, f"The last lines of {OUTPUT}:\n{tail(task.folder / OUTPUT)}")
        return Ended(task, "failed", cause)

    def stop(self) -> None:
        """Hand on a Ctrl-C; the second time, end all processes."""
        self._stops += 1
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGINT) if self._stops == 1 else worker.kill()

    def close(self) -> None:
        """End the workers, which are idle now."""
        for worker in self._workers:
            if worker.process.stdout is not None and not worker.process.stdout.closed:
                worker.close()
        self._selector.close()


class ClusterLauncher:
    """Jobs of Slurm through submitit; without Slurm, submitit runs them as processes on this machine.

    Args:
        folder: for submitit's files.
        settings: what to ask the cluster for.
        jobs: how many may run at a time; None: as many as the cluster likes; without Slurm one.
    """

    leaves_on_stop = True

    def __init__(self, folder: Path, settings: SlurmSection, jobs: int | None) -> None:
        # No "%j" in the folder's name: without Slurm, submitit makes a folder that is called just that. Its files have
        # the number of their job in front.
        submitit = require("submitit", "cluster", "to start the runs of a study with --launcher slurm")
        executor = submitit.AutoExecutor(folder=str(folder), slurm_max_num_timeout=MOST_TIME_LIMITS)
        self.is_slurm = executor.cluster == "slurm"
        self.slots = jobs or (sys.maxsize if self.is_slurm else 1)
        executor.update_parameters(**_parameters(settings))
        if not self.is_slurm:
            # It would also name GPUs that are not there, and then torch sees none.
            executor.update_parameters(gpus_per_node=min(1, len(visible_gpus())))
        self._executor: Any = executor
        self._jobs: dict[str, tuple[Task, Any]] = {}

    def start(self, task: Task) -> None:
        """Submit a job."""
        self._jobs[task.cell.label] = task, self._executor.submit(ClusterJob(), task.to_json())

    def wait(self, seconds: float) -> list[Ended]:
        """The jobs that are done."""
        until = time.monotonic() + seconds
        while True:
            done = [label for label, (_, job) in self._jobs.items() if job.done()]
            if done or time.monotonic() >= until:
                return [self._ended(*self._jobs.pop(label)) for label in done]
            time.sleep(min(0.2, seconds))

    def _ended(self, task: Task, job: Any) -> Ended:
        try:
            status, message = job.result()
        except Exception as error:  # whatever happened on the other machine
            if is_finished(task):
                return Ended(task, "finished")
            lines = str(error).strip().splitlines()
            reason = f"job {job.job_id} failed: {lines[-1] if lines else type(error).__name__}"
            write_error(task.folder, reason, str(error))
            return Ended(task, "failed", reason)
        return Ended(task, status, message)

    def stop(self) -> None:
        """Jobs on a cluster go on by themselves."""
        self._jobs.clear()

    def close(self) -> None:
        """Nothing is idle here."""


class ClusterJob:
    """What a job runs; submitted again when its time is over, and then going on from its last checkpoint."""

    def __call__(self, values: dict[str, Any]) -> tuple[Status, str]:
        """Bring one run to its end."""
        return run_cell(Task.from_json(values))

    def checkpoint(self, values: dict[str, Any]) -> Any:
        """What submitit calls shortly before the time is over."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, values)


def _parameters(settings: SlurmSection) -> dict[str, Any]:
    """The section [slurm] in submitit's words."""
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
    """The environment of each worker: its own GPUs, taken in turn where there are fewer than needed.

    Args:
        jobs: how many workers.
        gpus: all that may be used.
        gpus_each: of one worker.

    Example:
        >>> [each["CUDA_VISIBLE_DEVICES"] for each in worker_environments(3, ["0", "1"], 1)]
        ['0', '1', '0']
        >>> [each["CUDA_VISIBLE_DEVICES"] for each in worker_environments(2, ["0", "1", "2", "3"], 2)]
        ['0,1', '2,3']
        >>> worker_environments(1, ["0", "1"], 1)[0]["CUDA_VISIBLE_DEVICES"]
        '0'
    """
    # As the command line does for itself: OpenMP threads that spin while waiting slow each other down.
    common = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | dict(os.environ)
    if "CUDA_VISIBLE_DEVICES" not in common:
        common["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the GPUs are named as nvidia-smi counts them
    if not gpus:
        return [dict(common) for _ in range(jobs)]
    shares = []
    for slot in range(jobs):
        own = [gpus[(slot * gpus_each + i) % len(gpus)] for i in range(gpus_each)]
        shares.append(common | {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))})
    return shares
