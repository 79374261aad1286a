"""Devices: selection, peak performance, and the settings of the process."""

import ctypes
import sys

import pytest
import torch

from coupled_adam.training import devices


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
        ("cpu", None),
    ],
)
def test_the_peak_is_found_by_the_vendors_name(name: str, teraflops: float | None) -> None:
    assert devices.peak_flops_by_name(name) == (None if teraflops is None else teraflops * 1e12)


def test_a_device_that_is_missing_or_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.pick_device("auto") == devices.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"'cuda'.*'cpu'.*training\.device.*--device"):
        devices.pick_device("cuda")
    with pytest.raises(ValueError, match=r"'tpu'.*'auto', 'cpu'.*'cuda'"):
        devices.pick_device("tpu")


def test_preparing_sets_threads_and_determinism() -> None:
    threads = torch.get_num_threads()
    try:
        devices.prepare_device(torch.device("cpu"), deterministic=True, threads=threads + 1)
        assert torch.get_num_threads() == threads + 1
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        devices.prepare_device(torch.device("cpu"), deterministic=False, threads=threads)
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_is_measured() -> None:
    assert 2**20 < devices.peak_memory(torch.device("cpu")) < 2**40


class FakeLibrary:
    def __init__(self) -> None:
        self.set: dict[int, int] = {}

    def mallopt(self, parameter: int, value: int) -> int:
        self.set[parameter] = value
        return 1


def test_glibc_is_told_to_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    devices.keep_freed_memory()
    # malloc.h: M_TRIM_THRESHOLD -1, M_TOP_PAD -2, M_MMAP_THRESHOLD -3; glibc's defaults are 128 KiB, 128 KiB and 0.
    assert library.set == {-1: 2**30, -2: 2**26, -3: 2**25}


def test_settings_of_the_user_and_other_c_libraries_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    devices.keep_freed_memory()
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    devices.keep_freed_memory()
    assert library.set == {}
