"""Every file format: tables are read unchanged, nothing else is read, and broken files are refused in one line.

Legend: V vocabulary rows, H hidden size.
"""

import contextlib
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from coupled_adam.inspection.file_formats import open_file
from coupled_adam.inspection.model_tables import read_model

V, H = 40, 8
INPUT = np.random.default_rng(0).standard_normal((V, H)).astype(np.float32)
OUTPUT = np.random.default_rng(1).standard_normal((V, H)).astype(np.float32)


def save_npy(path: Path) -> None:
    np.save(path, INPUT)


def save_npz(path: Path) -> None:
    np.savez(path, wte=INPUT, lm_head=OUTPUT, steps=np.arange(3))


def save_safetensors(path: Path) -> None:
    tensors = {"wte.weight": INPUT, "lm_head.weight": OUTPUT, "h.0.attn.weight": np.ones((H, H), np.float32)}
    save_file({name: torch.from_numpy(array) for name, array in tensors.items()}, path)


def save_torch(path: Path) -> None:
    state = {"transformer.wte.weight": torch.from_numpy(INPUT), "lm_head.weight": torch.from_numpy(OUTPUT)}
    torch.save({"model": state, "step": 7, "optimizer": {"state": {0: {"exp_avg": torch.ones(V, H)}}}}, path)


def save_legacy_torch(path: Path) -> None:
    state = {"wte.weight": torch.nn.Parameter(torch.from_numpy(INPUT)), "lm_head.weight": torch.from_numpy(OUTPUT)}
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{i}" for i in range(V)])
    for name, array in {
        "token_embd.weight": INPUT,
        "output.weight": OUTPUT,
        "blk.0.attn_output.weight": OUTPUT,
    }.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FORMATS: dict[str, Callable[[Path], None]] = {
    "a.npy": save_npy,
    "a.npz": save_npz,
    "a.safetensors": save_safetensors,
    "a.pt": save_torch,
    "a.bin": save_legacy_torch,
    "a.gguf": save_gguf,
}


@pytest.mark.parametrize("name", FORMATS)
def test_tables_are_read_unchanged(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)
    model = read_model(str(tmp_path / name))
    expected = [("tied", INPUT)] if name == "a.npy" else [("input", INPUT), ("output", OUTPUT)]
    assert model.tied == (name == "a.npy")
    assert [table.role for table in model.tables] == [role for role, _ in expected]
    for table, (_, array) in zip(model.tables, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(table.matrix), array)
        assert open_file(tmp_path / name).shape(table.name) == (V, H)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.98])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str, share: float) -> None:
    FORMATS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=f"{name}: ") as error:
        read_model(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello, I am a text file\n" * 50)
    with pytest.raises(ValueError, match=rf"^{tmp_path / name}: .*\(.+\)"):
        read_model(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.gguf", "a.pt"])
def test_flipped_bytes_never_raise_an_unexpected_exception(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)
    content = bytearray((tmp_path / name).read_bytes())
    generator = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(content)
        for place in generator.integers(0, min(len(content), 600), 3):
            broken[place] = generator.integers(256)
        (tmp_path / name).write_bytes(broken)
        with contextlib.suppress(ValueError):
            read_model(str(tmp_path / name))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_every_floating_type_is_kept(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    table = torch.from_numpy(INPUT).to(dtype)
    (save_file if name == "a.safetensors" else torch.save)({"wte.weight": table}, tmp_path / name)
    matrix = read_model(str(tmp_path / name)).tables[0].matrix
    assert isinstance(matrix, torch.Tensor)
    assert matrix.dtype == dtype
    assert torch.equal(matrix, table)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.safetensors", lambda path: save_file({"wte.weight": torch.ones(V, H, dtype=torch.int8)}, path)),
        ("a.safetensors", lambda path: save_file({"wte.weight": torch.ones(V, H).to(torch.float8_e4m3fn)}, path)),
        ("a.pt", lambda path: torch.save({"wte.weight": torch.ones(V, H, dtype=torch.uint8)}, path)),
        ("a.pt", lambda path: torch.save({"wte.weight": torch.ones(V, H).to_sparse()}, path)),
        ("a.npy", lambda path: np.save(path, np.ones((V, H), np.complex64))),
        ("a.npz", lambda path: np.savez(path, wte=np.ones((V, H), np.int64))),
    ],
)
def test_types_that_are_not_dense_floats_are_refused(tmp_path: Path, name: str, save: Callable[[Path], None]) -> None:
    save(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: tensor '.*float64, float32, float16, bfloat16"):
        read_model(str(tmp_path / name))


def test_a_type_that_torch_does_not_know_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"wte.weight": {"dtype": "F6_E2M3", "shape": [8, 8], "data_offsets": [0, 48]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(48))
    with pytest.raises(ValueError, match=r"a\.safetensors: tensor 'wte\.weight' .*\bF6_E2M3\b.*float32"):
        read_model(str(tmp_path / "a.safetensors"))


def test_quantised_gguf_tables_are_dequantised(tmp_path: Path) -> None:
    wide = np.random.default_rng(2).standard_normal((V, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quantize(wide, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_model(str(tmp_path / "a.gguf"))
    assert model.tied
    matrix = np.asarray(model.tables[0].matrix)
    assert matrix.shape == (V, 64)
    # Q8_0 rounds to 1/127 of the largest entry of each 32.
    assert np.abs(matrix - wide).max() <= np.abs(wide).max() / 254 * 1.01


def test_a_gguf_header_that_claims_a_huge_array_is_refused_at_once(tmp_path: Path) -> None:
    """The gguf package's reader would try to read 2**60 elements."""
    key = b"general.a"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 4, 2**60)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(100))
    with pytest.raises(ValueError, match=r"a\.gguf: .*GGUF"):
        read_model(str(tmp_path / "a.gguf"))


class RunsOnLoad:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("new_format", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path: Path, new_format: bool) -> None:
    content = {"wte.weight": torch.ones(V, H), "surprise": RunsOnLoad(tmp_path / "ran")}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=new_format)
    with pytest.raises(ValueError, match=r"a\.pt: .*pickle .*\b\w+\.system\b"):
        read_model(str(tmp_path / "a.pt"))
    assert not (tmp_path / "ran").exists()


def test_a_plain_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"surprise": RunsOnLoad(tmp_path / "ran")}))
    with pytest.raises(ValueError, match=r"a\.pt: .*pickle"):
        read_model(str(tmp_path / "a.pt"))
    assert not (tmp_path / "ran").exists()


