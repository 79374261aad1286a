"""Unusual, damaged or hostile files: read correctly, or refused in one line that names them.

Legend: V vocabulary rows, H hidden size.
"""

import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coupled_adam.inspection.model_tables import read_model
from coupled_adam.tables_file import write_tables

V, H = 40, 8
TABLE = np.random.default_rng(0).standard_normal((V, H)).astype(np.float32)


def save(path: Path, content: object = None, **options: Any) -> None:
    torch.save({"wte.weight": torch.from_numpy(TABLE)} if content is None else content, path, **options)


def repacked(path: Path, compression: int = zipfile.ZIP_STORED, **changes: bytes) -> None:
    """The same zip file with other contents of some records, selected by the end of their names."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, changes.get(name.rpartition("/")[2], content))


def only_table(path: Path) -> NDArray[Any]:
    (table,) = read_model(str(path)).tables
    return np.asarray(table.matrix)


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError, match=path.name) as caught:
        read_model(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for part in parts:
        assert part in message


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_numbers_of_the_other_byte_order_are_read(tmp_path: Path, compression: int) -> None:
    """In a separate process, because it once crashed with a segmentation fault."""
    save(tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", compression, byteorder=b"big", **{"0": TABLE.astype(">f4").tobytes()})
    script = (
        "import sys, numpy as np; from coupled_adam.inspection.model_tables import read_model\n"
        "np.save(sys.argv[2], np.asarray(read_model(sys.argv[1]).tables[0].matrix))"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.pt", tmp_path / "read.npy"], check=True, timeout=100)
    np.testing.assert_array_equal(np.load(tmp_path / "read.npy"), TABLE)


def test_a_byte_order_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", byteorder=b"middle")
    assert_refused(tmp_path / "a.pt", "PyTorch")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_records_give_the_same_numbers_or_are_refused(tmp_path: Path, compression: int) -> None:
    # So compressible, and followed by so much data, that a naive length check would pass.
    smooth = np.repeat(np.arange(V, dtype=np.float32), H).reshape(V, H)
    save(tmp_path / "a.pt", {"wte.weight": torch.from_numpy(smooth), "other": torch.randn(10_000)})
    repacked(tmp_path / "a.pt", compression)
    if compression == zipfile.ZIP_DEFLATED:
        np.testing.assert_array_equal(only_table(tmp_path / "a.pt"), smooth)
    else:  # torch supports neither
        assert_refused(tmp_path / "a.pt")


@pytest.mark.parametrize("size", [V * H * 4 - 4, V * H * 4 + 4, 0])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_record_that_is_longer_or_shorter_than_its_tensor_is_refused(
    tmp_path: Path, size: int, compression: int
) -> None:
    save(tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", compression, **{"0": bytes(size)})
    assert_refused(tmp_path / "a.pt", "'wte.weight'", str(size))


def test_a_file_of_the_old_format_followed_by_a_zip_file_is_read_as_by_torch(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    save(tmp_path / "b.pt", {"wte.weight": torch.zeros(3, 3)})
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes() + (tmp_path / "b.pt").read_bytes())
    np.testing.assert_array_equal(only_table(tmp_path / "a.pt"), TABLE)


@pytest.mark.parametrize("shape", [(2**40, H), (V, 2**40), (2**31, 2**31), (2**62, 2**62)])
@pytest.mark.parametrize("new_format", [True, False])
def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path, shape: tuple[int, int], new_format: bool) -> None:
    """With a stride of 0, a few bytes can represent any number of rows."""
    save(tmp_path / "a.pt", {"wte.weight": torch.zeros(1, 1).expand(4, 4)}, _use_new_zipfile_serialization=new_format)
    content = (tmp_path / "a.pt").read_bytes()
    small = b"K\x04K\x04\x86"  # (4, 4) in a pickle

    def whole(number: int) -> bytes:
        digits = pickle.encode_long(number)
        return b"\x8a" + bytes([len(digits)]) + digits

    assert content.count(small) == 1
    large = whole(shape[0]) + whole(shape[1]) + b"\x86"
    if new_format:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            program = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        repacked(tmp_path / "a.pt", **{"data.pkl": program.replace(small, large)})
    else:
        (tmp_path / "a.pt").write_bytes(content.replace(small, large))
    assert_refused(tmp_path / "a.pt")


def test_a_shape_without_its_stride_is_refused_in_one_line_and_torch_logs_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", {"wte.weight": torch.zeros(3)})
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        program = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert program.count(b"K\x03\x85") == 1  # (3,)
    repacked(tmp_path / "a.pt", **{"data.pkl": program.replace(b"K\x03\x85", b")")})
    command = [sys.executable, "-m", "coupled_adam", "inspect", str(tmp_path / "a.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_negated_view_keeps_its_sign(tmp_path: Path) -> None:
    negated = torch._neg_view(torch.from_numpy(TABLE))
    save(tmp_path / "a.pt", {"wte.weight": negated})
    np.testing.assert_array_equal(only_table(tmp_path / "a.pt"), -TABLE)


def write_safetensors(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [V, H], "data_offsets": [0, V * H * 4], **changes}


def test_a_safetensors_header_without_metadata_may_say_null(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": None, "wte.weight": entry()}).encode()
    write_safetensors(tmp_path / "a.safetensors", header, TABLE.tobytes())
    np.testing.assert_array_equal(only_table(tmp_path / "a.safetensors"), TABLE)


@pytest.mark.parametrize(
    "second",
    [
        entry(data_offsets=[0, 2**40]),
        entry(shape=[2**40, 2**40]),
        entry(shape=[V, H + 1]),
        entry(data_offsets=[V * H * 4, 0]),
        entry(data_offsets=[-8, V * H * 4 - 8]),
    ],
)
def test_a_duplicate_safetensors_entry_is_not_trusted(tmp_path: Path, second: dict[str, object]) -> None:
    for both in ((entry(), second), (second, entry())):
        header = "{" + ", ".join(f'"wte.weight": {json.dumps(each)}' for each in both) + "}"
        write_safetensors(tmp_path / "a.safetensors", header.encode(), TABLE.tobytes())
        with contextlib.suppress(ValueError):  # refusing is fine too; a crash or other numbers are not
            np.testing.assert_array_equal(only_table(tmp_path / "a.safetensors"), TABLE)


def test_a_safetensors_header_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    nested = b'{"wte.weight": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    write_safetensors(tmp_path / "a.safetensors", nested, TABLE.tobytes())
    assert_refused(tmp_path / "a.safetensors")


@pytest.mark.parametrize("size", ["41", str(2**62), "9" * 5000, "-1", "4e1", "\u0663"])
def test_a_vocabulary_of_more_rows_than_the_table_has_is_refused(tmp_path: Path, size: str) -> None:
    path = tmp_path / "tables.safetensors"
    write_tables(path, {"wte": torch.from_numpy(TABLE)}, input="wte", output="wte", vocabulary_size=V)
    metadata = {"input": "wte", "output": "wte", "tied": "true", "vocabulary_size": size}
    header = json.dumps({"__metadata__": metadata, "wte": entry()}, ensure_ascii=False).encode()
    write_safetensors(path, header, TABLE.tobytes())
    with pytest.raises(ValueError, match=rf"tables\.safetensors: vocabulary_size .*{size}"):
        read_model(str(path))


def test_a_gguf_file_of_nested_arrays_is_refused(tmp_path: Path) -> None:
    key = b"general.a"
    nested = struct.pack("<IQ", 9, 1) * 5000  # an array of one array of one array ...
    field = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + nested + struct.pack("<IQI", 4, 1, 7)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(100))
    assert_refused(tmp_path / "a.gguf", "GGUF")


@pytest.mark.parametrize("sizes", [(2**32, 2**32), (2**63, 2), (8, 2**40)])
def test_a_gguf_tensor_larger_than_its_file_is_refused(tmp_path: Path, sizes: tuple[int, int]) -> None:
    name = b"token_embd.weight"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, *sizes, 0, 0)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + bytes(4096))
    assert_refused(tmp_path / "a.gguf")


def with_version_3(array: NDArray[Any]) -> bytes:
    """numpy's format version 3.0: a UTF-8 header with a four-byte length."""
    header = repr({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}).encode() + b"\n"
    return b"\x93NUMPY\x03\x00" + struct.pack("<I", len(header)) + header + array.tobytes()


