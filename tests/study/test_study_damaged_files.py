"""Leftovers of killed processes, and damaged or hostile files of a study."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fabricated_study import COUPLED, STANDARD, fabricate

from coupled_adam.report.report_writer import write_report
from coupled_adam.report.run_files import curve_of
from coupled_adam.report.study_plans import read_plan
from coupled_adam.study.cell import read_error
from coupled_adam.study.folder import last_row
from coupled_adam.study.results import read_evaluation, read_results

WRITERS = """
import sys, time
from pathlib import Path
from coupled_adam.base.files import replacing
open_files = [replacing(Path(name)) for name in sys.argv[1:]]
for file in open_files:
    file.__enter__()
print("written", flush=True)
time.sleep(60)
"""
NESTED = "[" * 100_000


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return fabricate(
        tmp_path / "study",
        optimizers={"standard": STANDARD, "coupled": COUPLED},
        sizes=(("30M", 1000, 2000),),
        seeds=(1, 2),
    )


def test_the_next_report_removes_only_leftovers_of_a_killed_one(study: Path) -> None:
    files = [study / name for name in ("report.html", "figures/results.pdf", "tables/main.csv")]
    for path in files:
        path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", WRITERS, *map(str, files)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
        assert len(list(study.rglob(".*.tmp"))) == 6
        others = {".mine.tmp", ".notes.html.12a.tmp"}
        for name in others:
            (study / name).write_text("not ours")
            os.utime(study / name, (0, 0))
        young, old = study / ".report.html.1.tmp", study / "figures" / ".results.svg.1.tmp"  # names used by 0.1.0
        young.write_text("")
        old.write_text("")
        os.utime(old, (0, 0))
        processes[0].kill()
        processes[0].wait()
        write_report([study], study)
        left = {path.name for path in study.rglob(".*.tmp")} - others
        assert {path.name for path in study.glob(".*.tmp")} > others
        assert young.name in left
        assert not old.exists()
        ours = left - {young.name}
        assert len(ours) == 3
        assert all(name.endswith(f"-{processes[1].pid}.tmp") for name in ours)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_nested_line_of_metrics_only_removes_its_curve(study: Path, place: str) -> None:
    run = read_results(study)[0].run_folder
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines.insert({"first": 0, "middle": len(lines) // 2, "last": len(lines)}[place], NESTED)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert write_report([study], study).is_file()
    assert bool(curve_of(run, "train", "loss")) == (place == "last")  # like an unfinished last line
    last_row(run)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_pipe_a_device_or_a_folder_in_a_run_does_not_block_the_report(study: Path, kind: str) -> None:
    run = read_results(study)[0].run_folder
    for file in ("evaluation.json", "metrics.jsonl", "embeddings.npz", "error.txt"):
        path = run / file
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
    assert write_report([study], study).is_file()
    assert read_evaluation(run, study) is None
    assert read_error(run) == ""
    assert last_row(run) is None


def changed(study: Path, **changes: object) -> None:
    lines = (study / "results.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | changes)
    (study / "results.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metrics", {"loss": "low"}),
        ("metrics", {"loss": True}),
        ("metrics", {"loss": float("nan")}),
        ("metrics", {"loss": float("inf")}),
        ("metrics", {"loss": 10**400}),
        ("metrics", {"loss": [1.0]}),
        ("seed", True),
        ("seconds", float("nan")),
        ("tokens", 10**400),
        ("run", "/etc"),
        ("run", "../../elsewhere"),
        ("cell", "half a pair \ud83d"),
    ],
)
def test_a_result_with_an_impossible_value_is_refused_with_its_line(study: Path, key: str, value: object) -> None:
    changed(study, **{key: value})
    with pytest.raises(ValueError, match=r"results.jsonl, line 1: ") as caught:
        read_results(study)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("settings", [NESTED + "]" * len(NESTED), '{"a":' * 900 + "1" + "}" * 900])
def test_nested_settings_are_refused(study: Path, settings: str) -> None:
    lines = (study / "results.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"settings": "here"}).replace('"here"', settings)
    (study / "results.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: .*\b100\b"):
        read_results(study)


@pytest.mark.parametrize("content", [f"a = {NESTED}", "a" + ".a" * 20_000 + " = 1", f"a = {'9' * 400}", "\0"])
def test_an_invalid_study_file_is_mentioned_in_the_report(study: Path, content: str) -> None:
    (study / "study.toml").write_text(content)
    assert "study.toml" in read_plan(study, read_results(study)).problem
