"""Two small checkpoints that tests damage, and their contents."""

from pathlib import Path

import torch
from torch import Tensor

from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, Tables, load

FILES = ["__0_0.distcp", ".metadata", "tables.safetensors", "state.json"]
TABLES = Tables("wte.weight", "wte.weight", 13)


def state_of_step(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"model.wte.weight": torch.randn(13, 8, generator=generator), "model.w": torch.full((500,), float(step))}


def assert_loads(path: Path | None, step: int) -> None:
    assert path is not None
    assert path.name == f"step-{step:09d}"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_of_step(step).items()}
    assert load(path, tensors)["step"] == step
    for name, tensor in state_of_step(step).items():
        assert torch.equal(tensors[name], tensor), name


def write_two_checkpoints(folder: Path) -> None:
    """Write checkpoints of steps 1 and 2."""
    writer = CheckpointWriter(folder, keep=2)
    for step in (1, 2):
        writer.save(step, state_of_step(step), {"tokens": 12345}, tables=TABLES)
    writer.wait()
    assert sorted(path.name for path in (folder / "step-000000002").iterdir()) == sorted(FILES)
