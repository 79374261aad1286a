"""The grid of a report: its cells, sizes and seeds, in any order of the runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fabricated_study import COUPLED, STANDARD, fabricate
from study_fake_worker import result_of
from study_runs import ADAMW, write_study
from study_runs import COUPLED as COUPLED_ENTRY

from coupled_adam.config.study_config import load_study
from coupled_adam.report.contents import Contents, read_report
from coupled_adam.report.grid import gather_grid
from coupled_adam.study.cell import Task
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.results import read_results, write_evaluation

TIED, UNTIED = 2000, 3000


def run_seeds(file: Path, out: Path, seeds: Sequence[int], done: Sequence[int]) -> Path:
    """A study folder with these seeds, those in `done` finished; nothing is trained."""
    study = load_study(str(file)).model_copy(update={"seeds": list(seeds)})
    cells, folder = cells_of(study), StudyFolder(out)
    folder.prepare(study)
    for cell in cells:
        if cell.seed in done:
            folder.run(cell).mkdir(parents=True)
            write_evaluation(result_of(Task(out, study.name, cell, study.evaluation)))
    folder.gather(cells)
    return out


def seeds_column(contents: Contents) -> list[str]:
    table = next(table for table in contents.tables if table.name == "main")
    place = [column.key for column in table.columns].index("seeds")
    return [row[place].text for row in table.rows]


def test_the_seeds_that_several_folders_plan_for_one_cell_are_all_expected(tmp_path: Path) -> None:
    file = write_study(tmp_path, ADAMW + COUPLED_ENTRY)
    first = run_seeds(file, tmp_path / "a", seeds=(1, 2, 3), done=(1, 2))
    second = run_seeds(file, tmp_path / "b", seeds=(4, 5), done=(4,))
    for order in ([first, second], [second, first]):
        contents = read_report(order)
        assert {cell.seeds for cell in contents.grid.cells} == {(1, 2, 3, 4, 5)}
        assert seeds_column(contents) == ["3 of 5", "3 of 5"]


def test_the_runs_of_a_cell_are_sorted_by_seed(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", seeds=(1, 2, 3), with_runs=False))
    grid = gather_grid(results[::-1])
    for size in grid.sizes:
        for variant in grid.variants:
            assert [run.seed for run in grid.runs_of(size, variant)] == [1, 2, 3]
            assert list(grid.values_of(size, variant, "loss")) == [1, 2, 3]


def test_a_cell_without_runs_has_the_parameters_of_models_with_the_same_tying(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "untied": {**COUPLED, "tied": False}}
    sizes = (("S", TIED, 10**6), ("S", TIED, 2 * 10**6))
    found = read_results(fabricate(tmp_path / "s", optimizers=optimizers, sizes=sizes, seeds=(1,), with_runs=False))
    results = [replace(each, parameters=UNTIED if each.optimizer == "untied" else TIED) for each in found]
    tokens = max(each.tokens for each in results)
    there = [each for each in results if (each.tokens, each.optimizer) != (tokens, "untied")]
    (missing,) = [cell for cell in gather_grid(there).cells if not cell.runs]
    assert (missing.variant.name, missing.size.tokens, missing.size.parameters) == ("untied", tokens, UNTIED)


def test_pictures_of_one_size_show_the_size_with_most_optimizers_then_the_largest(tmp_path: Path) -> None:
    sizes = tuple(("S", TIED, count * 10**6) for count in (1, 2, 3))
    results = read_results(fabricate(tmp_path / "s", sizes=sizes, seeds=(1,), with_runs=False))
    assert gather_grid(results).largest_size.tokens == 3 * 10**6
    there = [each for each in results if (each.tokens, each.optimizer) != (3 * 10**6, "coupled")]
    assert len(there) == len(results) - 1
    assert gather_grid(there).largest_size.tokens == 2 * 10**6
