"""docs/results.md on partially coupled Adam and on few steps: its numbers match the stored runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from page_text import cells_of, lines_of, section, table_lines, words
from paired_differences import interval, mean_and_interval, mean_and_spread
from scipy import stats

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_markdown_table
from coupled_adam.study.results import Result, merge_results, read_results

DOCS = Path(__file__).parents[2] / "docs"
STORED = DOCS / "results"
SHORT = 82_000_000
PARTIAL = "partial y=0.25 mean-free"
BASELINES = {"AdamW": "standard", "Coupled Adam": "coupled"}
OPTIMIZERS = ("standard", "coupled", PARTIAL)
LENGTHS = {"82M": SHORT, "262M": 262_000_000}
BEST_RATES = {"standard": "0.002", "coupled": "0.001", PARTIAL: "0.002"}
ROUNDINGS = ("int8_row", "int8_group", "int4_row", "int4_group")
BEST = {kind: f" lr={rate}" for kind, rate in BEST_RATES.items()}
ROUNDED = {
    "125M, 500 steps": (["few-steps"], 49_152_000, ""),
    "41M tokens, lr 1e-3": (["learning-rates"], 41_000_000, " lr=0.001"),
    "41M, best lr each": (["learning-rates"], 41_000_000, BEST),
    "82M, with the bias": (["unigram-bias"], SHORT, " unigram"),
    "82M, best lr each": (["best-learning-rates"], SHORT, BEST),
    "82M, best table lr each": (["rivals", "table-beta2-30m"], SHORT, ""),
    "82M, with Muon": (["muon"], SHORT, ""),
    "262M, lr 1e-3": (["partially-coupled", "single-gpu-beta2"], LENGTHS["262M"], ""),
    "125M, 250M tokens": (["single-gpu-125m"], 250_000_000, ""),
}
"""Studies, tokens and the ends of the optimizers' names in each setting of the table on rounding."""
LABELS = {
    "AdamW": "standard",
    "AdamW, β₂ = 0.99": "standard b2=0.99",
    "AdamW, β₁ = 0, β₂ = 0.99": "standard b1=0 b2=0.99",
    "Coupled Adam": "coupled",
    "Coupled Adam, β₂ = 0.99": "coupled b2=0.99",
    "partially coupled": PARTIAL,
    "partially coupled, β₂ = 0.99": f"{PARTIAL} b2=0.99",
    "`factored`": "factored",
    "factored without momentum": "factored mean-free b1=0 b2=0.99",
}


def main_runs() -> list[Result]:
    return [*read_results(STORED / "single-gpu"), *read_results(STORED / "partially-coupled")]


def by_optimizer(study: str) -> dict[str, Result]:
    return {run.optimizer: run for run in read_results(STORED / study)}


def few_steps() -> dict[str, Result]:
    return by_optimizer("few-steps")


def differences(metric: str, baseline: str, tokens: int) -> np.ndarray:
    """Differences between partially coupled Adam and another optimizer, seed by seed."""
    values = {(run.optimizer, run.seed): run.metrics[metric] for run in main_runs() if run.tokens == tokens}
    return np.array([values[PARTIAL, seed] - values[baseline, seed] for seed in (1, 2, 3)])


def table_of(results: list[Result], name: str) -> list[str]:
    """The rows of a table in the report of some runs."""
    [table] = [table for table in build_tables(gather_grid(results)) if table.name == name]
    return table_lines(to_markdown_table(table))


@pytest.mark.parametrize(
    ("mark", "studies", "name"),
    [
        ("unigram-bias main", ["unigram-bias"], "main"),
        ("partially-coupled main", ["single-gpu", "partially-coupled"], "main"),
        ("few-steps main", ["few-steps"], "main"),
        ("best main", ["best-learning-rates"], "main"),
        ("muon main", ["muon"], "main"),
        ("table-beta2-30m main", ["table-beta2-30m"], "main"),
        ("table-beta2-muon main", ["table-beta2-muon"], "main"),
        ("table-beta2-muon primary", ["table-beta2-muon"], "primary"),
        ("learning-rates learning_rates", ["learning-rates"], "learning_rates"),
    ],
)
def test_a_table_matches_the_stored_runs(mark: str, studies: list[str], name: str) -> None:
    runs = [run for study in studies for run in read_results(STORED / study) if not run.is_candidate]
    assert lines_of(mark) == table_of(runs, name)


