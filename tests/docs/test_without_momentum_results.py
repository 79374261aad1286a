"""docs/results.md on tables without momentum and on beta2 = 0.99 with 262M tokens: its text matches the stored runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from page_examples import read_examples, run_beside_tiny
from page_text import ROOT, section, words
from paired_differences import interval
from stored_runs import STORED, reported

from coupled_adam.study.results import read_results

SHORT, LONG = 82_000_000, 262_000_000
PARTIAL = "partial y=0.25 mean-free"
FACTORED = "factored mean-free b1=0 b2=0.99"
LONGER = "standard b2=0.99"
SAME_BETAS = "standard b1=0 b2=0.99"
CELL, SAME_BETAS_CELL = "factored-mean-free-b10-b20.99", "standard-b10-b20.99"
NAMES = ("standard", "coupled", PARTIAL)


def values(optimizer: str, metric: str = "loss", tokens: int = SHORT) -> dict[int, float]:
    """A metric by seed, of the studies with tuned tables (82M tokens) or of those with one learning rate (262M)."""
    tuned, at_one_rate = ("rivals", "table-beta2-30m"), ("single-gpu", "partially-coupled", "single-gpu-beta2")
    found = reported(*(tuned if tokens == SHORT else at_one_rate))
    own = [run for run in found if (run.optimizer, run.tokens) == (optimizer, tokens)]
    return {run.seed: run.metrics[metric] or 0.0 for run in own}


def below(optimizer: str, metric: str = "loss") -> np.ndarray:
    """How far factored without momentum is below another optimizer, by seed."""
    own, other = values(FACTORED, metric), values(optimizer, metric)
    return np.array([other[seed] - own[seed] for seed in (1, 2, 3)])


def text() -> str:
    return section("A table without momentum")


def test_the_leads_with_82m_tokens_match_the_stored_runs() -> None:
    lead = below("standard")
    assert f"Factored without momentum ends {lead.mean():.3f} below AdamW ({interval(lead)})" in text()
    later = lead[1:]
    said = f"On these two alone it is {lead[1]:.3f} and {lead[2]:.3f} below AdamW"
    assert f"{said} ({later.mean():.3f}, {interval(later)})" in text()
    assert f"the difference is {-later.mean():.3f} ({interval(-later)})" in words("docs/should-i-use-it.md")
    longer, partial, without = below(LONGER), below(PARTIAL), below("factored b1=0")
    by_seed = f"is {longer[0]:.3f}, {longer[1]:.3f} and {longer[2]:.3f} below AdamW with β₂ = 0.99"
    assert f"{by_seed} (mean {longer.mean():.3f}, {interval(longer)})" in text()
    assert f"{partial.mean():.2f} below partially coupled Adam with the same tuning ({interval(partial)})" in text()
    assert f"{without.mean():.2f} below `factored b1=0` ({interval(without)})" in text()
    summary = section("# Results")
    long = values(LONGER, tokens=LONG)[1] - values(FACTORED, tokens=LONG)[1]
    assert f"is smaller: {longer.mean():.2f} with 82M tokens ({interval(longer)})" in summary
    assert f"and {long:.2f} after 262M tokens (one seed, so not evidence)" in summary
    for page in ("docs/should-i-use-it.md", "docs/using-coupledadamw.md"):
        assert f"({interval(lead)})" in words(page) or f"(95% interval {interval(lead)})" in words(page), page


def test_the_share_of_the_betas_matches_the_stored_runs() -> None:
    adamw, longer, same_betas = (values(name)[1] for name in ("standard", LONGER, SAME_BETAS))
    gains = f"β₂ = 0.99 gains AdamW {adamw - longer:.2f} and leaving out the momentum another {longer - same_betas:.2f}"
    assert gains in text()
    assert f"has {same_betas:.3f} with seed 1, the other {values(FACTORED)[1]:.3f}" in text()
    few = {run.optimizer: run.metrics["loss"] or 0.0 for run in reported("few-steps")}
    lower = values(FACTORED)[1] - same_betas, few[FACTORED] - few[SAME_BETAS]
    shown = f"{lower[0]:.3f} and {lower[1]:.3f}"
    assert f"cannot be told from it: {shown} lower in two settings" in section("# Results")
    assert f"ranks 1 and 2 change places: {values(FACTORED)[1]:.3f} and {same_betas:.3f}" in section("# Results")
    assert f"[{shown} lower](docs/results.md#a-table-without-momentum) in two settings" in words("README.md")
    assert f"its test loss was {shown} lower in two settings" in words("docs/should-i-use-it.md")
    assert max(values(LONGER), key=values(LONGER).__getitem__) == 1  # "seed 1 is the worst of the three"
    iso, r_cos = (values(SAME_BETAS, metric)[1] for metric in ("iso", "r_cos"))
    assert f"ISO {iso:.2f} and r_cos {r_cos:.0f}" in text()


def test_the_gains_by_frequency_and_the_cost_of_int4_match_the_stored_runs() -> None:
    bins = [below("standard", f"frequency_loss_{i}") for i in range(1, 11)]
    assert min(gap.min() for gap in bins) > 0  # "in all ten bins"
    frequent = f"by {bins[0].mean():.2f} nats in bin 1 ({interval(bins[0])})"
    assert f"{frequent} and by {bins[8].mean():.1f} in bin 9 ({interval(bins[8], 2)})" in text()
    several = {run.optimizer for run in reported("rivals", "table-beta2-30m") if run.seed == 3} - {FACTORED}
    assert len(several) == 8
    for i in range(1, 11):
        own, *others = (
            np.mean(list(values(name, f"frequency_loss_{i}").values())) for name in (FACTORED, *sorted(several))
        )
        assert own < min(others)


def test_the_changes_by_a_longer_memory_match_the_stored_runs() -> None:
    longer, plain = values(f"{PARTIAL} b2=0.99"), values(PARTIAL)
    change = np.array([longer[seed] - plain[seed] for seed in (1, 2, 3)])
    assert f"row exponent 0.25 by {change.mean():.3f} ({interval(change)})" in text()
    [repeat] = [run for run in reported("best-learning-rates") if (run.optimizer, run.seed) == ("coupled lr=0.001", 1)]
    repeats = values("coupled")[1], repeat.metrics["loss"] or 0.0
    changes = [f"{values('coupled b2=0.99')[1] - loss:.3f}" for loss in repeats]
    assert f"Coupled Adam by {changes[0]} or {changes[1]} (one seed" in text()
    gains = [values(name, tokens=LONG)[1] - values(f"{name} b2=0.99", tokens=LONG)[1] for name in NAMES]
    assert f"lowers the loss of AdamW by {gains[0]:.3f}." in text()
    assert f"Coupled Adam falls by {gains[1]:.3f} and that of partially coupled Adam by {gains[2]:.3f}" in text()
    ahead = values(LONGER, tokens=LONG)[1] - values(f"{PARTIAL} b2=0.99", tokens=LONG)[1]
    assert f"with 0.99 is then {ahead:.3f} below AdamW with 0.99" in text()
    pair = [values(name, tokens=LONG)[1] for name in (f"{PARTIAL} b2=0.99", FACTORED)]
    assert f"level with factored without momentum: {pair[0]:.3f} and {pair[1]:.3f} (one seed)" in text()


def test_the_lead_that_vanishes_in_the_longest_run_matches_the_stored_curves() -> None:
    curves = []
    for cell in (CELL, "partial-y0.25-mean-free-b20.99"):
        lines = (STORED / f"single-gpu-beta2/runs/30M-262M-{cell}/seed-1/metrics.jsonl").read_text().splitlines()
        curves.append({row["step"]: row["loss"] for row in map(json.loads, lines)})
    leads = {step: curves[1][step] - loss for step, loss in curves[0].items()}
    assert f"is {leads[500]:.2f} lower at step 500 and {leads[5000]:.2f} lower at step 5,000" in text()
    assert leads[max(leads)] < 0 < leads[10_000]


def curve(study: str, cell: str, seed: int = 1) -> dict[int, float]:
    """Validation loss by step."""
    lines = (STORED / study / "runs" / cell / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("study", "baseline", "size"),
    [
        ("table-beta2-30m", "rivals", "30M-82M"),
        ("muon", "muon", "30M-82M"),
        ("single-gpu-beta2", "single-gpu", "30M-262M"),
        ("single-gpu-125m", "single-gpu-125m", "125M-250M"),
    ],
)
def test_the_lead_is_largest_before_step_2000_and_shrinks_in_every_longer_run(
    study: str, baseline: str, size: str
) -> None:
    seeds = (1, 2, 3) if size == "30M-82M" else (1,)
    for seed in seeds:
        own, adamw = curve(study, f"{size}-{CELL}", seed), curve(baseline, f"{size}-standard", seed)
        lead = {step: adamw[step] - own[step] for step in own}
        assert max(lead, key=lead.__getitem__) <= 2000
        largest, last = max(lead.values()), lead[max(lead)]
        if len(seeds) == 1:
            for page in ("docs/results.md", "docs/should-i-use-it.md"):
                assert f"from {largest:.2f} to {last:.2f} " in words(page)


def test_adamw_with_the_same_betas_is_ahead_early() -> None:
    own, other = (curve("table-beta2-30m", f"30M-82M-{cell}") for cell in (CELL, SAME_BETAS_CELL))
    ahead = {step: own[step] - other[step] for step in own}
    assert min(ahead.values()) > 0  # "at every validation"
    said = f"by {ahead[500]:.2f} at step 500, {ahead[1000]:.2f} at step 1,000 and {ahead[max(ahead)]:.3f} at the end"
    assert said in text()


def test_the_differences_from_adamw_with_a_longer_memory_match_the_stored_runs() -> None:
    """Coupled and partially coupled Adam: 82M tokens, with Muon, and after 262M tokens with one seed."""
    muon = {(run.optimizer, run.seed): run.metrics["loss"] or 0.0 for run in reported("muon")}
    readme, summary = words("README.md"), section("# Results")
    above = {}
    for name in ("coupled", PARTIAL):
        short = np.array([values(name)[seed] - values(LONGER)[seed] for seed in (1, 2, 3)])
        with_muon = np.array([muon[name, seed] - muon[LONGER, seed] for seed in (1, 2, 3)])
        above[name] = short, with_muon, values(name, tokens=LONG)[1] - values(LONGER, tokens=LONG)[1]
    short, with_muon, long = above["coupled"]
    assert min(short.min(), with_muon.min(), long) > 0
    said = f"by {short.mean():.2f} ({interval(short)}), with Muon by {with_muon.mean():.2f} ({interval(with_muon)})"
    assert f"{said}, and after 262M tokens by {long:.2f} (one seed, so not evidence)" in summary
    short, with_muon, long = above[PARTIAL]
    assert abs(long) < 0.01  # "level"
    said = f"(by {short.mean():.2f}, {interval(short)}, and by {with_muon.mean():.2f} with Muon, {interval(with_muon)})"
    assert f"{said}, and level after 15,991 (one seed)" in words("docs/using-coupledadamw.md")
    own, with_muon = below(LONGER), np.array([muon[LONGER, seed] - muon[FACTORED, seed] for seed in (1, 2, 3)])
    said = f"is {own.mean():.3f} lower ({interval(own)}), and {with_muon.mean():.3f} with Muon ({interval(with_muon)})"
    assert said in readme


def test_the_gain_over_adamw_with_the_same_betas_by_frequency_matches_the_stored_runs() -> None:
    bins = [
        values(SAME_BETAS, f"frequency_loss_{i}")[1] - values(FACTORED, f"frequency_loss_{i}")[1] for i in range(1, 11)
    ]
    assert [f"{gap:.2f}" for gap in bins[:2]] == ["-0.01", "-0.01"]
    assert f"and {min(bins[5:]):.2f} to {max(bins[5:]):.2f} higher in bins 6 to 10" in text()


def test_the_predictions_came_true_with_the_commit_that_made_them() -> None:
    commits = {run.commit for study in ("muon", "single-gpu-125m", "single-gpu-beta2", "few-steps")
               for run in reported(study) if run.optimizer in (FACTORED, SAME_BETAS)}  # fmt: skip
    assert commits == {"1f59359"}
    assert "committed (1f59359) before the runs" in text()


def test_the_counterexample_of_the_tiny_model_is_on_the_page() -> None:
    tiny = {(run.optimizer, run.seed): run.metrics for run in reported("table-beta2")}
    own, adamw = ([tiny[name, seed] for seed in (1, 2, 3)] for name in ("y=1 b1=0 b2=0.99", "standard"))
    above = [(each["loss"] or 0.0) - (other["loss"] or 0.0) for each, other in zip(own, adamw, strict=True)]
    assert min(above) > 0
    by_seed = f"{above[0]:.2f}, {above[1]:.2f} and {above[2]:.2f}"
    mean = f"{np.mean(above):.2f}"
    assert f"with all three seeds ({mean} on average, {interval(above)})" in words("docs/should-i-use-it.md")
    assert f"it is {by_seed} above AdamW with the three seeds" in text()
    assert f"above AdamW with every seed: by {by_seed}" in section("Which beta2")
    iso = [each["iso"] or 0.0 for each in own]
    assert f"ISO of {min(iso):.2f} to {max(iso):.2f}" in text()
    trials = {
        run.cell: run.metrics["val_loss"] or 0.0 for run in read_results(STORED / "table-beta2") if run.is_candidate
    }
    for factor in (1, 3, 9):
        names = ("y1-b10-b20.99", "standard")
        plain, other = (next(v for c, v in trials.items() if c.endswith(f"-{n}-lr_factor{factor}")) for n in names)
        assert plain < other


def test_trials_and_calibration_without_momentum_match_the_stored_runs() -> None:
    def trial(study: str, cell: str) -> float:
        return next(run.metrics["val_loss"] or 0.0 for run in read_results(STORED / study) if run.cell == cell)

    short = [trial("table-beta2-30m", f"30M-20.5M-{name}-lr_factor3") for name in (CELL, SAME_BETAS_CELL)]
    assert f"in the trials after 20.5M tokens it was {short[0] - short[1]:.2f} lower" in text()
    assert f"mean-free {short[0]:.3f}, and AdamW with both betas {short[1]:.3f}" in words("docs/should-i-use-it.md")
    own, other = trial("muon", f"30M-82M-{CELL}-lr_factor3"), trial("muon", f"30M-82M-{SAME_BETAS_CELL}-lr_factor9")
    assert f"(validation loss, seed 0) AdamW is {other - own:.3f} higher" in text()
    for page in ("README.md", "docs/results.md"):
        assert f"{other - own:.3f} higher in" in words(page)
    few = {run.optimizer: run.metrics["loss"] or 0.0 for run in reported("few-steps")}
    assert f"where AdamW is {few[FACTORED] - few[SAME_BETAS]:.3f} lower" in text()
    shares = [np.mean(list(values(name, "frequency_calibration_10").values())) for name in (FACTORED, "standard")]
    assert f"e^{shares[0]:.2f} of the observed share with 82M tokens (e^{shares[1]:.2f} with AdamW)" in text()
    muon = {name: [run.metrics["frequency_calibration_10"] for run in reported("muon") if run.optimizer == name]
            for name in (FACTORED, "standard")}  # fmt: skip
    assert f"e^{np.mean(muon[FACTORED]):.2f} with Muon (e^{np.mean(muon['standard']):.2f})" in text()
    of_125m = reported("single-gpu-125m")
    [large] = [run.metrics["frequency_calibration_10"] for run in of_125m if run.optimizer == FACTORED]
    short = {run.optimizer: run.metrics["frequency_calibration_10"] for run in reported("few-steps")}
    said = f"it is e^{large:.2f} after 250M tokens and e^{short[FACTORED]:.2f} after 500 steps"
    assert f"{said} (e^{short['standard']:.2f} with AdamW)" in text()


def test_the_example_trains_only_the_table_without_momentum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, _ = read_examples(ROOT / "docs/should-i-use-it.md")
    names = run_beside_tiny(example, tmp_path, monkeypatch)
    model, optimizer = names["model"], names["optimizer"]
    [table] = [group for group in optimizer.param_groups if group["coupled"]]
    assert (table["lr"], table["betas"], table["row_exponent"], table["mean_free"]) == (3e-3, (0.0, 0.99), 1.0, True)
    assert [id(tensor) for tensor in table["params"]] == [id(model.embedding.weight)]
    assert {group["betas"] for group in optimizer.param_groups if not group["coupled"]} == {(0.9, 0.95)}
    state = optimizer.state[model.embedding.weight]
    assert sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)) - 1 == 101 + 16
