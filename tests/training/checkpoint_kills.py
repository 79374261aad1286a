"""Savers that are killed with SIGKILL at random moments, alone and in pairs; a loadable checkpoint must always remain.

Every saver first loads the newest checkpoint and compares it bitwise with the state saved at its step. It then saves
states with different random bits as fast as it can, keeping only the last one. It writes what it found to `found`, one
line per start.

Usage: python checkpoint_kills.py FOLDER KILLS RANKS
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from checkpoint_worker import join
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load, newest_good

MOST_SECONDS_OF_SAVING = 0.15  # a save takes about a tenth of it


def state_of_step(step: int) -> dict[str, Tensor]:
    """Random bits that depend only on the step."""
    generator = torch.Generator().manual_seed(step)
    tensors = {f"model.{i}": torch.randn(37, 11 * i, generator=generator) for i in range(1, 6)}
    return {**tensors, "optimizer.1.step": torch.tensor(float(step))}


def save_until_killed(folder: Path, start: int, rank: int, ranks: int, last: bool) -> None:
    """Check and record the checkpoint of the last saver, then save forever."""
    if ranks > 1:
        join(folder, f"start{start}", rank, ranks)
    tensors = sharded(state_of_step(-1), ranks)
    writer = CheckpointWriter(folder / "checkpoints", keep=1)
    step = 0
    newest = newest_good(folder / "checkpoints", on_skip=lambda message: say(folder, f"start {start}: {message}"))
    if newest is not None:
        step = load(newest, tensors)["step"]
        expected = state_of_step(step)
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, expected[name]), f"step {step}: {name} differs"
    elif start > 0:
        raise AssertionError("no checkpoint was left")
    if rank == 0:
        say(folder, f"start {start}: found step {step}")
    if last:
        return
    while True:
        step += 1
        tensors = sharded(state_of_step(step), ranks)
        writer.save(step, tensors, {"tokens": step}, tables=Tables("1", "1", 37), milestone=False)
        for tensor in tensors.values():
            tensor.zero_()
        if rank == 0:
            (folder / f"start{start}.saving").touch()
        if step == 1:
            writer.wait()
            if rank == 0:
                (folder / "first").touch()


def sharded(tensors: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Matrices sharded unevenly by rows."""
    if ranks == 1:
        return tensors
    mesh = init_device_mesh("cpu", (ranks,))
    return {name: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim == 2 else t for name, t in tensors.items()}


def say(folder: Path, line: str) -> None:
    with (folder / "found").open("a") as file:
        file.write(line + "\n")


def fork_saver(folder: Path, start: int, rank: int, ranks: int, last: bool) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            save_until_killed(folder, start, rank, ranks, last)
        except BaseException:
            say(folder, f"start {start} failed on rank {rank}: {traceback.format_exc()}")
        os._exit(0)
    return pid


def main() -> None:
    folder, kills, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    moments = random.Random(ranks)
    for start in range(kills + 1):
        last = start == kills
        pids = [fork_saver(folder, start, rank, ranks, last) for rank in range(ranks)]
        awaited = [folder / "first", folder / f"start{start}.saving"]
        deadline = time.monotonic() + 20
        while not last and not all(path.exists() for path in awaited) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0 if last else moments.uniform(0, MOST_SECONDS_OF_SAVING))
        for pid in moments.sample(pids, len(pids)):
            if not last:
                os.kill(pid, signal.SIGKILL)
                time.sleep(moments.choice([0, 0.005]))  # the other rank continues alone for a moment
        for pid in pids:
            os.waitpid(pid, 0)
        for path in folder.glob("checkpoints/.*"):
            say(folder, f"start {start}: left {path.name}")


if __name__ == "__main__":
    main()
