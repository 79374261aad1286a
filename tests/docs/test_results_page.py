"""The tables of docs/results.md equal those of `study report` for the stored results."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from page_text import cells_of, lines_of, table_lines, words
from page_text import section as section_of

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import as_one_family, primary_comparisons
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_markdown_table
from coupled_adam.study.results import read_results

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
STORED = DOCS / "results"
RESULTS = STORED / "single-gpu"
PAPERS_SMALLEST = STORED / "single-gpu-125m"
PARTIAL = "partial y=0.25 mean-free"
SHORT, LONG = 82_000_000, 262_000_000


@pytest.mark.parametrize("name", ["main", "crossing", "downstream"])
def test_a_table_of_the_results_page_matches_the_stored_runs(name: str) -> None:
    table = next(table for table in build_tables(gather_grid(read_results(RESULTS))) if table.name == name)
    assert lines_of(name) == table_lines(to_markdown_table(table))


@pytest.mark.parametrize("name", ["main", "crossing", "downstream"])
def test_a_table_of_the_125m_model_matches_its_stored_runs(name: str) -> None:
    table = next(table for table in build_tables(gather_grid(read_results(PAPERS_SMALLEST))) if table.name == name)
    assert lines_of(f"single-gpu-125m {name}") == table_lines(to_markdown_table(table))


def test_the_gap_in_validation_loss_of_the_125m_model_matches_the_stored_curves() -> None:
    curves = []
    for optimizer in ("standard", "coupled"):
        lines = (PAPERS_SMALLEST / f"runs/125M-250M-{optimizer}/seed-1/metrics.jsonl").read_text().splitlines()
        curves.append({row["step"]: row["loss"] for row in map(json.loads, lines)})
    standard, coupled = curves
    gaps = {step: coupled[step] - loss for step, loss in standard.items()}
    said = rf" {gaps[1000]:.2f} [^.]*\b1,000\b.*? {gaps[4000]:.2f} [^.]*\b4,000\b.*? {gaps[7629]:.2f} "
    assert re.search(said, words("docs/results.md"))
    from_1000 = [gap for step, gap in gaps.items() if step >= 1000]
    assert from_1000 == sorted(from_1000, reverse=True)


def test_the_text_about_the_125m_model_matches_its_stored_results() -> None:
    standard, coupled, partial = read_results(PAPERS_SMALLEST)
    assert (standard.optimizer, coupled.optimizer, partial.optimizer) == ("standard", "coupled", PARTIAL)
    assert (standard.commit, coupled.commit, partial.commit) == ("65bbb56", "65bbb56", "37ccd74")
    section = section_of("The paper's 125M GPT-2")
    ratios = [each.metrics["mu_norm_ratio"] or 0.0 for each in (coupled, standard)]
    assert re.search(rf" {100 * ratios[0]:.1f}% [^.]* {100 * ratios[1]:.0f}%", section)
    assert f" {(coupled.metrics['loss'] or 0.0) - (standard.metrics['loss'] or 0.0):.2f}.**" in section
    shares = []
    for each in (standard, coupled):
        squares = np.load(PAPERS_SMALLEST / each.run / "embeddings.npz")["singular_values"].astype(np.float64) ** 2
        shares.append(f"{100 * squares[0] / squares.sum():.0f}%")
    assert re.search(rf" {shares[0]} [^.]*AdamW, {shares[1]} [^.]*Coupled Adam", section)
    right = [each.metrics["lambada"] or 0.0 for each in (coupled, standard)]
    errors = [math.sqrt(share * (1 - share) / 5153) for share in right]  # 5,153 passages
    shown = [f"{share:.3f}({1000 * error:.0f})" for share, error in zip(right, errors, strict=True)]
    apart = (right[1] - right[0]) / math.hypot(*errors)
    assert re.search(rf" {re.escape(shown[0])} [^*]*{re.escape(shown[1])}, {apart:.0f} standard errors", section)
    rates = [f"{round(each.tokens_per_second or 0.0, -3):,.0f}" for each in (standard, coupled)]
    assert re.search(rf" {rates[0]} tokens/s \(standard\).* {rates[1]} \(coupled\)", section)
    for each in (standard, coupled, partial):
        assert f"{(each.energy_joules or 0.0) / 3.6e6:.2f} kWh" in section


def test_the_text_about_the_125m_model_and_partially_coupled_adam_matches_its_stored_results() -> None:
    standard, coupled, partial = (each.metrics for each in read_results(PAPERS_SMALLEST))
    section = section_of("The paper's 125M GPT-2")
    losses = [each["loss"] or 0.0 for each in (standard, coupled, partial)]
    assert f": {losses[0] - losses[2]:.2f} below AdamW and {losses[1] - losses[2]:.2f} below Coupled Adam." in section
    assert f"with partially coupled Adam {100 * (partial['mu_norm_ratio'] or 0.0):.1f}%" in section
    squares = np.load(PAPERS_SMALLEST / "runs/125M-250M-partial-y0.25-mean-free/seed-1/embeddings.npz")
    squares = squares["singular_values"].astype(np.float64) ** 2
    assert f"and {100 * squares[0] / squares.sum():.0f}% with partially coupled Adam" in section
    right = partial["lambada"] or 0.0
    error = math.sqrt(right * (1 - right) / 5153)  # 5,153 passages
    assert f"as with AdamW, {right:.3f}({1000 * error:.0f})." in section
    shown = re.search(r"the means: (\S+)\(4\) for AdamW, (\S+)\(4\) for Coupled Adam and (\S+)\(4\)", section)
    assert shown is not None
    assert list(shown.groups()) == [f"{each['acc'] or 0.0:.3f}" for each in (standard, coupled, partial)]
    curves = []
    for cell in ("standard", "partial-y0.25-mean-free"):
        lines = (PAPERS_SMALLEST / f"runs/125M-250M-{cell}/seed-1/metrics.jsonl").read_text().splitlines()
        curves.append({row["step"]: row["loss"] for row in map(json.loads, lines)})
    gaps = {step: curves[1][step] - loss for step, loss in curves[0].items()}
    ahead_from = min(step for step in gaps if step > max(step for step, gap in gaps.items() if gap >= 0))
    assert f"{gaps[1000]:.2f} behind at step 1,000 and ahead from step {ahead_from:,} on" in section


@pytest.mark.parametrize(
    ("study", "tokens"), [("untied-heads", [SHORT]), ("single-gpu-scaled", [LONG]), ("centring", [SHORT, LONG])]
)
def test_the_table_of_an_open_question_matches_its_runs_and_the_main_ones(study: str, tokens: list[int]) -> None:
    results = [each for folder in (RESULTS, STORED / study) for each in read_results(folder) if each.tokens in tokens]
    assert lines_of(f"{study} main") == table_lines(to_markdown_table(build_tables(gather_grid(results))[0]))


def test_the_table_of_the_input_tables_matches_the_stored_runs() -> None:
    expected = []
    for result in read_results(STORED / "untied-heads"):
        m = {name: value or 0.0 for name, value in result.metrics.items()}
        lengths = f"{m['mu_norm']:.4f} | {m['input_mu_norm']:.4f} | {m['input_mu_norm_ratio']:.2f}"
        rest = f"{m['input_iso']:.2f} | {m['input_r_cos']:.0f} | {m['loss']:.3f}"
        expected.append(f"| {result.optimizer} | {lengths} | {rest} |")
    assert lines_of("input")[2:] == expected


def test_the_share_of_one_direction_matches_the_stored_singular_values() -> None:
    shares = {}
    for folder in (RESULTS, STORED / "centring"):
        for path in folder.glob("runs/30M-262M-*/seed-1/embeddings.npz"):
            squares = np.load(path)["singular_values"].astype(np.float64) ** 2
            shares[path.parts[-3].removeprefix("30M-262M-")] = f"{100 * squares[0] / squares.sum():.0f}%"
    assert shares == {"standard": "90%", "standard-centred": "80%", "coupled": "4%"}
    said = r" 80% [^.]*\(90% [^.]*AdamW, 4% [^.]*Coupled Adam\)"
    assert re.search(said, words("docs/results.md"))


def test_the_readme_shows_the_numbers_of_the_results_page() -> None:
    longer = [
        run for folder in (RESULTS, STORED / "partially-coupled") for run in read_results(folder) if run.tokens == LONG
    ]
    tuned = read_results(STORED / "best-learning-rates")
    beside_muon = [run for run in read_results(STORED / "muon") if not run.is_candidate]
    expected = [(runs, "loss") for runs in (tuned, beside_muon, longer, read_results(PAPERS_SMALLEST))]
    expected += [(tuned, key) for key in ("mu_norm_ratio", "iso", "r_cos", "kappa")]
    lines = cells_of("single-gpu", "README.md")[2:]
    # The losses of the table are one family of comparisons with AdamW.
    families = [primary_comparisons(gather_grid(runs)) for runs, key in expected if key == "loss"]
    compared = iter(as_one_family([each for family in families for each in family]))
    lower = [[False, *(next(compared).outcome == "better" for _ in family)] for family in families]
    assert [len(row) for row in lower] == [3, 3, 3, 3]
    assert lower == [[False] * 3, [False, True, True], [False, True, True], [False] * 3]
    for (runs, key), (_, *values), own in zip(expected, lines, [*lower, None, None, None, None], strict=True):
        table = build_tables(gather_grid(runs))[0]
        assert [row[2].text.split(" lr=")[0] for row in table.rows] == ["standard", "coupled", PARTIAL]
        cells = [row[[column.key for column in table.columns].index(key)] for row in table.rows]
        bold = [cell.bold for cell in cells] if own is None else own
        assert values == [f"**{c.text}**" if is_bold else c.text for c, is_bold in zip(cells, bold, strict=True)], key
