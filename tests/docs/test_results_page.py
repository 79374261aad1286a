"""The tables of docs/results.md equal those of `study report` for the stored results."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from page_text import cells_of, lines_of, table_lines, words
from page_text import section as section_of
from paired_differences import interval

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.primary_comparisons import as_one_family, primary_comparisons
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_markdown_table
from coupled_adam.study.results import Result, merge_results, read_results

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
STORED = DOCS / "results"
RESULTS = STORED / "single-gpu"
PAPERS_SMALLEST = STORED / "single-gpu-125m"
PARTIAL = "partial y=0.25 mean-free"
FACTORED = "factored mean-free b1=0 b2=0.99"
SHORT, LONG = 82_000_000, 262_000_000


@pytest.mark.parametrize("name", ["main", "crossing", "downstream"])
def test_a_table_of_the_results_page_matches_the_stored_runs(name: str) -> None:
    table = next(table for table in build_tables(gather_grid(read_results(RESULTS))) if table.name == name)
    lines = table_lines(to_markdown_table(table))
    empty = "| 0 of 3 |" if name == "downstream" else None  # a row of dashes
    assert lines_of(name) == [line for line in lines if empty is None or empty not in line]


@pytest.mark.parametrize("name", ["main", "downstream"])
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
    standard, coupled, partial, factored = read_results(PAPERS_SMALLEST)
    assert (factored.optimizer, factored.commit) == (FACTORED, "1f59359")
    assert (standard.optimizer, coupled.optimizer, partial.optimizer) == ("standard", "coupled", PARTIAL)
    assert (standard.commit, coupled.commit, partial.commit) == ("65bbb56", "65bbb56", "37ccd74")
    section = section_of("The paper's 125M GPT-2")
    ratios = [each.metrics["mu_norm_ratio"] or 0.0 for each in (coupled, standard)]
    assert re.search(rf" {100 * ratios[0]:.1f}% [^.]* {100 * ratios[1]:.0f}%", section)
    assert f" {(coupled.metrics['loss'] or 0.0) - (standard.metrics['loss'] or 0.0):.2f}.**" in section
    below = [(each.metrics["loss"] or 0.0) - (factored.metrics["loss"] or 0.0) for each in (standard, partial)]
    assert f": {below[0]:.2f} below AdamW and {below[1]:.2f} below partially coupled Adam." in section
    keys = [f"frequency_loss_{i}" for i in range(1, 11)]
    by_bin = [(partial.metrics[key] or 0.0) - (factored.metrics[key] or 0.0) for key in keys]
    assert min(by_bin) > 0
    assert f"by {by_bin[0]:.2f} nats on the most frequent half of the text and by {by_bin[9]:.2f} in bin 10" in section
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
    standard, coupled, partial, factored = (each.metrics for each in read_results(PAPERS_SMALLEST))
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
    better = factored["lambada"] or 0.0
    own, other = (math.sqrt(share * (1 - share) / 5153) for share in (better, standard["lambada"] or 0.0))
    apart = (better - (standard["lambada"] or 0.0)) / math.hypot(own, other)
    assert f"LAMBADA is {better:.3f}({1000 * own:.0f}), {apart:.1f} standard errors above AdamW" in section
    assert f"the mean is {factored['acc'] or 0.0:.3f}(4)" in section
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
    assert re.search(said, section_of("Is it only the mean"))


OPTIMIZERS = ("standard", "standard b2=0.99", "standard b1=0 b2=0.99", "coupled", PARTIAL, FACTORED)
SETTINGS = (
    (("few-steps",), 49_152_000),
    (("rivals", "table-beta2-30m"), SHORT),
    (("muon",), SHORT),
    (("single-gpu-125m",), 250_000_000),
    (("single-gpu", "partially-coupled", "single-gpu-beta2"), LONG),
)
BEST_RATES = (("best-learning-rates",), SHORT)
README_SETTINGS = (SETTINGS[1], SETTINGS[2], SETTINGS[4])
"""The columns of losses in README's table: tuned table rates, with Muon, longer runs."""

