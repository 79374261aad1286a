"""The wheel: its contents, and that it runs in a separate environment without the sources.

The environment shares the packages installed here, so nothing is downloaded; only `coupled_adam` must come from the
wheel.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import coupled_adam

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "coupled_adam"
# As `coupled-adam demo`, with less text and fewer and shorter runs.
SHORT_DEMO = [
    *("study", "run", "demo", "--out", "out", "--only", "*/seed-1", "--set", "training.tokens=10240"),
    *("--set", "schedule.warmup=2", "--set", "data.folder=tokens", "--set", "data.source=text:text.txt"),
    *("--set", "data.tokenizer=bpe:300"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [path] = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`coupled-adam` in an environment with the wheel."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    # After pip, which would treat visible packages as installed. Python searches the path in a .pth file but does not
    # read .pth files there, so an editable installation stays invisible.
    (packages / "installed_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "coupled-adam"


def run(command: list[str], folder: Path) -> str:
    """The output of a command, run without the paths of this process."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {f"coupled_adam/{path.relative_to(PACKAGE).as_posix()}" for path in sources}
    assert {Path(name).suffix for name in names} >= {".py", ".toml", ".jinja", ".css", ".js", ".csv", ".typed"}


def test_the_metadata_names_version_licence_and_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [folder] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Version"] == coupled_adam.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "coupled-adam = coupled_adam.cli:main" in entry_points


def test_the_source_distribution_can_be_tested_and_documented(dist: Path) -> None:
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "Makefile constraints.txt mkdocs.yml README.md CONTRIBUTING.md CITATION.cff docs/website/site_hooks.py"
    assert {*wanted.split(), "tests/conftest.py", "notebooks/coupled_adam_in_five_minutes.ipynb"} <= names
    assert not any(name.startswith((".ci/", ".venv/", "site/")) for name in names)


def test_the_installed_command_trains_measures_and_reports_without_the_sources(command: Path, tmp_path: Path) -> None:
    python = str(command.with_name("python"))
    where = run([python, "-c", "import coupled_adam; print(coupled_adam.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(command.parents[1])
    assert run([str(command), "--version"], tmp_path).split() == ["coupled-adam", coupled_adam.__version__]

    lines = [f"the quick brown fox number {n} jumps over the lazy dog and {n * n} others" for n in range(4000)]
    documents = ["\n".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    run([str(command), *SHORT_DEMO], tmp_path)
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    ratios = {result["optimizer"]: result["metrics"]["mu_norm_ratio"] for result in results}
    assert ratios.keys() == {"standard", "coupled"}
    assert ratios["coupled"] < 0.2 < ratios["standard"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert page.rstrip().endswith("</html>")
