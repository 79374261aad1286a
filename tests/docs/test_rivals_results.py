"""docs/results.md on the rivals: its tables and numbers match the stored runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from page_examples import read_examples, run_beside_tiny
from page_text import ROOT, cells_of, lines_of, section, table_lines, words
from paired_differences import contains_zero, interval, mean_and_interval
from stored_runs import reported

from coupled_adam.report.grid import gather_grid
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.table_formats import to_markdown_table
from coupled_adam.study.results import read_results

STORED = ROOT / "docs" / "results" / "rivals"
PARTIAL = "partial y=0.25 mean-free"
LONGER = "standard b2=0.99"
BINS = range(1, 11)


def values(optimizer: str, metric: str = "loss") -> dict[int, float]:
    """A metric of an optimizer by seed."""
    return {run.seed: run.metrics[metric] or 0.0 for run in reported("rivals") if run.optimizer == optimizer}


def mean(optimizer: str, metric: str = "loss") -> float:
    return float(np.mean(list(values(optimizer, metric).values())))


def differences(optimizer: str, baseline: str, metric: str = "loss") -> np.ndarray:
    """Differences by seed, for the seeds that both have."""
    first, second = values(optimizer, metric), values(baseline, metric)
    return np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])


def by_bin(optimizer: str) -> np.ndarray:
    """The mean difference in loss from AdamW in each bin of token frequency, paired by seed."""
    return np.array([differences(optimizer, "standard", f"frequency_loss_{i}").mean() for i in BINS])


def rivals_section() -> str:
    return section("Against every rival")


@pytest.mark.parametrize("name", ["ranking", "primary"])
def test_a_table_of_rivals_and_later_methods_matches_the_stored_runs(name: str) -> None:
    found = reported("rivals", "table-beta2-30m")
    [table] = [table for table in build_tables(gather_grid(found)) if table.name == name]
    assert lines_of(f"rivals {name}") == table_lines(to_markdown_table(table))
    assert f"All {len({run.optimizer for run in found})} methods" in words("docs/results.md")


def test_the_gain_by_steps_between_occurrences_matches_the_stored_runs() -> None:
    _, _, intervals, *gains = cells_of("rivals intervals")
    [metrics] = [run.metrics for run in reported("rivals") if (run.optimizer, run.seed) == ("standard", 1)]
    targets = np.array([metrics[f"frequency_targets_{i}"] for i in BINS], dtype=np.float64)
    tokens = np.array([metrics[f"frequency_tokens_{i}"] for i in BINS], dtype=np.float64)
    between = tokens / (targets / targets.sum() * 16 * 1024)
    assert intervals[1:] == [f"{steps:.1f}" if steps < 10 else f"{steps:.0f}" for steps in between]
    for optimizer, (_, *cells) in zip((LONGER, PARTIAL), gains, strict=True):
        found = [differences(optimizer, "standard", f"frequency_loss_{i}") for i in BINS]
        assert cells == [f"[{gap.mean():.2f}]" if contains_zero(gap) else f"{gap.mean():.2f}" for gap in found]


def test_the_text_about_rivals_matches_the_stored_runs() -> None:
    text = rivals_section()
    first, second, third = differences(LONGER, "standard")
    assert f"is {first:.3f}, {second:.3f} and {third:.3f} with the three seeds" in text
    above = differences(PARTIAL, LONGER)
    by_seed = f"Adam is {above[0]:.3f}, {above[1]:.3f} and {above[2]:.3f} above it"
    assert f"{by_seed} (interval of the mean {interval(above)})" in text
    assert f"is {-np.mean([first, second, third]):.2f} below AdamW ({from_adamw(LONGER, sign=-1)})" in text
    assert f"and {above.mean():.2f} below partially coupled Adam" in text
    for metric, digits in (("r_cos", 0), ("mu_norm_ratio", 2), ("iso", 2)):
        own, adamw, partial = (f"{mean(name, metric):.{digits}f}" for name in (LONGER, "standard", PARTIAL))
        assert re.search(rf"is {own} \({adamw} and {partial}\)", text), metric
    below = -differences("factored b1=0", PARTIAL)
    to_adamw = -differences("factored b1=0", "standard").mean()
    assert f"of the 13: {to_adamw:.2f} below AdamW (not significant after the correction)" in text
    assert f"and {below.mean():.2f} below partially coupled Adam ({interval(below)})" in text
    worse = differences("coupled", "standard")
    assert f"Coupled Adam is {worse.mean():.2f} above AdamW ({interval(worse)})" in text
    assert (
        f"(`factored`) it is {-differences('factored', 'standard').mean():.2f} below AdamW; one number per row" in text
    )
    assert f"Adam-mini) is {-differences('per-row', 'standard').mean():.2f} below. Neither is significant." in text
    small = [differences(name, "standard")[0] for name in ("mu-loss", "z-loss", "soft cap 30")]
    assert f"{min(small):.3f} to {max(small):.3f} above AdamW, with the same embeddings" in text
    for worse in ("standard centred", "per-table", "sgd"):
        assert differences(worse, "standard")[0] > 0.02


def test_what_cannot_be_told_from_partially_coupled_adam_matches_the_stored_runs() -> None:
    below = {name: -differences(PARTIAL, name) for name in ("factored", "per-row")}
    first, second = below.values()
    said = f"`factored` ({abs(first.mean()):.3f} apart, {interval(first)}) and `per-row` ({second.mean():.3f} below"
    assert f"cannot be told from {said}, {interval(second)})." in rivals_section()
    assert all(contains_zero(values) for values in below.values())


def test_where_the_method_without_momentum_is_ahead_matches_the_stored_runs() -> None:
    gaps, with_momentum = by_bin("factored b1=0"), by_bin("factored")
    assert [gap < 0 for gap in gaps] == [True] * 8 + [False] * 2
    assert "`factored b1=0` is ahead in bins 1 to 8" in rivals_section()
    assert (with_momentum[3:7] < -0.1).all()  # "`factored` gains in bins 4 to 7"
    assert (with_momentum[4:8] < 0.5 * gaps[4:8]).all()  # "most of its gain"


def test_where_the_gain_from_a_longer_memory_comes_from_matches_the_stored_runs() -> None:
    gaps = by_bin(LONGER)
    targets = np.array([mean("standard", f"frequency_targets_{i}") for i in BINS])
    assert list(gaps[:9]) == sorted(gaps[:9], reverse=True)  # "grows ... up to bin 9"
    assert gaps[9] > gaps[8]
    share, text = (gaps * targets)[:5].sum() / (gaps * targets).sum(), targets[:5].sum() / targets.sum()
    expected = f"give {100 * share:.0f}% of the gain in the mean loss, because they have {100 * text:.0f}% of the text"
    assert expected in rivals_section()


def test_the_calibration_of_the_rarest_tokens_matches_the_stored_runs() -> None:
    own, adamw, partial = (f"e^{mean(name, 'frequency_calibration_10'):.2f}" for name in (LONGER, "standard", PARTIAL))
    text = rivals_section()
    assert f"{own} of the observed share, compared with {adamw} with AdamW and {partial} with partially" in text


def test_the_distance_to_the_best_runs_of_partially_coupled_adam_matches_the_stored_runs() -> None:
    tuned = {
        run.seed: run.metrics["loss"]
        for run in read_results(STORED.parent / "best-learning-rates")
        if run.optimizer == f"{PARTIAL} lr=0.002"
    }
    gaps = [tuned[seed] - values(LONGER)[seed] for seed in (1, 2, 3)]
    losses = np.array(list(tuned.values()))
    shown = f"{losses.mean():.2f}({100 * losses.std(ddof=1):.0f})"
    by_seed = f"{gaps[0]:.2f}, {gaps[1]:.2f} and {gaps[2]:.2f} above it"
    assert f"reaches {shown}, and is {by_seed} ({interval(gaps)})" in rivals_section()


def test_the_rank_on_the_seed_that_all_methods_have_matches_the_stored_runs() -> None:
    first_seed = {run.optimizer: run.metrics["loss"] for run in reported("rivals") if run.seed == 1}
    assert len(first_seed) == 13
    assert sorted(first_seed, key=lambda name: first_seed[name]).index(PARTIAL) == 4
    means = sorted(first_seed, key=mean)
    assert means.index(PARTIAL) == 3
    assert all(len(values(name)) == 3 for name in means[:6])


def test_what_int4_costs_the_tables_of_rivals_matches_the_stored_runs() -> None:
    lost = {name: mean(name, "loss_int4_row") - mean(name) for name in (LONGER, "factored")}
    names = ("coupled", *lost)
    costs = {name: differences(name, "standard", "loss_int4_row") - differences(name, "standard") for name in names}
    shown = {name: f"{values.mean():.3f}, {interval(values)}" for name, values in costs.items()}
    text = section("Is the table easier")
    assert f"with β₂ = 0.99 loses {lost[LONGER]:.2f} (difference from AdamW {shown[LONGER]})" in text
    assert f"{lost['factored']:.2f}, not significantly less than AdamW ({shown['factored']})" in text
    assert f"rates for the table the difference is {mean_and_interval(costs['coupled'])}" in text


def test_the_selected_learning_rates_of_the_rivals_are_named() -> None:
    rows = [json.loads(line) for line in (STORED / "results.jsonl").read_text().splitlines()]
    chosen = {row["optimizer"]: row["trial"]["value"] for row in rows if not row["trial"]["is_candidate"]}
    assert chosen.pop("coupled") == 1
    assert chosen.pop("per-table") == pytest.approx(1 / 3, abs=1e-6)
    assert chosen.pop("sgd") == 300
    assert set(chosen.values()) == {3}
    reused = {(row["optimizer"], row["seed"]) for row in rows if row["commit"] == "9d41836-dirty"}
    assert reused == {("coupled", 2), ("coupled", 3)}
    assert {row["commit"] for row in rows} == {"03feb3e", "6780b24", "9d41836-dirty"}


def test_two_repeats_of_one_run_differ_as_the_page_says() -> None:
    [other] = [
        run
        for run in read_results(STORED.parent / "best-learning-rates")
        if (run.optimizer, run.seed) == ("coupled lr=0.001", 1)
    ]
    [own] = [run for run in reported("rivals") if (run.optimizer, run.seed) == ("coupled", 1)]
    assert own.config_hash == other.config_hash
    losses = own.metrics["loss"] or 0.0, other.metrics["loss"] or 0.0
    assert f"ended at {losses[0]:.3f} and {losses[1]:.3f}" in rivals_section()
    assert f"ended {losses[0] - losses[1]:.3f} apart" in words("docs/results.md").replace("](#against-every-rival)", "")


def test_the_conclusion_names_the_best_rival() -> None:
    ahead = differences(PARTIAL, LONGER)
    said = f"{ahead.mean():.2f} below partially coupled Adam at 82M tokens with tuned table rates ({interval(ahead)})"
    assert said in section("# Results")


def from_adamw(optimizer: str, sign: int = 1) -> str:
    """The 95% interval of the paired difference from AdamW, or of the lead over it."""
    return interval(sign * differences(optimizer, "standard"))


def test_the_advice_on_beta2_matches_the_stored_runs() -> None:
    text = words("docs/should-i-use-it.md")
    gains = -by_bin(LONGER)
    rarest = gains[5:]
    by_seed = [-differences(LONGER, "standard", f"frequency_loss_{i}") for i in BINS]
    shown = f"by {gains[0]:.2f} nats on the most frequent half of the text ({interval(by_seed[0])}), and by"
    assert f"{shown} {min(rarest):.1f} to {max(rarest):.1f}" in text
    assert not any(contains_zero(each) for each in by_seed[5:])  # "where all intervals exclude zero"
    later = -differences(LONGER, "standard")[1:]
    said = f"three seeds; 95% interval {from_adamw(LONGER, sign=-1)}; seed 1 suggested the other two, on which alone"
    assert f"{said} it fell by {later.mean():.3f}, {interval(later)})" in text
    assert f"; mean {-later.mean():.3f}, {interval(-later)})" in rivals_section()
    assert f"it was 0.03 ahead ([{from_adamw(PARTIAL, sign=-1)}]" in text
    trials = {run.cell: run.metrics["val_loss"] or 0.0 for run in read_results(STORED) if run.is_candidate}
    names = ("standard", "standard-b20.99", "factored-b10")
    plain, longer, without_momentum = (trials[f"30M-20.5M-{name}-lr_factor3"] for name in names)
    assert f"after 1,251 steps the validation loss was {longer:.3f} instead of {plain:.3f} (one seed)" in text
    assert f"was lower still, {without_momentum:.3f}" in text
    assert without_momentum == min(trials.values())
    said = f"{without_momentum:.3f}, compared with {longer:.3f} for AdamW with β₂ = 0.99 and {plain:.3f} for AdamW"
    assert said in rivals_section()
    targets = [mean("standard", f"frequency_targets_{i}") for i in BINS]
    assert f"on the rarest {100 * sum(targets[5:]) / sum(targets):.0f}%" in text
    similarity = interval(differences(LONGER, "standard", "r_cos"), 1)
    said = f"r_cos rose from {mean('standard', 'r_cos'):.0f} to {mean(LONGER, 'r_cos'):.0f} (by {similarity})"
    assert said in text


def test_the_example_gives_only_the_table_other_betas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, example = read_examples(ROOT / "docs/should-i-use-it.md")
    names = run_beside_tiny(example, tmp_path, monkeypatch)
    by_betas: dict[tuple[float, float], set[int]] = {}
    for group in names["optimizer"].param_groups:
        by_betas.setdefault(group["betas"], set()).update(id(tensor) for tensor in group["params"])
    assert by_betas.pop((0.0, 0.99)) == {id(names["model"].embedding.weight)}
    assert list(by_betas) == [(0.9, 0.95)]
    rates = {group["lr"]: group["betas"] for group in names["optimizer"].param_groups}
    assert rates == {3e-3: (0.0, 0.99), 1e-3: (0.9, 0.95)}
