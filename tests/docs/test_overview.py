"""docs/results/overview.py: its numbers match the stored runs, and the committed picture is what it draws."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from page_text import section, words
from scipy import stats
from svg_files import DOCS, assert_same_picture, load_script, texts_of

pytest.importorskip("matplotlib")

SCRIPT = DOCS / "results" / "overview.py"
PARTIAL = "partial y=0.25 mean-free"
LONGER = "standard b2=0.99"
FACTORED = "factored mean-free b1=0 b2=0.99"
MAIN = ("single-gpu", "partially-coupled")
NOT_MEASURED = "\N{EN DASH}"


@pytest.fixture(scope="module")
def overview() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def output(overview: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], str]:
    """The rows of the printed table by setting, and the picture of all blocks."""
    folder = tmp_path_factory.mktemp("overview")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr(sys, "argv", ["overview.py", "--out", str(folder)])
        patch.setattr("builtins.print", printed.append)
        overview.main()
    [table] = printed
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][:4] == ["setting", "steps", "seeds", "AdamW loss"]
    assert_same_picture("results-loss-and-similarity.svg", (folder / "results-loss-and-similarity.svg").read_text())
    return {row[0]: row[1:] for row in rows[2:]}, (folder / "results-overview.svg").read_text()


def losses(folders: tuple[str, ...], tokens: int, optimizer: str) -> dict[int, float]:
    """Test losses by seed, straight from the files, without candidates of a selection."""
    lines = [line for folder in folders for line in (SCRIPT.parent / folder / "results.jsonl").read_text().splitlines()]
    rows = [row for row in map(json.loads, lines) if not (row.get("trial") or {}).get("is_candidate")]
    own = [row for row in rows if (row["tokens"], row["optimizer"]) == (tokens, optimizer)]
    return {row["seed"]: row["metrics"]["loss"] for row in own}


def corrected(p_values: list[float]) -> list[float]:
    """Holm's correction by its definition: the largest (count - rank) p of all that are not larger."""
    ordered = sorted(p_values)
    return [max(min(1.0, (len(ordered) - rank) * p) for rank, p in enumerate(ordered) if p <= own) for own in p_values]


def paired(first: dict[int, float], second: dict[int, float]) -> tuple[str, float]:
    """The text of a paired difference, and p."""
    seeds = sorted(first.keys() & second.keys())
    old, new = (np.array([values[seed] for seed in seeds]) for values in (first, second))
    test = stats.ttest_rel(new, old)
    low, high = test.confidence_interval(0.95)
    text = f"{(new - old).mean():+.3f} ({low:+.3f} to {high:+.3f})"
    return text + (f", {len(seeds)} seeds" if len(seeds) < len(first) else ""), test.pvalue


TESTED = {
    "30M, 82M tokens, lr 1e-3": (MAIN, 82_000_000, ("standard", "coupled", PARTIAL)),
    "30M, 82M tokens, best lr each": (
        ("best-learning-rates",),
        82_000_000,
        ("standard lr=0.002", "coupled lr=0.001", f"{PARTIAL} lr=0.002"),
    ),
    "30M, 82M tokens, best table lr each": (
        ("rivals", "table-beta2-30m"),
        82_000_000,
        ("standard", "coupled", PARTIAL, FACTORED, LONGER),
    ),
    "30M, 262M tokens, lr 1e-3": (MAIN, 262_000_000, ("standard", "coupled", PARTIAL)),
    "30M, 82M tokens, Muon for the matrices, best table lr each": (
        ("muon",),
        82_000_000,
        ("standard", "coupled", PARTIAL, FACTORED, LONGER),
    ),
}
"""Folders, tokens, and AdamW and the optimizers with two seeds and more, by setting."""


def test_differences_are_those_of_the_stored_runs_and_corrected_as_one_family(
    output: tuple[dict[str, list[str]], str],
) -> None:
    found = {}
    for setting, (folders, tokens, (baseline, *names)) in TESTED.items():
        first = losses(folders, tokens, baseline)
        assert output[0][setting][1] == str(len(first))
        found |= {(setting, name): paired(first, losses(folders, tokens, name)) for name in names}
    assert len(found) == 14
    p_values = dict(zip(found, corrected([p for _, p in found.values()]), strict=True))
    decided = [p < 0.05 for p in p_values.values()]
    p = p_values["30M, 82M tokens, best lr each", "coupled lr=0.001"]
    assert f"after the correction of the [first table](#results-on-real-text) p is {p:.2f}" in words("docs/results.md")
    for ((setting, _), (text, _)), is_bold in zip(found.items(), decided, strict=True):
        assert (f"**{text}**" if is_bold else text) in output[0][setting]
    assert sum(decided) == sum(cell.startswith("**") for row in output[0].values() for cell in row) == 10
    assert "over the fourteen comparisons of this table with two seeds and more" in words("docs/results.md")