MEASURES = ("mu_norm_ratio", "r_cos")


def optimizer_of(name: str) -> str:
    """The name of an optimizer without its learning rate."""
    return re.sub(r" lr=\S+$", "", name)


def runs_of(folders: tuple[str, ...], tokens: int) -> list[Result]:
    """The reported runs behind a column of README's table."""
    runs = [run for run in merge_results([STORED / folder for folder in folders]) if not run.is_candidate]
    return [run for run in runs if run.tokens == tokens and optimizer_of(run.optimizer) in OPTIMIZERS]


def shown(runs: list[Result], optimizer: str, key: str) -> str:
    """Mean and standard deviation over the seeds, as in README's table."""
    values = [run.metrics[key] or 0.0 for run in runs if optimizer_of(run.optimizer) == optimizer]
    digits = {"loss": 2 if len(values) > 1 else 3, "r_cos": 0}.get(key, 2)
    if not values:
        return "\N{EN DASH}"
    spread = f"({10**digits * np.std(values, ddof=1):.0f})" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def test_the_readme_shows_the_numbers_of_the_stored_runs() -> None:
    lines = cells_of("single-gpu", "README.md")[2:]
    rows = {optimizer: cells[1:-1] for optimizer, cells in zip(OPTIMIZERS, lines, strict=True)}
    # The losses of the table are one family of comparisons with AdamW.
    families = [primary_comparisons(gather_grid(runs_of(*setting))) for setting in README_SETTINGS]
    compared = iter(as_one_family([each for family in families for each in family]))
    decided = [{optimizer_of(each.optimizer.variant.name): each for each in [next(compared) for _ in family]}
               for family in families]  # fmt: skip
    for optimizer, (loss, difference, *later, off_centre, r_cos) in rows.items():
        outcomes = [{"better", "worse"} & {own[optimizer].outcome} if optimizer in own else set() for own in decided]
        losses = [shown(runs_of(*setting), optimizer, "loss") for setting in README_SETTINGS]
        assert loss == losses[0]
        assert later == [f"**{text}**" if outcome else text for text, outcome in zip(losses, outcomes, strict=True)][1:]
        assert (off_centre, r_cos) == tuple(shown(runs_of(*SETTINGS[1]), optimizer, key) for key in MEASURES)
        found = decided[0].get(optimizer)
        if found is None or found.difference is None:
            assert (difference, optimizer) == ("\N{EN DASH}", "standard")
            continue
        ends = found.comparison.paired_interval
        text = f"{found.difference:+.3f}" + ("" if ends is None else " ({:+.3f} to {:+.3f})".format(*ends))
        assert difference == (f"**{text}**" if outcomes[0] else text)


def test_the_readme_shows_the_losses_at_the_best_rates_for_all_weights() -> None:
    names = {"standard": "AdamW", "coupled": "Coupled Adam", PARTIAL: "partially coupled Adam"}
    adamw, coupled, partial = (f"{shown(runs_of(*BEST_RATES), key, 'loss')} for {name}" for key, name in names.items())
    losses = {(optimizer_of(run.optimizer), run.seed): run.metrics["loss"] or 0.0 for run in runs_of(*BEST_RATES)}
    lead = np.array([losses["standard", seed] - losses[PARTIAL, seed] for seed in (1, 2, 3)])
    said = f"{adamw}, {coupled} and {partial}, {lead.mean():.3f} below AdamW ({interval(lead)})"
    assert said in words("README.md")


