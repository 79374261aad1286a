"""Settings that must be in place before torch is imported."""

import importlib.util
import os
from pathlib import Path

# Two OpenMP threads that spin while waiting can be 20 times slower beside one other busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen when triton is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from coupled_adam.base.cpu import limit_instructions

limit_instructions()  # otherwise bfloat16 products kill the test process on some machines

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # A property test fails because of what it finds, not because the machine is busy.
    settings.register_profile("coupled-adam", deadline=None)
    settings.load_profile("coupled-adam")

# Fixtures hold no doctests, and two conftest.py collected for them would clash when folders are named one by one.
collect_ignore_glob = ["**/conftest.py"]


# Files that take long come first, so that no worker waits for the last of them at the end.
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
