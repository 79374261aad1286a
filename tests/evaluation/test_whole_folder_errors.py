"""Errors name a folder by the user's path, never by its temporary name."""

import errno
from pathlib import Path

import pytest

from coupled_adam.base.errors import UserOSError, as_user_error
from coupled_adam.evaluation.whole_folder import replacing_folder


def test_an_error_of_the_system_names_the_file_in_the_target(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError, match="No space left") as caught, replacing_folder(target) as temporary:
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary / "config.json"))
    assert caught.value.filename == str(target / "config.json")
    assert str(as_user_error(caught.value)).startswith(f"{target / 'config.json'}: ")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_ours_names_the_file_in_the_target(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(UserOSError) as caught, replacing_folder(target) as temporary:
        raise UserOSError(f"{temporary / 'model.safetensors'}: cannot be written")
    assert str(caught.value).startswith(f"{target / 'model.safetensors'}: ")
    assert ".tmp" not in str(caught.value)


def test_an_error_without_a_file_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input") as caught, replacing_folder(tmp_path / "model"):
        raise OSError(errno.EIO, "Input/output error")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, None)
