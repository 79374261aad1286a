"""A CPU that reports AMX but forbids it, simulated by a flags file and a child that dies like oneDNN."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coupled_adam.base import cpu

AMX = "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n"
# oneDNN then runs an instruction that is reported but forbidden.
DIES = """
import os, signal
if os.environ["ONEDNN_MAX_CPU_ISA"] not in {permitted!r}:
    os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that reports AMX, with a cache folder; returns a log of the child processes."""
    flags = tmp_path / "cpuinfo"
    flags.write_text("processor\t: 0\n" + AMX + "processor\t: 1\n" + AMX)
    log = tmp_path / "children"
    log.touch()
    monkeypatch.setattr(cpu, "CPUINFO", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Set first, so that monkeypatch removes the function's value at the end.
    monkeypatch.setenv(cpu.VARIABLE, "")
    monkeypatch.delenv(cpu.VARIABLE)
    return log


def _permit(monkeypatch: pytest.MonkeyPatch, log: Path, *permitted: str) -> None:
    count = f"open({str(log)!r}, 'a').write('.')\n"
    monkeypatch.setattr(cpu, "PRODUCT", count + DIES.format(permitted=permitted))


def test_forbidden_amx_limits_onednn_and_is_reported_once(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _permit(monkeypatch, sandbox, "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
    note = cpu.limit_instructions()
    assert note is not None
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in note
    assert os.environ[cpu.VARIABLE] == "AVX512_CORE_BF16"
    assert len(sandbox.read_text()) == 2  # all instructions, then without AMX

    monkeypatch.delenv(cpu.VARIABLE)  # the next command
    assert cpu.limit_instructions() is None
    assert os.environ[cpu.VARIABLE] == "AVX512_CORE_BF16"
    assert len(sandbox.read_text()) == 2


def test_permitted_amx_is_used_and_remembered(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _permit(monkeypatch, sandbox, *cpu.INSTRUCTION_SETS)
    assert cpu.limit_instructions() is None
    assert cpu.limit_instructions() is None
    assert cpu.VARIABLE not in os.environ
    assert len(sandbox.read_text()) == 1


def test_older_instructions_are_tried_in_turn(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _permit(monkeypatch, sandbox, "AVX2")
    cpu.limit_instructions()
    assert os.environ[cpu.VARIABLE] == "AVX2"


def test_a_choice_of_the_user_is_kept(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _permit(monkeypatch, sandbox, "AVX2")
    monkeypatch.setenv(cpu.VARIABLE, "AVX512_CORE")
    assert cpu.limit_instructions() is None
    assert os.environ[cpu.VARIABLE] == "AVX512_CORE"
    assert sandbox.read_text() == ""


@pytest.mark.parametrize("flags", ["flags\t\t: fpu avx2 avx512f avx512_bf16\n", ""])
def test_a_cpu_without_amx_starts_no_process(sandbox: Path, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    _permit(monkeypatch, sandbox, "AVX2")
    cpu.CPUINFO.write_text(flags)
    assert cpu.limit_instructions() is None
    cpu.CPUINFO.unlink()  # macOS, Windows
    assert cpu.limit_instructions() is None
    assert cpu.VARIABLE not in os.environ
    assert sandbox.read_text() == ""


@pytest.mark.parametrize("content", ["", "[]", '{"instructions": "MMX"}', '{"instructions": ["AVX2"]}', "\udcff"])
def test_a_damaged_cache_is_rebuilt(sandbox: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    _permit(monkeypatch, sandbox, "AVX2")
    cpu.limit_instructions()
    (remembered,) = (sandbox.parent / "cache").rglob("*.json")
    assert json.loads(remembered.read_text()) == {"instructions": "AVX2"}
    remembered.write_bytes(content.encode(errors="surrogateescape"))
    monkeypatch.delenv(cpu.VARIABLE)
    cpu.limit_instructions()
    assert os.environ[cpu.VARIABLE] == "AVX2"


def test_without_a_cache_folder_it_only_takes_longer(sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sandbox.parent / "cache").write_text("a file where a folder should be")
    _permit(monkeypatch, sandbox, "AVX2")
    assert cpu.limit_instructions() is not None
    assert os.environ[cpu.VARIABLE] == "AVX2"


def test_a_user_without_a_home_folder_is_supported(
    sandbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    _permit(monkeypatch, sandbox, "AVX2")
    assert cpu.limit_instructions() is not None
    assert os.environ[cpu.VARIABLE] == "AVX2"
    assert set(tmp_path.iterdir()) == before  # no folder called "~"


def test_the_probe_products_run_in_this_torch() -> None:
    subprocess.run([sys.executable, "-c", cpu.PRODUCT], check=True, timeout=120)


def test_onednn_reads_the_limit_after_torch_is_loaded() -> None:
    """This also helps a script that imports torch first and trains later."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 on this CPU")
    product = "a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    script = f"import os, torch; os.environ['ONEDNN_MAX_CPU_ISA'] = 'SSE41'; {product}"
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    environment.pop(cpu.VARIABLE, None)
    used = []
    for code in (f"import torch; {product}", script):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        used.append("exec,cpu,matmul" in done.stdout)
    assert used == [True, False]


COMMAND_LINE = """
import os, signal, sys
from pathlib import Path
from coupled_adam.base import cpu
from coupled_adam import cli

cpu.CPUINFO = Path(sys.argv.pop(1))
cpu.PRODUCT = {product!r}
assert "torch" not in sys.modules

class Dies:
    # torch on such a machine: loading it is harmless, a bfloat16 product is not.
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_BF16":
            os.kill(os.getpid(), signal.SIGILL)

sys.meta_path.insert(0, Dies())
cli.main()
"""


def test_bf16_training_by_command_works_if_amx_is_forbidden(sandbox: Path, tmp_path: Path) -> None:
    script = COMMAND_LINE.format(product=DIES.format(permitted=("AVX512_CORE_BF16",)))
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for split in ("train", "val"):
        (tokens / f"{split}.bin").write_bytes((np.arange(2000, dtype=np.uint16) % 60).tobytes())
    settings = {
        "training.precision": "bf16",
        "training.device": "cpu",
        "training.tokens": 1024,
        "training.batch_size": 8,
        "schedule.warmup": 1,
        "model.vocabulary_size": 50304,  # of GPT-2, which is assumed for a folder without a manifest
        "data.source": "none",
        "data.folder": tokens,
    }
    command = [sys.executable, "-c", script, str(cpu.CPUINFO), "train", "tiny", "--out", str(tmp_path / "run")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    environment = {name: value for name, value in os.environ.items() if name != cpu.VARIABLE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Note: ") == 1
    assert "ONEDNN_MAX_CPU_ISA" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
