"""The notes under a table stay short when many cells are merged, and still name what is missing."""

import re
from pathlib import Path

from fabricated_study import COUPLED, STANDARD, fabricate, sgd

from coupled_adam.config.study_sections import ReportSection
from coupled_adam.metrics import ACCURACY
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_model import ReportTable
from coupled_adam.study.results import merge_results, read_results

SIZES = tuple(("S", 1000, 1000 * n) for n in range(2, 8))


def note_of(table: ReportTable, words: str) -> str:
    (found,) = (note for note in table.notes if words in note)
    return found


def merged(
    folder: Path, one_seed: dict[str, dict[str, object]], sizes: tuple[tuple[str, int, int], ...]
) -> ReportTable:
    """Three seeds of the pair with accuracies, and one seed of others without."""
    metrics = ("loss", "iso", "acc")
    pair = {"standard": STANDARD, "coupled": COUPLED}
    first = fabricate(folder / "a", optimizers=pair, sizes=sizes, metrics=metrics, with_runs=False)
    second = fabricate(
        folder / "b", optimizers=one_seed, sizes=sizes, seeds=(1,), metrics=("loss", "iso"), with_runs=False
    )
    return build_tables(gather_grid(merge_results([first, second])))[0]


def test_up_to_four_cells_are_named_one_by_one(tmp_path: Path) -> None:
    table = merged(tmp_path, {"sgd f=1": sgd(1), "sgd f=2": sgd(2)}, SIZES[:2])
    cells = "; ".join(f"sgd f={f} at {d}, S" for d in ("2k", "3k") for f in (1, 2)) + "."
    assert note_of(table, "one seed").endswith(f": {cells}")
    assert note_of(table, ACCURACY.heading).endswith(f": {cells}")


def test_with_more_cells_each_optimizer_is_named_once(tmp_path: Path) -> None:
    table = merged(tmp_path, {"sgd f=1": sgd(1), "sgd f=2": sgd(2)}, SIZES)
    for words in ("one seed", ACCURACY.heading):
        assert re.search(r": sgd f=1 \(6 sizes\); sgd f=2 \(6 sizes\)\.$", note_of(table, words))


def test_with_more_optimizers_only_their_number_is_given(tmp_path: Path) -> None:
    table = merged(tmp_path, {f"sgd f={f}": sgd(f) for f in range(1, 6)}, SIZES[:3])
    for words in ("one seed", ACCURACY.heading):
        assert note_of(table, words).endswith(": 15 cells of 5 optimizers.")


def test_columns_missing_in_other_cells_have_separate_notes(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "a", sizes=SIZES, metrics=("loss", "iso", "acc"), with_runs=False)
    results = merge_results([folder])
    for result in results:
        if result.optimizer == "coupled":
            del result.metrics["acc" if result.tokens < 7000 else "iso"]
        elif result.tokens > 2000 and result.seed == 1:
            result.metrics["iso"] = None
    table = build_tables(gather_grid(results))[0]
    assert note_of(table, ACCURACY.heading).endswith(": coupled (5 sizes).")
    assert re.search(r": standard \(5 sizes\); coupled \(1 size\)\.$", note_of(table, "ISO (↑)"))


def test_the_study_note_about_its_loss_is_below_every_table_with_a_loss(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", metrics=("loss", "val_loss", "iso"), with_runs=False))
    note = "This corpus is so small that the loss says little."
    tables = build_tables(gather_grid(results), ReportSection(loss_note=note))
    noted = {table.name for table in tables if note in table.notes}
    assert {"main", "comparisons"} <= noted
    assert "further" not in noted
    assert not any(note in table.notes for table in build_tables(gather_grid(results)))
