"""Settings that must be in place before torch is imported."""

import gc
import importlib.util
import os
from pathlib import Path

# Two OpenMP threads that spin while waiting can be 20 times slower if another process is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# The workers of pytest-xdist share the cores. More threads than cores wait for each other in every operation.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))
# Without a GPU, Triton kernels run in Triton's interpreter, which is selected when triton is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from coupled_adam.base.cpu import limit_instructions
from triton_interpreter import remember_builtins

limit_instructions()  # otherwise bfloat16 products kill the test process on some machines

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # A property test fails because of what it finds, not because the machine is busy.
    settings.register_profile("coupled-adam", deadline=None)
    settings.load_profile("coupled-adam")

# Fixtures have no doctests, and collecting two conftest.py for them would clash when folders are passed separately.
collect_ignore_glob = ["**/conftest.py"]


# Slow files come first, so that no worker is idle while the last one runs.
SLOW_FILES = (
    "test_distributed.py",
    "test_study_runner.py",
    "test_study_selection.py",
    "test_training_parallel.py",
    "test_family.py",
    "test_checkpoint_processes.py",
    "test_study_command.py",
    "test_muon_page.py",
    "test_train_command.py",
    "test_wheel.py",
    "test_notebook.py",
    "test_site.py",
    "test_training_kills.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOW_FILES.index(item.path.name) if item.path.name in SLOW_FILES else len(SLOW_FILES))
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        remember_builtins()
    gc.freeze()  # all that was imported; else every collection of garbage walks through it