def test_a_difference_of_fewer_seeds_than_adamw_has_names_their_number(
    overview: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(SCRIPT.parent / "muon", tmp_path / "muon")
    file = tmp_path / "muon" / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if (row["optimizer"], row["seed"]) != (PARTIAL, 3)]
    assert len(kept) == len(rows) - 1
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    monkeypatch.setattr(overview, "STORED", tmp_path)
    [block] = [block for block in overview.BLOCKS if block.folders == ("muon",)]
    found = overview.read_block(block)
    first, second = losses(("muon",), 82_000_000, "standard"), losses(("muon",), 82_000_000, PARTIAL)
    expected, _ = paired(first, {seed: second[seed] for seed in (1, 2)})
    assert expected.endswith(", 2 seeds")
    assert overview.difference_text(found, found.comparisons[1]) == expected


def test_the_best_learning_rate_of_each_optimizer_is_compared(output: tuple[dict[str, list[str]], str]) -> None:
    rates = ("0.0005", "0.001", "0.002", "0.004", "0.008")
    best = {
        name: min(losses(("learning-rates",), 41_000_000, f"{name} lr={rate}")[1] for rate in rates)
        for name in ("standard", "coupled", PARTIAL)
    }
    gaps = [f"{best[name] - best['standard']:+.3f}" for name in ("coupled", PARTIAL)]
    row = ["2,502", "1", f"{best['standard']:.3f}", *gaps, NOT_MEASURED, NOT_MEASURED, NOT_MEASURED]
    assert output[0]["30M, 41M tokens, best lr each"] == row


def test_the_picture_shows_every_block_and_every_number(output: tuple[dict[str, list[str]], str]) -> None:
    rows, svg = output
    texts = texts_of(svg)
    assert [text for text in texts if text in rows] == list(rows)
    for row in rows.values():
        for cell in (cell for cell in row[3:] if cell != NOT_MEASURED):
            number = re.sub(r" \(row.*", "", cell.strip("*")).replace("-", "\N{MINUS SIGN}")
            assert number in texts
    assert texts.count("Coupled Adam") == len(rows)
    assert texts.count("partially coupled Adam") == len(rows) - 1
    assert "1.06" in texts  # the arrow


def test_the_committed_picture_is_what_the_script_draws(output: tuple[dict[str, list[str]], str]) -> None:
    assert_same_picture("results-overview.svg", output[1])


def test_the_table_of_the_results_page_is_what_the_script_prints(output: tuple[dict[str, list[str]], str]) -> None:
    _, _, rest = (DOCS / "results.md").read_text().partition("<!-- table overview -->")
    _, _, *lines = [line for line in rest.split("\n\n")[0].splitlines() if line.startswith("|")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {name: cells for name, *cells in shown} == output[0]
    longer = [cells for _, steps, *cells in shown if int(steps.replace(",", "")) >= 5000]
    assert len(longer) == 6
    said = section("# Results")
    leads = [-float(cells[3].strip("*").split()[0]) for cells in longer]
    assert f"{min(leads):.2f} to {max(leads):.2f} below AdamW; three of these six leads are significant" in said
    assert sum(cells[3].startswith("**") for cells in longer) == 3
    assert sum(cells[2].strip("*").startswith("-") for cells in longer) == 2  # Coupled Adam below AdamW
    factored = [cells[4] for _, _, *cells in shown if cells[4] != NOT_MEASURED]
    leads = [-float(cell.strip("*").split()[0].rstrip(",")) for cell in factored]
    assert len(leads) == 5
    assert min(leads) > 0
    assert f"ended {min(leads):.2f} to {max(leads):.3f} below AdamW in all five settings" in said
    assert [cell.startswith("**") for cell in factored].count(True) == 2  # "two of the five leads have three seeds"