def test_what_rounding_adds_matches_the_stored_runs() -> None:
    head, _, *rows = cells_of("quantised")
    assert head[-4:] == ["int8, by row", "int8, by 32", "int4, by row", "int4, by 32"]
    for setting, label, seeds, *shown in rows:
        studies, tokens, ending = ROUNDED[setting]
        found = merge_results([STORED / study for study in studies])
        rate = ending[LABELS[label]] if isinstance(ending, dict) else ending
        reported = [run for run in found if run.tokens == tokens and not run.is_candidate]
        own = [run.metrics for run in reported if run.optimizer == LABELS[label] + rate]
        added = [np.mean([(each[f"loss_{key}"] or 0.0) - (each["loss"] or 0.0) for each in own]) for key in ROUNDINGS]
        assert (seeds, shown[0]) == (str(len(own)), f"{np.mean([each['loss'] or 0.0 for each in own]):.3f}")
        assert shown[1:] == [f"{value:.3f}".replace("-0.000", "0.000") for value in added]
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), key=list(ROUNDED).index)
    assert len(rows) == 36
    assert max(float(row[-1]) for row in rows) == 0.053


def test_paired_differences_and_their_intervals_match_the_stored_runs() -> None:
    rows = cells_of("partially-coupled differences")
    shown = {row[0]: row[1:] for row in rows[2:]}
    assert len(shown) == 4
    for label, baseline in BASELINES.items():
        for length, tokens in LENGTHS.items():
            cells = []
            for metric, digits in (("loss", 3), ("r_cos", 1)):
                values = differences(metric, baseline, tokens)
                low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
                cells += [f"{values.mean():.{digits}f}", f"{low:.{digits}f} to {high:.{digits}f}"]
            assert shown[f"{length}, less {label}"] == cells


