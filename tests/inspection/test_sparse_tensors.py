"""PyTorch files with a sparse tensor beside the embeddings."""

from pathlib import Path

import pytest
import torch

from coupled_adam.inspection.torch_files import open_torch


def test_a_dense_table_beside_a_sparse_tensor_is_read(tmp_path: Path) -> None:
    table = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    torch.save({"wte.weight": table, "mask": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    stored = open_torch(tmp_path / "a.pt")
    assert sorted(stored.names) == ["mask", "wte.weight"]
    assert torch.equal(stored.read("wte.weight"), table)
    with pytest.raises(ValueError, match=r"a\.pt: tensor 'mask'.*sparse"):
        stored.read("mask")
