"""Checkpoints of several ranks and of killed processes: real processes, forked by the scripts here."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_worker import SCENARIOS, Model, differences, full
from safetensors.torch import load_file
from small_runs import ENVIRONMENT

from coupled_adam import CoupledAdamW
from coupled_adam.training.checkpoint.save_and_load import load, newest_good
from coupled_adam.training.checkpoint.training_state import make_optimizer_state, training_tensors

HERE = Path(__file__).parent
SECONDS = 200
KILLS = 10  # alone, and as many in pairs
SCRIPTS: dict[str, tuple[object, ...]] = {
    "ranks": ("checkpoint_worker.py",),
    "kills-on-1": ("checkpoint_kills.py", KILLS, 1),
    "kills-on-2": ("checkpoint_kills.py", KILLS, 2),
}

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The outcomes of the scripts, which run at the same time because they mostly wait."""
    folders = {name: tmp_path_factory.mktemp(name) for name in SCRIPTS}
    processes = [start(*SCRIPTS[name], folder=folder) for name, folder in folders.items()]
    deadline = time.monotonic() + SECONDS
    for process in processes:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return folders


def start(script: object, *arguments: object, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / str(script)), str(folder), *map(str, arguments)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, _, ranks in SCENARIOS])
def test_on_several_ranks(folders: dict[str, Path], name: str, ranks: int) -> None:
    outcomes = folders["ranks"]
    for rank in range(ranks):
        file = outcomes / f"{name}.rank{rank}"
        assert file.exists(), f"rank {rank} was killed or never started: {(outcomes / 'log').read_text()[-2000:]}"
        assert file.read_text() == "ok", f"rank {rank}: {file.read_text()}"


@pytest.mark.parametrize("saved", [f"{parallelism}-{ranks}" for parallelism in ("fsdp2", "ddp") for ranks in (1, 2, 4)])
def test_a_checkpoint_of_several_ranks_is_loaded_by_one_plain_process(folders: dict[str, Path], saved: str) -> None:
    outcomes = folders["ranks"]
    expected = torch.load(outcomes / saved / "expected.pt")
    model = Model()
    optimizer = CoupledAdamW(model, lr=1e-2, max_grad_norm=0.5)
    make_optimizer_state([optimizer])
    path = newest_good(outcomes / saved / "checkpoints", on_skip=pytest.fail)
    tensors = training_tensors(model, [optimizer])
    assert load(path, tensors) == {"step": 3, "ranks": int(saved[-1])}
    assert differences(full(tensors), expected) == []
    tables = load_file(path / "tables.safetensors")
    assert torch.equal(tables["wte.weight"], expected["model.wte.weight"])
    assert len(list(path.glob("*.distcp"))) == int(saved[-1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_at_random_moments_lose_nothing(folders: dict[str, Path], ranks: int) -> None:
    folder = folders[f"kills-on-{ranks}"]
    lines = (folder / "found").read_text().splitlines()
    found = [int(line.rpartition(" ")[2]) for line in lines if "found step" in line]
    others = [line for line in lines if "found step" not in line and "left ." not in line]
    assert others == [], "a checkpoint was damaged, wrong or missing"
    assert len(found) == KILLS + 1, (folder / "log").read_text()[-2000:]
    assert found[0] == 0
    assert min(found[1:]) >= 1
    assert found == sorted(found), "a later start found an older checkpoint"
    assert any("left ." in line for line in lines), "no kill came in the middle of a save: too few, or too late"
