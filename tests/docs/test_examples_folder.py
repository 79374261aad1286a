"""examples/: each script runs as users run it, trains, and uses only the public interface."""

import ast
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import coupled_adam

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "small.py")

pytestmark = pytest.mark.timeout(200)


def run_as_user(script: str, *arguments: str, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(cwd.iterdir()) == []  # nothing is written
    return done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a script in this process, where torch is already loaded."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(FOLDER)
    yield run
    sys.modules.pop("small", None)


def numbers_after(word: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{word}'?:? '?(\d+\.\d+)", printed)]


def test_the_plain_loop_shows_that_only_adamw_moves_the_mean_embedding(run_here, tmp_path: Path) -> None:
    coupled = run_as_user("plain_loop.py", "--steps", "60", cwd=tmp_path)
    adamw = run_here("plain_loop.py", "--steps", "60", "--adamw")
    for printed in (coupled, adamw):
        first, last = numbers_after("loss", printed)
        assert last < first < 6.8  # a uniform guess among 2000 words has a loss of 7.6
    assert max(numbers_after("ratio", coupled)) < 0.05 < 0.25 < min(numbers_after("ratio", adamw))
    assert re.search(r"head\.weight +\(2000, 64\) +float32 +output +yes", coupled)


def test_muon_and_coupled_adamw_train_together(run_here) -> None:
    printed = run_here("with_muon.py", "--steps", "60")
    first, last = numbers_after("loss", printed)
    assert last < first < 6.8
    assert max(numbers_after("ratio", printed)) < 0.05
    assert len(numbers_after("norm", printed)) == 2
    assert re.search(r"linear1\.weight +\(256, 64\) +2", printed)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_trainer_trains(tmp_path: Path) -> None:
    printed = run_as_user("hf_trainer.py", "--steps", "50", cwd=tmp_path)
    first, second, *_ = numbers_after("loss", printed)
    assert second < first < 7.6
    assert numbers_after("ratio", printed)[0] < 0.05


def test_help_names_the_options(run_here) -> None:
    for script in ("plain_loop.py", "with_muon.py"):
        with pytest.raises(SystemExit) as ended:
            run_here(script, "--help")
        assert ended.value.code == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_only_public_names_are_used(script: str) -> None:
    nodes = list(ast.walk(ast.parse((FOLDER / script).read_text(encoding="utf-8"))))
    ours = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coupled_adam")
    ]
    assert {node.module for node in ours} == {"coupled_adam"}
    assert {alias.name for node in ours for alias in node.names} <= set(coupled_adam.__all__)
    assert not any(
        alias.name.startswith("coupled_adam") for n in nodes if isinstance(n, ast.Import) for alias in n.names
    )


def test_the_readme_of_the_folder_has_a_line_for_each_file() -> None:
    linked = re.findall(r"^\| \[.+\]\((.+?)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(linked) == sorted(path.name for path in FOLDER.glob("*.py"))
