"""Several study folders in one report: which runs may be compared, and that the order does not matter."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated_study import COUPLED as COUPLED_SETTINGS
from fabricated_study import STANDARD, fabricate
from study_fake_worker import result_of
from study_runs import ADAMW, COUPLED, write_study

from coupled_adam.config.builtin_files import CONFIG_FILE as CONFIG
from coupled_adam.config.run_config import to_toml
from coupled_adam.config.study_config import load_study, with_override, with_settings
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_writer import write_report
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.study_plans import StudyPlan, read_plans
from coupled_adam.report.verdict import verdict
from coupled_adam.study.cell import Task
from coupled_adam.study.expansion import cells_of, chosen
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.results import Result, merge_results, read_results, to_json, write_evaluation

STORED = Path(__file__).parents[2] / "docs" / "results"
PAIR = ADAMW + COUPLED
CENTRED = '[[optimizers]]\nname = "centred"\nembeddings = "adamw"\ncentre = true\n'
NOT_CHECKED = "not checked"


def run_study(spec: Path | str, out: Path, only: str, *settings: str) -> Path:
    """A study folder as written by `study run SPEC --out OUT --only ONLY --set ...`, without the training."""
    study = with_override(*with_settings(load_study(str(spec)), settings))
    cells = cells_of(study)
    folder = StudyFolder(out)
    folder.require_fit(study, cells)
    folder.prepare(study)
    for cell in chosen(cells, [only]):
        folder.run(cell).mkdir(parents=True)
        (folder.run(cell) / CONFIG).write_text(to_toml(cell.config))
        write_evaluation(result_of(Task(out, study.name, cell, study.evaluation)))
    folder.gather(cells)
    return out


def plans_of(*folders: Path) -> list[StudyPlan]:
    return read_plans(folders, merge_results(folders))


def remove_configs(folder: Path) -> None:
    for path in folder.glob(f"runs/*/*/{CONFIG}"):
        path.unlink()


def change_hashes(folder: Path) -> None:
    """As written by a version of the package with fewer settings."""
    results = [replace(each, config_hash=f"old{each.config_hash[3:]}") for each in read_results(folder)]
    (folder / "results.jsonl").write_text("".join(to_json(each) + "\n" for each in results))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_study(tmp_path, PAIR)


@pytest.mark.parametrize("has_configs", [True, False])
def test_runs_planned_with_other_settings_are_refused_by_name(file: Path, tmp_path: Path, has_configs: bool) -> None:
    first = run_study(file, tmp_path / "a", "*-standard")
    second = run_study(file, tmp_path / "b", "*-coupled", "optimizer.lr=3e-2")
    if not has_configs:
        remove_configs(second)
    for order in ([first, second], [second, first]):
        with pytest.raises(ValueError, match=f"{order[0] / 'study.toml'} ") as error:
            write_report(order, tmp_path / "both")
        lines = str(error.value).splitlines()[1:]
        ran = order[1]
        names = [each.run.removeprefix("runs/") for each in read_results(ran)]
        assert [line.partition(f" in {ran}: ")[0] for line in lines] == names
        if has_configs:
            assert all(line.endswith(": optimizer.lr") for line in lines)
        elif ran == second:
            assert all("instead of" in line for line in lines)
    assert not (tmp_path / "both").exists()
    assert [plan.problem for folder in (first, second) for plan in plans_of(folder)] == ["", ""]


def test_runs_on_another_text_are_refused(file: Path, tmp_path: Path) -> None:
    first = run_study(file, tmp_path / "a", "*-standard")
    second = run_study(file, tmp_path / "b", "*-coupled", "data.folder=elsewhere/novels")
    with pytest.raises(ValueError, match=r"coupled/seed-1 in .*/b: data\.folder\n"):
        plans_of(first, second)


@pytest.mark.parametrize(
    "settings",
    [
        ["data.folder=/mnt/elsewhere/corpus"],  # same name
        ["training.device=cpu", "training.threads=1", "log.every=3", "checkpoints.milestones=2"],
    ],
)
def test_one_study_on_two_machines_is_one_report(file: Path, tmp_path: Path, settings: list[str]) -> None:
    first = run_study(file, tmp_path / "a", "*/seed-1")
    second = run_study(file, tmp_path / "b", "*", *settings)
    for order in ([first, second], [second, first]):
        plans = plans_of(*order)
        assert [plan.problem for plan in plans] == ["", ""]
        assert [plan.unfinished for plan in plans] == [(), ()]
    assert len(merge_results([first, second])) == 4


def test_a_text_with_a_source_may_be_in_any_folder(tmp_path: Path) -> None:
    first = run_study("demo", tmp_path / "a", "*-standard")
    second = run_study("demo", tmp_path / "b", "*-coupled", "data.folder=/mnt/other-name")
    assert [plan.problem for plan in plans_of(first, second)] == ["", ""]


def test_studies_that_share_cells_are_merged(tmp_path: Path) -> None:
    settings = ["data.folder=data/enwiki", "data.source=none"]
    first = run_study("single-gpu", tmp_path / "a", "*", *settings)
    second = run_study("centring", tmp_path / "b", "*-centred/seed-1", *settings)
    third = run_study("untied-heads", tmp_path / "c", "*-untied-*/seed-1", *settings, "checkpoints.milestones=10")
    for order in itertools.permutations([first, second, third]):
        assert [plan.problem for plan in plans_of(*order)] == [""] * 3
    # The stored results have the same settings.
    problems = [plan.problem for plan in plans_of(STORED / "single-gpu", second)]
    assert [NOT_CHECKED in problem for problem in problems] == [False, False]
    other = run_study("centring", tmp_path / "d", "*-centred/seed-1", *settings, "optimizer.lr=1e-4")
    with pytest.raises(ValueError, match=rf"(?s){other}/study\.toml .*standard/seed-1 in {STORED / 'single-gpu'}: "):
        plans_of(STORED / "single-gpu", other)


def test_unverifiable_settings_have_a_note(file: Path, tmp_path: Path) -> None:
    results = merge_results([STORED / "single-gpu", STORED / "centring"])
    problems = [plan.problem for plan in read_plans([STORED / "single-gpu", STORED / "centring"], results)]
    assert all("study.toml is missing" in problem for problem in problems)
    assert [NOT_CHECKED in problem for problem in problems] == [False, True]
    (alone,) = plans_of(STORED / "single-gpu")
    assert NOT_CHECKED not in alone.problem
    first = run_study(file, tmp_path / "a", "*")
    (tmp_path / "other").mkdir()
    unrelated = write_study(tmp_path / "other", CENTRED)
    second = run_study(unrelated, tmp_path / "b", "*")
    assert [NOT_CHECKED in plan.problem for plan in plans_of(first, second)] == [False, True]
    html = write_report([first, second], tmp_path / "both").read_text()
    assert re.search(rf"{second}\b.*{NOT_CHECKED}", html)


def test_folders_connected_by_a_third_one_are_checked(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace(COUPLED, ""))
    first = run_study(file, tmp_path / "a", "*")
    file.write_text(text.replace(ADAMW, ""))
    second = run_study(file, tmp_path / "b", "*")
    assert [NOT_CHECKED in plan.problem for plan in plans_of(first, second)] == [False, True]
    file.write_text(text)
    third = run_study(file, tmp_path / "c", "*/seed-2")
    assert [plan.problem for plan in plans_of(first, second, third)] == [""] * 3


@pytest.mark.parametrize("has_configs", [True, False])
def test_runs_of_an_older_version_are_merged(file: Path, tmp_path: Path, has_configs: bool) -> None:
    first = run_study(file, tmp_path / "a", "*-standard")
    change_hashes(first)
    if not has_configs:
        remove_configs(first)
    second = run_study(file, tmp_path / "b", "*-coupled")
    for order in ([first, second], [second, first]):
        problems = [plan.problem for plan in plans_of(*order)]
        # Their configs, read today, equal those of the study; without configs this cannot be checked.
        assert any(NOT_CHECKED in problem for problem in problems) is not has_configs
    (alone,) = plans_of(first)
    assert alone.problem == ""


def test_an_optimizer_with_one_seed_is_named_if_it_keeps_others_from_being_bold(tmp_path: Path) -> None:
    sizes = (("S", 1000, 4000), ("S", 1000, 8000), ("S", 1000, 9000))
    first = fabricate(tmp_path / "a", sizes=sizes[:2], with_runs=False)
    centred = {"standard, centred": {**STANDARD, "centre": True}}
    # At 9k it is the only one: nothing is compared with it.
    second = fabricate(tmp_path / "b", optimizers=centred, sizes=sizes[1:], seeds=(1,), with_runs=False)
    main = build_tables(gather_grid(merge_results([first, second])))[0]
    assert [row[0].text for row in main.rows if any(cell.bold for cell in row)] == ["4k"]
    assert [note for note in main.notes if note.endswith(": standard, centred at 8k, S.")]
    for folders in ([first], [second]):
        assert not any("8k, S" in note for note in build_tables(gather_grid(merge_results(folders)))[0].notes)


def stored(folder: Path, metrics: dict[str, float | None], **changes: Any) -> Path:
    """A study folder with one result."""
    fabricate(folder, optimizers={"coupled": COUPLED_SETTINGS}, seeds=(1,), with_runs=False)
    row = json.loads((folder / "results.jsonl").read_text()) | {"metrics": metrics} | changes
    (folder / "results.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def merged_both_ways(first: Path, second: Path) -> list[Result]:
    return [merge_results(order)[0] for order in ([first, second], [second, first])]


def test_folders_complete_the_metrics_of_a_common_run(tmp_path: Path) -> None:
    first = stored(tmp_path / "a", {"loss": 3.0, "iso": None, "r_cos": None})
    second = stored(tmp_path / "b", {"loss": 3.0, "iso": 0.9, "lambada": 0.3, "acc": 0.4})
    for found in merged_both_ways(first, second):
        assert found.metrics == {"loss": 3.0, "iso": 0.9, "r_cos": None, "lambada": 0.3, "acc": 0.4}
    assert merge_results([second, first])[0].folder == second


def test_tasks_on_all_documents_and_on_a_few_are_not_mixed(tmp_path: Path) -> None:
    few = {"loss": 3.0, "lambada": 0.9, "piqa": 0.9, "acc": 0.9, "task_limit": 10.0}
    first = stored(tmp_path / "a", {**few, "iso": 0.5})
    second = stored(tmp_path / "b", {"loss": 3.0, "lambada": 0.3, "task_limit": None})
    without = stored(tmp_path / "c", {"loss": 3.0})
    for found in merged_both_ways(first, second):
        assert found.metrics == {"loss": 3.0, "iso": 0.5, "lambada": 0.3, "task_limit": None}
    for found in merged_both_ways(first, without):
        assert found.metrics == {**few, "iso": 0.5}


def test_a_loss_taken_from_another_folder_keeps_its_split(tmp_path: Path) -> None:
    first = stored(tmp_path / "a", {"loss": None})
    second = stored(tmp_path / "b", {"loss": 3.0}, loss_split="val")
    for found in merged_both_ways(first, second):
        assert (found.metrics["loss"], found.loss_split) == (3.0, "val")


@pytest.mark.parametrize(
    "names", [("single-gpu", "untied-heads"), ("single-gpu", "centring"), ("centring", "untied-heads", "single-gpu")]
)
def test_the_order_of_the_folders_changes_nothing(names: tuple[str, ...]) -> None:
    found = []
    for order in itertools.permutations(names):
        results = merge_results([STORED / name for name in order])
        pair = gather_grid(results).main_pair
        assert pair is not None
        assert [each.name for each in pair] == ["standard", "coupled"]
        tables = [[[cell.text for cell in row] for row in table.rows] for table in build_tables(gather_grid(results))]
        found.append((gather_grid(results).variants, verdict(gather_grid(results)), tables))
    assert all(each == found[0] for each in found)


def test_the_plain_optimizer_of_a_kind_comes_first(tmp_path: Path) -> None:
    optimizers = {
        "all": {**COUPLED_SETTINGS, "tied": False, "couple": "all"},
        "untied": {**STANDARD, "tied": False},
        "a centred one": {**STANDARD, "centre": True},
        "input": {**COUPLED_SETTINGS, "tied": False, "couple": "input"},
        "slow": {**STANDARD, "lr": 1e-4},
        "coupled": COUPLED_SETTINGS,
        "standard": STANDARD,
    }
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, seeds=(1,), with_runs=False))
    expected = ["standard", "slow", "a centred one", "untied", "coupled", "input", "all"]
    assert [each.name for each in gather_grid(results).variants] == expected
    assert [row[2].text for row in build_tables(gather_grid(results))[0].rows] == expected
