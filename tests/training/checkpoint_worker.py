"""Real processes that save and load together: fork the ranks of one scenario after the other.

They are forked after the imports, so seventy processes cost little more than one. The outcome of a rank is a file,
`<scenario>.rank<r>`: "ok" or the traceback.

Usage: python checkpoint_worker.py FOLDER [SCENARIO ...]
"""

import contextlib
import errno
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first DTensor imports it; do it here once instead of in every fork
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from coupled_adam import CoupledAdamW
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load, newest_good
from coupled_adam.training.checkpoint.training_state import Staging, make_optimizer_state, training_tensors

SECONDS_PER_SCENARIO = 40
V, H = 13, 8  # 13 rows are uneven on 2 and on 4 ranks
TABLES = Tables("wte.weight", "wte.weight", V)
PARALLELISMS = ("fsdp2", "ddp")


class Model(nn.Module):
    """A tied table, and a layer of 5 rows: one of 4 ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(V, H)
        self.narrow = nn.Linear(H, 5)
        self.wide = nn.Linear(5, H, bias=False)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        x = x + self.wide(F.gelu(self.narrow(x)))
        return F.cross_entropy(self.lm_head(x), tokens.roll(1))


def trained(parallelism: str, steps: int) -> tuple[nn.Module, CoupledAdamW]:
    """A model after some steps on the same batches on every rank; `training_tensors` exist in any case."""
    model: nn.Module = Model()
    if parallelism == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    wrapped = nn.parallel.DistributedDataParallel(model) if parallelism == "ddp" else model
    optimizer = CoupledAdamW(model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    make_optimizer_state([optimizer])
    for step in range(steps):
        tokens = torch.randint(V, (20,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        wrapped(tokens).backward()
        optimizer.step()
    return model, optimizer


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the full tensors, on every rank."""
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return [name for name in expected if not torch.equal(actual[name], expected[name])]


def save_each_parallelism(folder: Path) -> None:
    """Write checkpoints for loading on other numbers of ranks, and the expected values."""
    ranks = dist.get_world_size()
    for parallelism in PARALLELISMS:
        run = folder / f"{parallelism}-{ranks}"
        model, optimizer = trained(parallelism, steps=3)
        tensors = training_tensors(model, [optimizer])
        writer = CheckpointWriter(run / "checkpoints", keep=2)
        expected = full(tensors)
        writer.save(3, tensors, {"ranks": ranks}, tables=TABLES)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        writer.wait()
        if dist.get_rank() == 0:
            torch.save(expected, run / "expected.pt")
        dist.barrier()


def load_each_parallelism(folder: Path) -> None:
    for run in sorted(folder.glob("*-[124]")):
        expected = torch.load(run / "expected.pt")
        for parallelism in PARALLELISMS:
            model, optimizer = trained(parallelism, steps=0)
            tensors = training_tensors(model, [optimizer])
            torch.manual_seed(1)
            path = newest_good(run / "checkpoints", on_skip=no_skip)
            assert load(path, tensors) == {"step": 3, "ranks": int(run.name[-1])}
            assert differences(full(tensors), expected) == [], f"{run.name} into {parallelism}"
            assert torch.equal(torch.get_rng_state(), expected["rng.cpu"])
            live = training_tensors(model, [optimizer])
            assert differences(full(live), expected) == [], "the model itself was not filled"


def replicated_tensors_are_staged_and_written_once(folder: Path) -> None:
    tensors = {f"model.{i}": torch.full((1000,), float(i)) for i in range(8)}
    writer = CheckpointWriter(folder / "once", keep=1)
    writer.save(1, tensors, {})
    writer.wait()
    copied = Staging().stage(tensors, dist.get_rank(), ranks=2).data
    assert sum(copy.nbytes for copy in copied.values()) == 8 * 4000 / 2, copied.keys()
    written = [path.stat().st_size for path in (folder / "once/step-000000001").glob("*.distcp")]
    assert len(written) == 2, written
    assert all(16_000 < size < 25_000 for size in written), written
    replicated = distribute_tensor(torch.ones(10), init_device_mesh("cpu", (2,)), [Replicate()])
    copied = Staging().stage({"model.w": replicated}, dist.get_rank(), ranks=2).data
    assert len(copied) == (1 if dist.get_rank() == 0 else 0)
    writer.save(2, {"model.w": replicated}, {})
    writer.wait()


