"""Files are written as a whole or not at all."""

import os
from pathlib import Path

import pytest

from coupled_adam.base import files as atomic


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    atomic.write_whole(path, "old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or replace(old, new))
    atomic.write_whole(tmp_path / "report.html", "text é\n")
    assert calls == ["fsync", "replace"]
    assert (tmp_path / "report.html").read_bytes() == "text é\n".encode()


def test_a_file_has_the_permissions_of_any_other_whoever_writes_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "usual").write_text("")
    with atomic.replacing(tmp_path / "tables.safetensors") as temporary:
        save_file({"table": torch.ones(2, 2)}, temporary)
    assert (tmp_path / "tables.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