@pytest.mark.parametrize(
    ("length", "expected"),
    [("82M", {"standard": {2000}, "coupled": {500}}), ("262M", {"standard": {2000, 3000}, "coupled": {500}})],
)
def test_validation_loss_is_ahead_from_the_steps_named_on_the_page(length: str, expected: dict[str, set[int]]) -> None:
    def curve(study: str, cell: str, seed: int) -> dict[int, float]:
        lines = (STORED / study / f"runs/30M-{length}-{cell}/seed-{seed}/metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}

    ahead_from: dict[str, set[int]] = {"standard": set(), "coupled": set()}
    for seed in (1, 2, 3):
        partial = curve("partially-coupled", "partial-y0.25-mean-free", seed)
        for baseline, first in ahead_from.items():
            other = curve("single-gpu", baseline, seed)
            behind = [step for step in partial if partial[step] >= other[step]]
            first.add(min(step for step in partial if step > max(behind, default=0)))
    assert ahead_from == expected
    text = section("Between the two")
    assert re.search(r"Coupled Adam's .*\b500\b.*AdamW's from step 2,000 on in the runs of 5,004", text)
    assert "from step 2,000 or 3,000 on in the runs of 15,991" in text


def test_the_embeddings_are_compared_with_those_of_coupled_adam() -> None:
    text = section("Between the two")
    iso, kappa = ([differences(key, "coupled", tokens) for tokens in LENGTHS.values()] for key in ("iso", "kappa"))
    said = f"ISO is {iso[0].mean():.3f} higher after 82M tokens ({interval(iso[0])}) and {iso[1].mean():.3f} after 262M"
    assert f"{said} ({interval(iso[1])})" in text
    shown = " and ".join(f"{each.mean():.1f} ({interval(each, 1)})" for each in kappa)
    assert f"κ {shown}" in text


def test_the_text_about_learning_rates_matches_the_stored_runs() -> None:
    loss = {name: run.metrics["loss"] or 0.0 for name, run in by_optimizer("learning-rates").items()}
    text = section("Which learning rate")
    best = {kind: min(loss[name] for name in loss if name.startswith(f"{kind} lr")) for kind in OPTIMIZERS}
    behind = {kind: best[kind] - best["standard"] for kind in (PARTIAL, "coupled")}
    assert f"{behind[PARTIAL]:.2f} below partially coupled Adam and {behind['coupled']:.2f} below Coupled Adam" in text
    assert f"by only {loss[f'{PARTIAL} lr=0.001'] - loss['standard lr=0.001']:.2f}" in text
    assert f"At 4e-3 it is {loss['standard lr=0.004'] - loss[f'{PARTIAL} lr=0.004']:.2f} below AdamW" in text
    assert f"whose loss is {loss['coupled lr=0.002'] - best['coupled']:.2f} higher at 2e-3" in text
    cost = {
        kind: f"{np.mean([loss[name] for name in loss if name.startswith(f'{kind} lr')]) - best[kind]:.2f}"
        for kind in OPTIMIZERS
    }
    assert f"{cost[PARTIAL]}, compared with {cost['standard']} for AdamW and {cost['coupled']} for Coupled Adam" in text
    runs = by_optimizer("learning-rates")
    first, second = (runs[f"{kind} lr=0.002"].metrics for kind in ("standard", PARTIAL))
    gaps = [(second[f"frequency_loss_{i}"] or 0.0) - (first[f"frequency_loss_{i}"] or 0.0) for i in range(1, 11)]
    assert f"{min(gaps[:5]):.2f} to {max(gaps[:5]):.2f} nats behind" in text
    assert f"{-max(gaps[5:]):.2f} to {-min(gaps[5:]):.2f} ahead" in text
    targets = [first[f"frequency_targets_{i}"] or 0.0 for i in range(1, 11)]
    assert f"the most frequent {100 * sum(targets[:5]) / sum(targets):.0f}% of the text" in text
    assert {run.commit for run in runs.values()} == {"37aac31"}


def best(metric: str) -> dict[str, np.ndarray]:
    """A metric of each optimizer at its best learning rate, seed by seed."""
    runs = {(run.optimizer, run.seed): run.metrics[metric] for run in read_results(STORED / "best-learning-rates")}
    return {kind: np.array([runs[f"{kind} lr={lr}", seed] for seed in (1, 2, 3)]) for kind, lr in BEST_RATES.items()}


@pytest.mark.parametrize("metric", ["loss", "val_loss"])
def test_best_rates_are_the_winners_of_the_shorter_runs(metric: str) -> None:
    loss = {name: run.metrics[metric] or 0.0 for name, run in by_optimizer("learning-rates").items()}
    winners = {
        kind: min((loss[name], name) for name in loss if name.startswith(f"{kind} lr"))[1] for kind in OPTIMIZERS
    }
    assert winners == {kind: f"{kind} lr={lr}" for kind, lr in BEST_RATES.items()}


def test_the_text_about_best_against_best_matches_the_stored_runs() -> None:
    loss, text = best("loss"), section("Which learning rate")
    behind = loss["standard"] - loss[PARTIAL]
    assert f"{behind[0]:.2f}, {behind[1]:.2f} and {behind[2]:.2f} below AdamW" in text
    assert f"(mean {behind.mean():.3f}, {interval(behind)})" in text
    to_coupled = loss[PARTIAL] - loss["coupled"]
    assert f"{-to_coupled.mean():.2f} below Coupled Adam (interval {interval(-to_coupled)})" in text
    above = loss["coupled"] - loss["standard"]
    assert f"Coupled Adam is {above.mean():.2f} above AdamW. The interval excludes zero ({interval(above)})" in text
    plain = [run.metrics["loss"] for run in main_runs() if (run.tokens, run.optimizer) == (SHORT, "standard")]
    assert f"Tuning gains AdamW {np.mean(plain) - loss['standard'].mean():.2f} " in text


def test_who_wins_where_is_what_the_stored_runs_say() -> None:
    """Bins that differ significantly from AdamW, on which side, and who is calibrated in the rarest."""
    for kind, ahead, behind in ((PARTIAL, {4, 5, 6, 7, 8, 9, 10}, set()), ("coupled", {6, 7, 8, 9, 10}, {1, 2, 3, 4})):
        for number in range(1, 11):
            losses = best(f"frequency_loss_{number}")
            test = stats.ttest_ind(losses[kind], losses["standard"], equal_var=False)
            sign = np.sign(test.statistic) if test.pvalue < 0.05 else 0
            assert sign == (number in behind) - (number in ahead), (kind, number)
    text = section("Which learning rate")
    fourth, ninth = (
        best(f"frequency_loss_{number}")["standard"] - best(f"frequency_loss_{number}")[PARTIAL] for number in (4, 9)
    )
    said = f"{fourth.mean():.2f} nats in bin 4 ({interval(fourth)}) and by {ninth.mean():.1f} in bin 9"
    assert f"{said} ({interval(ninth, 2)})" in text
    rarest = {kind: values.mean() for kind, values in best("frequency_calibration_10").items()}
    assert abs(rarest["standard"]) < 0.05
    less = best("frequency_calibration_10")[PARTIAL] - best("frequency_calibration_10")["standard"]
    assert f"(partially coupled less AdamW: {less.mean():.2f}, {interval(less, 2)})" in text
    said = f"e^{rarest[PARTIAL]:.2f} of the observed share with partially coupled Adam, e^{rarest['coupled']:.2f}"
    assert f"{said} with Coupled Adam" in text


def test_rounded_tables_of_the_best_runs_lose_what_the_text_says() -> None:
    loss, text = best("loss"), section("Is the table easier")
    cost = {key: {kind: best(f"loss_{key}")[kind] - loss[kind] for kind in OPTIMIZERS} for key in ROUNDINGS}
    assert max(cost[key][kind].max() for key in ("int8_row", "int8_group") for kind in OPTIMIZERS) < 0.002
    by_row = {kind: f"{cost['int4_row'][kind].mean():.2f}" for kind in OPTIMIZERS}
    more = {kind: cost["int4_row"][kind] - cost["int4_row"]["standard"] for kind in ("coupled", PARTIAL)}
    shown = {kind: f"{values.mean():.3f}, {interval(values)}" for kind, values in more.items()}
    said = f"best learning rates it loses {by_row['coupled']}, compared with {by_row['standard']}"
    assert f"{said} (difference {shown['coupled']})" in text
    assert f"it loses least, {by_row[PARTIAL]}, with every seed (difference from AdamW {shown[PARTIAL]})" in text
    assert all((cost["int4_row"][PARTIAL] < cost["int4_row"][kind]).all() for kind in ("standard", "coupled"))
    by_group = {kind: f"{cost['int4_group'][kind].mean():.2f}" for kind in OPTIMIZERS}
    assert by_group["coupled"] == by_group[PARTIAL]
    said = f"AdamW loses {by_group['standard']}, Coupled Adam and partially coupled Adam {by_group[PARTIAL]}"
    assert f"best learning rates {said}" in text


def test_two_repeats_of_one_run_lose_different_amounts_to_rounding() -> None:
    names = {"best-learning-rates": "coupled lr=0.001", "rivals": "coupled"}
    repeats = [run for study, name in names.items() for run in read_results(STORED / study)
               if (run.optimizer, run.seed, run.is_candidate) == (name, 1, False)]  # fmt: skip
    costs = [(run.metrics["loss_int4_row"] or 0.0) - (run.metrics["loss"] or 0.0) for run in repeats]
    assert f"(Coupled Adam, seed 1) lose {costs[0]:.3f} and {costs[1]:.3f}" in section("Is the table easier")


def test_the_text_about_the_bias_matches_the_stored_runs() -> None:
    runs, text = by_optimizer("unigram-bias"), section("With a bias on the logits")
    loss = {kind: runs[f"{kind} unigram"].metrics["loss"] or 0.0 for kind in OPTIMIZERS}
    said = [
        f"{loss[kind]:.3f} for {name}" for kind, name in ((PARTIAL, "partially coupled Adam"), ("standard", "AdamW"))
    ]
    assert f"{', '.join(said)}, {loss['coupled']:.3f} for Coupled Adam" in text
    plain = {run.optimizer: run.metrics["loss"] or 0.0 for run in main_runs() if (run.tokens, run.seed) == (SHORT, 1)}
    gains = [f"{plain[kind] - loss[kind]:.2f}" for kind in (PARTIAL, "standard", "coupled")]
    said = f"by {gains[0]} for partially coupled Adam, {gains[1]} for AdamW and {gains[2]} for Coupled Adam"
    advice = words("docs/should-i-use-it.md")
    assert said in text
    assert said in advice
    calibration = {kind: runs[f"{kind} unigram"].metrics["frequency_calibration_10"] or 0.0 for kind in OPTIMIZERS}
    for value in calibration.values():
        assert f"e^{value:.2f}" in text
    factors = [f"{np.exp(-calibration[kind]):.0f}" for kind in (PARTIAL, "standard", "coupled")]
    assert f"the rarest tokens got {factors[0]}, {factors[1]} and {factors[2]} times too little" in advice


def test_the_text_about_rounding_matches_the_stored_runs() -> None:
    runs = {**by_optimizer("learning-rates"), **by_optimizer("unigram-bias")}
    cost = {
        (name, key): (run.metrics[f"loss_{key}"] or 0.0) - (run.metrics["loss"] or 0.0)
        for name, run in runs.items()
        for key in ROUNDINGS
    }
    text = section("Is the table easier")
    by_row = {name: f"{cost[name, 'int4_row']:.2f}" for name in runs}
    equal_rates = f"{by_row['coupled lr=0.001']} at 41M tokens, compared with {by_row['standard lr=0.001']} for AdamW"
    assert f"{equal_rates} at the same learning rate" in text
    best_rates = f"loses {by_row[f'{PARTIAL} lr=0.002']}, compared with {by_row['standard lr=0.002']} for AdamW"
    assert f"41M tokens and the best learning rates it {best_rates}" in text
    for kind in ("coupled", PARTIAL):
        assert f"With the bias it loses {by_row[f'{kind} unigram']}, compared with {by_row['standard unigram']}" in text
    shown = [*(f"{kind} unigram" for kind in OPTIMIZERS), *(kind + rate for kind, rate in BEST.items())]
    shown += [f"{kind} lr=0.001" for kind in ("standard", PARTIAL)]
    assert all(abs(cost[name, f"int8_{scale}"]) < 0.001 for name in shown for scale in ("row", "group"))
    assert all(0.005 < cost[name, "int4_group"] < 0.035 for name in shown)


def test_the_text_about_few_steps_matches_the_stored_runs() -> None:
    runs, text = few_steps(), section("Few steps")
    loss = {name: run.metrics["loss"] for name, run in runs.items()}
    assert loss["y=1 mean-free"] == min(loss[name] for name in loss if "y=" in name and "unigram" not in name)
    assert f"(y = 1 throughout) is {loss['y=1 mean-free'] - loss['standard']:.2f} behind AdamW." in text
    factored, same_betas = runs["factored mean-free b1=0 b2=0.99"], runs["standard b1=0 b2=0.99"]
    lead = loss["standard"] - loss[factored.optimizer]
    assert f"ends {lead:.2f} ahead, with ISO {factored.metrics['iso']:.2f}" in text
    above = loss[factored.optimizer] - loss[same_betas.optimizer]
    r_cos = f"r_cos {same_betas.metrics['r_cos']:.0f} ({factored.metrics['r_cos']:.0f} for"
    assert f"a loss {above:.2f} lower still, with ISO {same_betas.metrics['iso']:.2f} and {r_cos}" in text
    best = "y=1 to 0.25 mean-free unigram"
    assert f"also {loss[best] - loss['standard unigram']:.2f} behind" in text
    assert f"{loss['standard'] - loss[best]:.2f} ahead, ISO {runs[best].metrics['iso']:.2f}" in text
    assert f"gains AdamW {loss['standard'] - loss['standard unigram']:.2f} and raises its ISO to" in text
    annealed = loss["y=1 to 0.25 mean-free"] - loss["standard"]
    assert f"gap of {loss['coupled'] - loss['standard']:.2f} to {annealed:.2f}" in text
    rarest = {name: run.metrics["frequency_calibration_10"] for name, run in runs.items()}
    for name in ("standard", "coupled", "y=1 to 0.25 mean-free", "standard unigram"):
        assert f"e^{rarest[name]:.2f}" in text
    assert f"e^{runs['standard'].metrics['frequency_calibration_9']:.2f} in the next bin" in text
    alone = [run for run in runs.values() if run not in (factored, same_betas)]
    rates = [run.tokens_per_second for run in alone]
    assert f"{round(min(rates), -3):,.0f} to {round(max(rates), -3):,.0f} tokens/s" in text
    assert {run.commit for run in alone} == {"166cdb9"}
    assert factored.commit == same_betas.commit == "1f59359"


def test_differences_by_run_length_on_the_advice_page_match_the_stored_runs() -> None:
    text = (DOCS / "should-i-use-it.md").read_text().split("<!-- table lengths -->")[1].split("\n\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    shortest = {name: run.metrics["loss"] or 0.0 for name, run in by_optimizer("learning-rates").items()}
    gaps = [shortest[f"{kind} lr=0.001"] - shortest["standard lr=0.001"] for kind in ("coupled", PARTIAL)]
    expected = [f"| 41M | 2,502 | {gaps[0]:.3f} | {gaps[1]:.3f} | 1 |"]
    for length, steps in (("82M", "5,004"), ("262M", "15,991")):
        runs = {(run.optimizer, run.seed): run.metrics["loss"] for run in main_runs() if run.tokens == LENGTHS[length]}
        shown = " | ".join(
            mean_and_interval(runs[kind, seed] - runs["standard", seed] for seed in (1, 2, 3))
            for kind in ("coupled", PARTIAL)
        )
        expected.append(f"| {length} | {steps} | {shown} | 3 |")
    assert lines == expected


def test_losses_with_bfloat16_state_are_those_of_the_stored_runs() -> None:
    text = (DOCS / "performance.md").read_text().split("<!-- table state-dtype -->")[1].split("\n\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    narrow = {run.optimizer: run for run in read_results(STORED / "state-dtype")}
    expected = []
    for name, kind in (("Coupled Adam", "coupled"), ("partially coupled", PARTIAL)):
        run = narrow[kind]
        assert run.settings["state_dtype"] == "bfloat16"
        wide = {run.seed: run.metrics["loss"] for run in main_runs() if (run.tokens, run.optimizer) == (SHORT, kind)}
        values = np.array([wide[seed] for seed in (1, 2, 3)])
        spread = stats.t.ppf(0.975, 2) * values.std(ddof=1) * np.sqrt(1 + 1 / 3)
        low, high = values.mean() - spread, values.mean() + spread
        assert low < run.metrics["loss"] < high
        mean = mean_and_spread(values)
        expected.append(f"| {name} | {run.metrics['loss']:.3f} | {wide[1]:.3f} | {mean} | {low:.3f} to {high:.3f} |")
    assert lines == expected


def with_muon(metric: str) -> dict[str, np.ndarray]:
    """A metric of each optimizer of the table beside Muon, seed by seed."""
    runs = [run for run in read_results(STORED / "muon") if not run.is_candidate]
    found = {
        kind: np.array([run.metrics[metric] for run in sorted(runs, key=lambda run: run.seed) if run.optimizer == kind])
        for kind in OPTIMIZERS
    }
    assert {kind: len(values) for kind, values in found.items()} == {"standard": 3, "coupled": 3, PARTIAL: 3}
    return found


def test_trials_with_muon_are_those_of_the_stored_runs() -> None:
    header, _, *rows = cells_of("muon trials")
    factors = {"1/3": "0.333333"}
    names = {
        "AdamW": "standard",
        "Coupled Adam": "coupled",
        "partially coupled Adam": "partial-y0.25-mean-free",
        "AdamW, β₂ = 0.99": "standard-b20.99",
        "partially coupled Adam, β₂ = 0.99": "partial-y0.25-mean-free-b20.99",
        "AdamW, β₁ = 0, β₂ = 0.99": "standard-b10-b20.99",
        "factored without momentum": "factored-mean-free-b10-b20.99",
    }
    trials = [run for run in read_results(STORED / "muon") if run.is_candidate]
    stored = {run.cell: run.metrics["val_loss"] or 0.0 for run in trials}
    shown = {
        f"30M-82M-{names[row[0]]}-lr_factor{factors.get(factor, factor)}": cell
        for row in rows
        for factor, cell in zip(header[1:], row[1:], strict=True)
        if cell.strip("*")[0].isdigit()
    }
    for row in rows:
        cells = {cell: loss for cell, loss in stored.items() if cell.startswith(f"30M-82M-{names[row[0]]}-lr")}
        winner = min(cells, key=lambda cell: cells[cell])
        for cell, loss in cells.items():
            assert shown.pop(cell) == (f"**{loss:.3f}**" if cell == winner else f"{loss:.3f}")
    assert not shown


def test_the_text_about_muon_matches_the_stored_runs() -> None:
    loss, text = with_muon("loss"), section("With Muon for the matrices")
    to_adamw = loss[PARTIAL] - loss["standard"]
    coupled_to_adamw = loss["coupled"] - loss["standard"]
    said = f"partially coupled Adam {-to_adamw.mean():.2f} below ({interval(-to_adamw)}) and Coupled Adam"
    assert f"{said} {-coupled_to_adamw.mean():.2f} below ({interval(-coupled_to_adamw)})" in text
    first, second, third = -to_adamw
    assert f"is {first:.3f}, {second:.3f} and {third:.3f} below AdamW with the same seed" in text
    to_coupled = loss[PARTIAL] - loss["coupled"]
    assert f"it is {-to_coupled.mean():.2f} lower (interval {interval(-to_coupled)}, not corrected)" in text
    bins = [with_muon(f"frequency_loss_{i}") for i in range(1, 11)]
    leads = [losses["standard"] - losses[PARTIAL] for losses in bins]
    assert min(lead.mean() for lead in leads) > 0
    said = f"by {leads[0].mean():.2f} nats on the most frequent half of the text ({interval(leads[0])}) and by"
    assert f"{said} {leads[8].mean():.1f} in bin 9 ({interval(leads[8], 2)})" in text
    lost = {kind: with_muon("loss_int4_row")[kind] - loss[kind] for kind in OPTIMIZERS}
    first, coupled, partial = (lost[kind] - lost["standard"] for kind in OPTIMIZERS)
    assert not first.any()
    said = f"AdamW loses {lost['standard'].mean():.2f}, Coupled Adam {lost['coupled'].mean():.2f} (difference"
    said += f" {coupled.mean():.3f}, {interval(coupled)}) and partially coupled Adam {lost[PARTIAL].mean():.2f}"
    assert f"{said} ({partial.mean():.3f}, {interval(partial)})" in section("Is the table easier")


def test_the_test_loss_with_a_bfloat16_residual_stream_is_that_of_the_stored_run() -> None:
    [narrow] = read_results(STORED / "residual-dtype")
    wide = {run.seed: run for run in main_runs() if (run.tokens, run.optimizer) == (SHORT, "coupled")}
    text = " ".join((DOCS / "performance.md").read_text().split())
    assert f"test loss of {narrow.metrics['loss']:.3f} with the bfloat16 stream (commit {narrow.commit})" in text
    assert f"{wide[1].metrics['loss']:.3f} with float32 (commit {wide[1].commit})" in text
    values = np.array([wide[seed].metrics["loss"] for seed in (1, 2, 3)])
    assert mean_and_spread(values) in text


def test_the_summary_of_best_against_best_matches_the_stored_runs() -> None:
    """The rarest sixteenth of the text: bins 5 to 10."""
    gaps = [
        (best(f"frequency_loss_{i}")["standard"] - best(f"frequency_loss_{i}")[PARTIAL]).mean() for i in range(5, 11)
    ]
    targets = [best(f"frequency_targets_{i}")["standard"].mean() for i in range(1, 11)]
    assert round(sum(targets) / sum(targets[4:])) == 16
    summary = section("# Results")
    assert f"rarest sixteenth of the text its loss is {min(gaps):.1f} to {max(gaps):.1f} nats lower" in summary