def test_a_dictionary_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: dict[str, object] = {}
    endless["again"] = endless
    torch.save(endless, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: .*PyTorch .*\(RecursionError"):
        read_model(str(tmp_path / "a.pt"))


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_pickled_objects_in_numpy_files_are_refused_and_do_not_run(tmp_path: Path, name: str) -> None:
    objects: NDArray[np.object_] = np.array([[RunsOnLoad(tmp_path / "ran")]], dtype=object)
    (np.save if name == "a.npy" else np.savez)(tmp_path / name, objects, allow_pickle=True)
    with pytest.raises(ValueError, match=f"{name}: "):
        read_model(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_only_the_tables_of_a_huge_safetensors_file_are_read(tmp_path: Path) -> None:
    """The file has 64 GiB of sparse other weights; reading them would show in this process's memory."""
    rest = 2**36
    table = INPUT.tobytes()
    header = json.dumps(
        {
            "layers.0.weight": {"dtype": "F32", "shape": [2**18, 2**16], "data_offsets": [0, rest]},
            "wte.weight": {"dtype": "F32", "shape": [V, H], "data_offsets": [rest, rest + len(table)]},
        }
    ).encode()
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(rest, os.SEEK_CUR)
        file.write(table)
    before = resident_bytes()
    model = read_model(str(tmp_path / "a.safetensors"))
    np.testing.assert_array_equal(np.asarray(model.tables[0].matrix), INPUT)
    assert resident_bytes() - before < 2**26


def test_a_huge_npy_file_is_mapped_into_memory(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (2**20, 2**12))  # 16 GiB, sparse
    before = resident_bytes()
    model = read_model(str(tmp_path / "a.npy"))
    assert resident_bytes() - before < 2**26
    assert model.tables[0].matrix.shape == (2**20, 2**12)


def test_only_the_tables_of_a_large_pytorch_file_are_read(tmp_path: Path) -> None:
    torch.save({"wte.weight": torch.from_numpy(INPUT), "rest": torch.zeros(2**15, 2**11)}, tmp_path / "a.pt")
    open_file(tmp_path / "a.pt")  # loads modules of torch
    before = resident_bytes()
    stored = open_file(tmp_path / "a.pt")
    np.testing.assert_array_equal(np.asarray(stored.read("wte.weight")), INPUT)
    assert resident_bytes() - before < 2**26  # the rest has 2**28 bytes


def test_only_the_named_member_of_an_npz_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_npz(tmp_path / "a.npz")
    read = []
    original = np.lib.format.read_array
    monkeypatch.setattr(np.lib.format, "read_array", lambda file, **options: read.append(file.name) or original(file))
    np.testing.assert_array_equal(read_model(str(tmp_path / "a.npz"), "lm_head").tables[0].matrix, OUTPUT)
    assert "steps.npy" not in read


def test_only_the_tables_of_a_gguf_file_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coupled_adam.inspection import gguf_files

    save_gguf(tmp_path / "a.gguf")
    calls = []
    original = gguf_files.dequantize
    monkeypatch.setattr(gguf_files, "dequantize", lambda *arguments: calls.append(1) or original(*arguments))
    read_model(str(tmp_path / "a.gguf"))
    assert len(calls) == 2


def test_arrays_of_the_other_byte_order_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", INPUT.astype(">f4"))
    matrix = read_model(str(tmp_path / "a.npy")).tables[0].matrix
    assert isinstance(matrix, np.ndarray)
    assert matrix.dtype.isnative
    np.testing.assert_array_equal(matrix, INPUT)


def test_a_missing_gguf_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    save_gguf(tmp_path / "a.gguf")
    monkeypatch.delitem(sys.modules, "coupled_adam.inspection.gguf_files", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install .*\[gguf\]'"):
        open_file(tmp_path / "a.gguf")


def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(ValueError, match=r"a\.txt: .*\.safetensors.*\.gguf"):
        open_file(tmp_path / "a.txt")


def test_an_npz_file_without_arrays_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    with pytest.raises(ValueError, match=r"a\.npz: .*2-D.*\bno tensor$"):
        read_model(str(tmp_path / "a.npz"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
