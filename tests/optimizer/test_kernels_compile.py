"""The optimizer's Triton kernels compile for a GPU, on machines that have none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles_for_hopper_with_and_without_a_first_moment(tmp_path: Path) -> None:
    # Kernels are either compiled or interpreted in a process; the tests' own process may interpret them.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = done.stdout.splitlines()
    for kernel in ("_update_kernel", "first_pass_kernel", "advance_first_moment_kernel", "update_rows_kernel"):
        variants = [line for line in compiled if line.startswith(kernel)]
        with_moment = [line for line in variants if "exp_avg_ptr" not in line.split()]
        assert 0 < len(with_moment) < len(variants), done.stdout