@pytest.mark.parametrize("name", ["wte.npy", "a.npz"])
def test_version_3_of_the_numpy_format_is_read(tmp_path: Path, name: str) -> None:
    if name == "wte.npy":
        (tmp_path / name).write_bytes(with_version_3(TABLE))
    else:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("wte.npy", with_version_3(TABLE))
    np.testing.assert_array_equal(only_table(tmp_path / name), TABLE)


@pytest.mark.parametrize("name", ["wte.npy", "a.npz"])
def test_columns_with_names_and_later_versions_are_refused(tmp_path: Path, name: str) -> None:
    columns = np.zeros(3, [("幅", np.float32), ("高さ", np.float32)])
    later = with_version_3(TABLE).replace(b"NUMPY\x03", b"NUMPY\x04")
    plain = io.BytesIO()
    with pytest.warns(UserWarning, match=r"format 3\.0"):
        np.lib.format.write_array(plain, columns, version=None)
    for content in (plain.getvalue(), later):
        if name == "wte.npy":
            (tmp_path / name).write_bytes(content)
        else:
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr("wte.npy", content)
        assert_refused(tmp_path / name)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".gguf"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_not_a_regular_file_is_refused_before_it_is_read(tmp_path: Path, suffix: str, kind: str) -> None:
    path = tmp_path / f"a{suffix}"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert_refused(path, "regular file")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "\xff", "[" + "9" * 5000 + "]"])
def test_an_invalid_json_file_of_a_model_is_refused(tmp_path: Path, file: str, content: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", json.dumps({"wte.weight": entry()}).encode(), TABLE.tobytes())
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=file):
        read_model(str(tmp_path))
