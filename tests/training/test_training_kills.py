"""kill -9 at random moments: a run that is resumed each time ends like an uninterrupted one."""

import re
import subprocess
import sys
from pathlib import Path

from small_runs import assert_same_tensors, rows, saved_tensors, write_corpus

WORKER = Path(__file__).with_name("kill_worker.py")


def test_twelve_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    command = [sys.executable, str(WORKER), str(corpus), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"killed 12 times, [23] checkpoints", done.stdout)
    assert rows(tmp_path / "run") == rows(tmp_path / "undisturbed")
    assert_same_tensors(saved_tensors(tmp_path / "run"), saved_tensors(tmp_path / "undisturbed"))
    leftovers = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.startswith(".")]
    assert leftovers == []
