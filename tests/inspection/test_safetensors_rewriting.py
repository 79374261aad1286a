"""Rewriting some tensors of a safetensors file, read back by safetensors itself."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.recentring.safetensors_rewriting import rewrite, write_new
from coupled_adam.inspection.safetensors_files import read_header

OLD = {
    "a": torch.arange(3, dtype=torch.bfloat16),  # 6 bytes: the next tensor is not aligned to 4 bytes
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor([True, False, True]),
    "größe": torch.arange(6.0).reshape(2, 3),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(OLD, tmp_path / "old.safetensors", metadata={"format": "pt", "note": "kept"})
    return tmp_path / "old.safetensors"


def test_a_tensor_of_the_same_type_changes_only_its_own_bytes(source: Path, tmp_path: Path) -> None:
    rewrite(source, tmp_path / "new", {"b": torch.full((5,), 7.0, dtype=torch.float64)}, None)
    begin, header = read_header(source)
    start, end = header["b"]["data_offsets"]
    old, new = source.read_bytes(), (tmp_path / "new").read_bytes()
    assert len(old) == len(new)
    assert [place for place in range(len(old)) if old[place] != new[place]] != []
    assert old[: begin + start] == new[: begin + start]
    assert old[begin + end :] == new[begin + end :]
    assert torch.equal(load_file(tmp_path / "new")["b"], torch.full((5,), 7.0, dtype=torch.bfloat16))


def test_other_types_and_new_tensors_are_aligned_for_torch(source: Path, tmp_path: Path) -> None:
    changed = {"b": torch.full((5,), 7.1), "new": torch.full((2, 2), 0.3)}
    rewrite(source, tmp_path / "new", changed, torch.float32, {"note": "changed"})
    found = load_file(tmp_path / "new")
    assert found.keys() == {*OLD, "new"}
    for name, tensor in (OLD | changed).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    begin, header = read_header(tmp_path / "new")
    assert begin % 8 == 0
    for name, tensor in found.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    with safe_open(tmp_path / "new", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "changed"}


def test_a_file_of_one_tensor(tmp_path: Path) -> None:
    write_new(tmp_path / "new", "lm_head.weight", torch.ones(9000, 2, dtype=torch.float64), torch.float16)
    found = load_file(tmp_path / "new")
    assert torch.equal(found["lm_head.weight"], torch.ones(9000, 2, dtype=torch.float16))


def test_a_truncated_file_is_refused(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"old\.safetensors"):
        rewrite(source, tmp_path / "new", {"a": torch.zeros(3)}, None)