def a_full_disk_on_one_rank_is_an_error_on_all(folder: Path) -> None:
    rank = dist.get_rank()
    tensors = {"model.w": distribute_tensor(torch.arange(14.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    writer = CheckpointWriter(folder / "full", keep=2)
    writer.save(1, tensors, {})
    writer.wait()
    fsync = os.fsync
    if rank == 1:
        os.fsync = no_space
    writer.save(2, tensors, {})
    with pytest.raises(OSError, match="step 2") as caught:
        writer.wait()
    assert caught.value.errno == errno.ENOSPC, caught.value
    for part in ("__1_0.distcp", os.strerror(errno.ENOSPC), "step-000000001"):
        assert part in str(caught.value), caught.value
    dist.barrier()
    assert [path.name for path in (folder / "full").iterdir()] == ["step-000000001"]
    dist.barrier()
    os.fsync = fsync
    writer.save(3, tensors, {})
    writer.wait()
    assert newest_good(folder / "full", on_skip=no_skip).name == "step-000000003"


def all_ranks_agree_on_the_newest_good_one(folder: Path) -> None:
    """Damage a file that only one of the ranks hashes, and one that only one of them can see."""
    tensors = {f"model.{i}": torch.full((100 * i,), float(i)) for i in range(1, 9)}
    writer = CheckpointWriter(folder / "agree", keep=3)
    for step in (1, 2, 3):
        writer.save(step, tensors, {})
    writer.wait()
    if dist.get_rank() == 0:
        (path,) = (folder / "agree/step-000000003").glob("__1_*.distcp")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()
    skipped: list[str] = []
    newest = newest_good(folder / "agree", on_skip=skipped.append)
    assert newest.name == "step-000000002", newest
    assert len(skipped) == 1, skipped
    assert "__1_0.distcp" in skipped[0], skipped
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (newest, skipped))
    assert all(one == everyone[0] for one in everyone), everyone


def messages_of_the_writer_do_not_mix_with_training(folder: Path) -> None:
    tensors = {"model.w": torch.zeros(1000)}
    writer = CheckpointWriter(folder / "mix", keep=1)
    for step in range(6):
        writer.save(step, tensors, {})
        for _ in range(20):
            value = torch.ones(100)
            dist.all_reduce(value)
            assert value.eq(dist.get_world_size()).all(), value
        if dist.get_rank() == step % 2:
            time.sleep(0.02)  # the ranks reach their next collective at different times
    writer.wait()
    assert load(newest_good(folder / "mix", on_skip=no_skip), tensors) == {"step": 5}


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_skip(message: str) -> None:
    raise AssertionError(message)


# In this order: earlier scenarios save what later ones load.
SCENARIOS: tuple[tuple[str, Callable[[Path], None], int], ...] = (
    ("save_on_2", save_each_parallelism, 2),
    ("save_on_4", save_each_parallelism, 4),
    ("save_on_1", save_each_parallelism, 1),
    ("load_on_1", load_each_parallelism, 1),
    ("load_on_2", load_each_parallelism, 2),
    ("load_on_4", load_each_parallelism, 4),
    ("written_once", replicated_tensors_are_staged_and_written_once, 2),
    ("full_disk_on_one_rank", a_full_disk_on_one_rank_is_an_error_on_all, 2),
    ("agreement", all_ranks_agree_on_the_newest_good_one, 2),
    ("no_mixing", messages_of_the_writer_do_not_mix_with_training, 2),
)


def join(folder: Path, name: str, rank: int, ranks: int) -> None:
    """Join the process group as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}.store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS_PER_SCENARIO / 2),
    )


def run_rank(name: str, scenario: Callable[[Path], None], folder: Path, rank: int, ranks: int) -> None:
    outcome = "ok"
    try:
        join(folder, name, rank, ranks)
        scenario(folder)
    except BaseException:
        outcome = traceback.format_exc()
    (folder / f"{name}.rank{rank}").write_text(outcome)
    if outcome == "ok":
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # a rank that exits early closes connections on which others may still wait
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    fork = multiprocessing.get_context("fork")
    for name, scenario, ranks in SCENARIOS:
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        children = [fork.Process(target=run_rank, args=(name, scenario, folder, r, ranks)) for r in range(ranks)]
        for child in children:
            child.start()
        deadline = time.monotonic() + SECONDS_PER_SCENARIO
        for child in children:
            child.join(max(0, deadline - time.monotonic()))
            child.kill()


if __name__ == "__main__":
    main()
