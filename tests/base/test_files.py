"""Files are written atomically, and an invalid file gives a ValueError that names it."""

import ast
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from coupled_adam.base import files as base_files
from coupled_adam.base.errors import UserError
from coupled_adam.base.files import (
    kind_of_file,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_toml,
    remove_leftover,
    remove_leftovers,
    replacing,
    write_whole,
)
from coupled_adam.base.text import size_text
from special_files import make_special_file


def test_an_interrupted_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda old, new: calls.append("replace") or replace(old, new))
    write_whole(tmp_path / "report.html", "text é\n")
    assert calls == ["fsync", "replace"]
    assert (tmp_path / "report.html").read_bytes() == "text é\n".encode()


def test_a_file_has_the_usual_permissions_whatever_wrote_it(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "usual").write_text("")
    with replacing(tmp_path / "tables.safetensors") as temporary:
        save_file({"table": torch.ones(2, 2)}, temporary)
    assert (tmp_path / "tables.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


HOSTILE_JSON = {
    "nested lists": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "nested, but not too deeply for Python": "[" * 900 + "]" * 900,
    "a number of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "a number that no float can hold": '{"a": [1, {"b": -1' + "0" * 400 + "}]}",
    "cut off": '{"a": 1',
    "nothing": "",
    "two values": "1 2",
    "another encoding": b"\xff\xfe{\x00}\x00",
    "half a character": b'{"a": "\xc3',
}


@pytest.mark.parametrize("content", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_damaged_or_hostile_json_is_a_value_error_that_names_the_file(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    for read in (lambda: parse_json(content, "state.json"), lambda: read_json(path)):
        with pytest.raises(ValueError, match=r"state.json: ") as caught:
            read()
        assert len(str(caught.value)) < 300
        assert not isinstance(caught.value, UnicodeError)


@pytest.mark.parametrize("value", [None, 1, "a", [], {}, {"a": [1.5, True, {"b": None}]}, 2**64, 10**30, -(10**300)])
def test_valid_json_is_read(tmp_path: Path, value: object) -> None:
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(value, indent=indent))
        assert read_json(tmp_path / "a.json") == value
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(value).encode())
    assert read_json(tmp_path / "a.json") == value


def test_a_hundred_levels_are_read_and_one_more_is_not() -> None:
    for begin, end in (("[", "]"), ('{"a":', "}")):
        assert parse_json(begin * 100 + "1" + end * 100, "a.json")
        with pytest.raises(UserError, match=r"^a\.json: .*\b100\b"):
            parse_json(begin * 101 + "1" + end * 101, "a.json")


HOSTILE_TOML = {
    "nested lists": "a = " + "[" * 100_000,
    "nested tables": "a = " + "{a = " * 5000,
    "a long key": "a" + ".a" * 100_000 + " = 1",
    "a long key in quotes": '"a b"' + '. "a b"' * 100_000 + " = 1",
    "a long name of a table": "[" + "a." * 100_000 + "a]",
    "a number of 5000 digits": "a = " + "9" * 5000,
    "a number that no float can hold": "a = 1" + "0" * 400,
    "not TOML": "a = = 1",
    "another encoding": b"\xff\xfea\x00",
}


@pytest.mark.parametrize("content", HOSTILE_TOML.values(), ids=HOSTILE_TOML)
def test_damaged_or_hostile_toml_is_a_value_error_that_names_the_file(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=r"config.toml: ") as caught:
        read_toml(path)
    assert len(str(caught.value)) < 300


def test_toml_with_dots_in_its_text_is_read() -> None:
    text = 'a.b.c = 1\n[d.e]\nf = "' + "...... " * 100 + '"\ng = "' + "one sentence, then another. " * 200 + '"\n'
    assert parse_toml(text, "a.toml")["a"] == {"b": {"c": 1}}


@pytest.mark.parametrize("read", [read_json, read_toml, read_text])
@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_is_not_a_regular_file_is_refused_before_it_is_read(
    tmp_path: Path, read: Callable[[Path], object], kind: str
) -> None:
    path = tmp_path / "a"
    make_special_file(path, kind)
    with pytest.raises(UserError, match=rf"^{path}: .*{kind_of_file(path.stat().st_mode)}"):
        read(path)


def test_a_file_that_is_too_large_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "a.toml").open("wb") as file:
        file.truncate(2**40)  # a sparse file
    for read in (read_toml, read_json):
        with pytest.raises(UserError, match=r"/a\.toml: .* [KMG]B\b"):
            read(tmp_path / "a.toml")


def test_a_missing_file_is_still_a_missing_file(tmp_path: Path) -> None:
    for read in (read_json, read_toml, read_text):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "a")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 KB"),
        (9990, "9.99 KB"),
        (9996, "10.0 KB"),
        (99_960, "100 KB"),
        (999_400, "999 KB"),
        (999_600, "1.00 MB"),
        (24_300_000_000, "24.3 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_a_size_has_a_suitable_unit(size: int, text: str) -> None:
    assert size_text(size) == text


def test_only_old_leftovers_and_those_of_this_process_id_are_removed(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        ours = temporary.name
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    files = {
        ours: True,
        ours.replace(f"-{os.getpid()}.", f"-{gone.pid}."): True,
        ours.replace(f"-{os.getpid()}.", f"-{os.getppid()}."): False,
        f".a.00000000-{gone.pid}.tmp": False,  # from another machine
        f".a.{gone.pid}.tmp": False,  # from version 0.1.0, which did not record the machine
        ".a.tmp": False,
        "a.1.tmp": False,
    }
    for name in files:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert {name: not (tmp_path / name).exists() for name in files} == files
    for name in files:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a", ".a.tmp", "a.1.tmp"}
    remove_leftovers(tmp_path / "missing")


def test_a_leftover_of_any_type_is_removed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").touch()
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("target")
    for name in ("folder", "file", "link", "missing"):
        remove_leftover(tmp_path / name)
    assert {path.name for path in tmp_path.rglob("*")} == {"target", "mine"}


def test_a_leftover_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=rf"/\.config\.toml\.1\.tmp: .*{os.strerror(errno.EACCES)}"):
        remove_leftover(tmp_path / ".config.toml.1.tmp")


def test_a_link_with_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        pass
    (tmp_path / "target").write_text("mine")
    temporary.symlink_to(tmp_path / "target")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "target").read_text() == "mine"


def test_base_imports_only_itself_and_other_packages_only_inside_functions() -> None:
    for path in Path(base_files.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for name in imported(ast.walk(tree)):
            assert name.split(".")[0] != "coupled_adam" or name.startswith("coupled_adam.base"), f"{path.name}: {name}"
        for name in imported(tree.body):
            known = name.split(".")[0] in sys.stdlib_module_names or name.startswith("coupled_adam.base")
            assert known, f"{path.name} imports {name} when it is loaded"


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_a_toml_file_may_have_at_most_a_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    start = "seed = 3\n#"
    path.write_text(start + "x" * (2**20 - len(start)))
    assert read_toml(path) == {"seed": 3}
    path.write_text(start + "x" * (2**20 - len(start) + 1))
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_toml(path)