def test_the_readme_shows_the_losses_of_the_125m_model() -> None:
    for setting, coupled in ((SETTINGS[3], "0.09"), (SETTINGS[0], "1.06")):
        losses = {run.optimizer: run.metrics["loss"] or 0.0 for run in runs_of(*setting)}
        assert f"{losses['standard'] - losses[FACTORED]:.2f}" == "0.07"
        assert f"{losses['coupled'] - losses['standard']:.2f}" == coupled
    text = words("README.md")
    assert "factored without momentum is 0.07 lower after 250M tokens and after 500 steps" in text
    assert "Coupled Adam is 0.09 and 1.06 higher; partially coupled Adam is 0.03 lower after 250M tokens" in text
    larger = {run.optimizer: run.metrics["loss"] or 0.0 for run in runs_of(*SETTINGS[3])}
    assert f"{larger['standard'] - larger[PARTIAL]:.2f}" == "0.03"


def test_the_loss_without_momentum_is_below_adamw_in_all_five_settings() -> None:
    for setting in SETTINGS:
        losses = {run.optimizer: run.metrics["loss"] or 0.0 for run in runs_of(*setting) if run.seed == 1}
        assert losses[FACTORED] < losses["standard"]


def test_the_table_of_runs_without_momentum_matches_the_stored_runs() -> None:
    names = ("standard", "standard b2=0.99", "standard b1=0 b2=0.99", PARTIAL, FACTORED)
    rows = cells_of("without momentum")[2:]
    for (folders, tokens), (_, seeds, *cells) in zip(SETTINGS, rows, strict=True):
        runs = [run for run in merge_results([STORED / folder for folder in folders]) if run.tokens == tokens]
        runs = [run for run in runs if not run.is_candidate]
        own = [run for run in runs if run.optimizer == FACTORED]
        assert seeds == str(len(own))
        measures = [
            f"{np.mean([run.metrics[key] or 0.0 for run in own]):.{n}f}" for key, n in (("iso", 2), ("r_cos", 0))
        ]
        assert cells == [*(shown(runs, name, "loss") for name in names), *measures]
        assert np.mean([run.metrics["iso"] or 0.0 for run in own]) > 0.825  # "ISO of 0.83 and more"


def test_the_table_of_262m_tokens_matches_the_stored_runs() -> None:
    runs = [run for folder in SETTINGS[-1][0] for run in read_results(STORED / folder) if run.tokens == LONG]
    assert lines_of("single-gpu-beta2 main") == table_lines(to_markdown_table(build_tables(gather_grid(runs))[0]))


def test_the_noise_of_one_seed_is_that_of_the_stored_runs() -> None:
    """The standard deviation of the difference between two optimizers, pooled over all pairs with three seeds."""
    without_muon = [(SETTINGS[4][0][:2], SHORT), (SETTINGS[4][0][:2], LONG), BEST_RATES, SETTINGS[1]]
    pooled, counts, largest = [], [], 0.0
    for settings in (without_muon, [SETTINGS[2]]):
        variances = []
        for folders, tokens in settings:
            losses: dict[str, dict[int, float]] = {}
            for run in merge_results([STORED / folder for folder in folders]):
                if run.tokens == tokens and not run.is_candidate:
                    losses.setdefault(run.optimizer, {})[run.seed] = run.metrics["loss"] or 0.0
            several = [[own[seed] for seed in (1, 2, 3)] for own in losses.values() if len(own) == 3]
            variances += [np.var(np.subtract(a, b), ddof=1) for a, b in itertools.combinations(several, 2)]
        counts.append(len(variances))
        pooled.append(float(np.sqrt(np.mean(variances))))
        largest = max(largest, float(np.sqrt(max(variances))))
    text = words("docs/results.md")
    assert f"standard deviation of {pooled[0]:.2f}, and of {pooled[1]:.3f} with Muon" in text
    assert f"pooled over the {counts[0]} and {counts[1]} pairs of optimizers with three seeds" in text
    assert f"Single pairs reach {largest:.2f}" in text
    half_widths = [1.96 * deviation / np.sqrt(3) for deviation in pooled]
    assert f"known to ±{half_widths[0]:.2f}, and to ±{half_widths[1]:.3f} with Muon" in text
