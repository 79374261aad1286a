"""Settings that must be in place before torch is imported."""

import os
from pathlib import Path

# Two OpenMP threads that spin while waiting can be 20 times slower if another process is busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Without a GPU, Triton kernels run in Triton's interpreter, which is selected when triton is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from coupled_adam.base.cpu import limit_instructions

limit_instructions()  # otherwise bfloat16 products kill the test process on some machines

# Fixtures have no doctests, and collecting two conftest.py for them would clash when folders are passed separately.
collect_ignore_glob = ["**/conftest.py"]


# Slow files come first, so that no worker is idle while the last one runs.
SLOW_FILES = (
    "test_distributed.py",
    "test_study_runner.py",
    "test_study_selection.py",
    "test_training_kills.py",
    "test_training_parallel.py",
    "test_data_prepare.py",
    "test_family_parallel.py",
    "test_notebook.py",
    "test_site.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SLOW_FILES.index(item.path.name) if item.path.name in SLOW_FILES else len(SLOW_FILES))
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
