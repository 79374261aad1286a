"""The published numbers: printed as in the paper, found for the right cells, and bold according to its own test."""

import csv
import itertools
import math
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from coupled_adam.base.text import parse_shorthand
from coupled_adam.metrics import MAIN, METRICS
from coupled_adam.models.model_config import ModelConfig, parameter_count
from coupled_adam.report.published import (
    ALL_TABLES,
    MODELS,
    SCALE_TABLES,
    SGD_BEST_TABLES,
    Published,
    find_published,
    lookup,
    paper_optimizers,
    published_numbers,
)
from coupled_adam.report.significance import Summary, compare_summaries

BETTER = {metric.published_key: metric.better for metric in METRICS.values() if metric.published_key}
STANDARD = {"embeddings": "adamw", "tied": True}
COUPLED = {"embeddings": "coupled", "scale_exponent": 0.0, "tied": True}
SMALL = 124_373_760


@pytest.fixture(scope="module")
def paper() -> Path:
    """The folder of the paper's source and its numbers."""
    root = os.environ.get("COUPLED_ADAM_TEST_DATA")
    if root is None or not (Path(root) / "paper").is_dir():
        pytest.skip("set COUPLED_ADAM_TEST_DATA to a folder with paper/paper.tex and paper/results.csv")
    return Path(root) / "paper"


def test_every_number_and_table_is_there() -> None:
    numbers = published_numbers()
    assert len(numbers) == 880
    assert {key[0] for key in numbers} == set(ALL_TABLES)
    assert sum(number.bold for number in numbers.values()) == 184
    assert {key[2] for key in numbers} == set(MODELS)
    assert {key[4] for key in numbers} == set(BETTER)


def test_every_number_is_printed_and_read_back_unchanged() -> None:
    for number in published_numbers().values():
        assert parse_shorthand(number.text) == (number.mean, number.std, number.decimals)


def test_the_packaged_file_equals_the_given_one(paper: Path) -> None:
    with (paper / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 880
    for row in rows:
        found = lookup(*(row[name] for name in ("table", "dataset_tokens", "model_params", "optimizer", "metric")))
        assert (found.mean, found.bold) == (float(row["mean"]), row["bold"] == "1")
        assert found.std == (float(row["std"]) if row["std"] else None)


@pytest.mark.parametrize(
    ("macro", "table", "sizes"),
    [
        ("resultsS", "small_scale", list(itertools.product(("5B", "10B", "20B"), ("125M", "355M", "760M")))),
        ("resultsL", "large_scale", [("26B", "1.3B"), ("52B", "2.6B"), ("105B", "1.3B"), ("210B", "2.6B")]),
    ],
)
def test_shorthand_matches_the_paper(paper: Path, macro: str, table: str, sizes: list[tuple[str, str]]) -> None:
    text = (paper / "paper.tex").read_text(encoding="utf-8")
    body = text.split(rf"\newcommand{{\{macro}}}", 1)[1].split("\n}", 1)[0]
    rows = [row.split("&")[3:] for row in body.split(r"\\") if "&" in row]
    cells = [(size, optimizer) for size in sizes for optimizer in ("Standard", "Coupled")]
    for (size, optimizer), row in zip(cells, rows, strict=True):
        for metric, printed in zip(MAIN, row, strict=True):
            found = lookup(table, *size, optimizer, metric.published_key)
            plain = re.sub(r"\{\\bf|\\tiny|[{} ]", "", printed)
            assert (found.text, found.bold) == (plain.strip(), r"\bf" in printed)


def decided(first: Published, second: Published, better: str) -> bool | None:
    """Whether the second is significantly better than the first; None if the rounding leaves it open.

    Each mean and each standard deviation lies within half a unit of its last printed digit.
    """
    half = 0.5 * 10.0**-first.decimals
    gain = (second.mean - first.mean) * (1 if better == "higher" else -1)
    t_95 = stats.t.ppf(0.95, 2)
    smallest = t_95 * math.hypot(max(0, first.std - half), max(0, second.std - half)) / math.sqrt(3)
    largest = t_95 * math.hypot(first.std + half, second.std + half) / math.sqrt(3)
    if gain - 2 * half > largest + 1e-9:
        return True
    if gain + 2 * half < smallest - 1e-9 or gain + 2 * half < -1e-9:
        return False
    return None


def groups_of(table: str) -> list[tuple[str, dict[str, Published]]]:
    """The paper's comparisons: (metric, numbers by optimizer) for every size."""
    groups: dict[tuple[str, str, str], dict[str, Published]] = defaultdict(dict)
    for (where, dataset, model, optimizer, metric), number in published_numbers().items():
        if where == table:
            groups[dataset, model, metric][optimizer] = number
    return [(metric, numbers) for (_, _, metric), numbers in groups.items()]


# Per table: number of values that can be decided despite rounding, and that agree with the rounded numbers.
@pytest.mark.parametrize(
    ("table", "values", "decidable", "agreeing"),
    [
        ("small_scale", 144, 135, 143),
        ("ablation_scale", 88, 75, 88),
        ("ablation_sgd_best", 48, 39, 46),
        ("ablation_sgd_search", 192, 140, 187),
        ("small_scale_downstream", 144, 63, 135),
        ("ablation_scale_downstream", 88, 72, 88),
        ("ablation_sgd_best_downstream", 48, 23, 43),
    ],
)
def test_bold_numbers_of_the_paper_follow_its_test(table: str, values: int, decidable: int, agreeing: int) -> None:
    count: Counter[str] = Counter()
    for metric, numbers in groups_of(table):
        for name, number in numbers.items():
            others = [other for each, other in numbers.items() if each != name]
            verdicts = [decided(other, number, BETTER[metric]) for other in others]
            # Bold: better than all others. One comparison that is certainly not significant decides against it.
            verdict = False if False in verdicts else None if None in verdicts else True
            ours = all(
                compare_summaries(
                    Summary(3, other.mean, other.std), Summary(3, number.mean, number.std), BETTER[metric]
                ).significant
                for other in others
            )
            count["values"] += 1
            count["agreeing"] += ours == number.bold
            if verdict is not None:
                count["decidable"] += 1
                assert verdict == number.bold, (table, metric, name)
                assert ours == number.bold, (table, metric, name)
    assert count == {"values": values, "decidable": decidable, "agreeing": agreeing}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("125M", ModelConfig("gpt2", 12, 12, 768)),
        ("355M", ModelConfig("gpt2", 24, 16, 1024)),
        ("760M", ModelConfig("gpt2", 24, 16, 1536)),
        ("1.3B", ModelConfig("llama", 24, 32, 2048, context=2048)),
        ("2.6B", ModelConfig("llama", 32, 32, 2560, context=2048)),
    ],
)
def test_models_of_the_paper_are_found_by_their_parameters(name: str, config: ModelConfig) -> None:
    large = config.architecture == "llama"
    dataset, tokens = {"1.3B": ("26B", 26_214_400_000), "2.6B": ("52B", 52 * 10**9)}.get(name, ("10B", 10**10))
    table = "large_scale" if large else "small_scale"
    for settings, optimizer in ((STANDARD, "Standard"), (COUPLED, "Coupled")):
        for metric in MAIN:
            found = find_published(metric.key, tokens, parameter_count(config), settings)
            assert found is not None
            assert found == lookup(table, dataset, name, optimizer, metric.published_key)


def test_rho_log_is_the_rho_of_the_papers_tables() -> None:
    assert find_published("rho_log", 5 * 10**9, SMALL, STANDARD).mean == -54
    assert find_published("rho", 5 * 10**9, SMALL, STANDARD) is None


def test_the_table_decides_what_is_bold() -> None:
    twenty = 20 * 10**9
    assert find_published("acc", twenty, SMALL, COUPLED).bold
    assert not find_published("acc", twenty, SMALL, COUPLED, SCALE_TABLES).bold
    assert not find_published("acc", twenty, SMALL, COUPLED, SGD_BEST_TABLES).bold
    scaled = {**COUPLED, "scale_exponent": -5.0}
    assert find_published("kappa", twenty, SMALL, scaled) == lookup(
        "ablation_scale", "20B", "125M", "Coupled (n=-5)", "kappa"
    )


@pytest.mark.parametrize(
    ("metric", "tokens", "parameters", "settings"),
    [
        ("loss", 6 * 10**9, SMALL, STANDARD),
        ("loss", 5 * 10**9, 30_000_000, STANDARD),
        ("iso_score", 5 * 10**9, SMALL, STANDARD),
        ("unheard of", 5 * 10**9, SMALL, STANDARD),
        ("loss", 5 * 10**9, SMALL, {**STANDARD, "tied": False}),
        ("loss", 5 * 10**9, SMALL, {**COUPLED, "centre": True}),
        ("loss", 5 * 10**9, SMALL, {**COUPLED, "z_loss": 1e-4}),
        ("loss", 5 * 10**9, SMALL, {**COUPLED, "scale_exponent": 0.5}),
        ("loss", 5 * 10**9, SMALL, {"embeddings": "sgd", "sgd_factor": 250.0}),
        ("loss", 5 * 10**9, SMALL, {"embeddings": "sgd", "sgd_factor": 300.0, "sgd_momentum": 0.0}),
        ("loss", 5 * 10**9, SMALL, {}),
        ("loss", 0, 0, STANDARD),
    ],
)
def test_settings_that_are_not_in_the_paper_are_not_found(
    metric: str, tokens: int, parameters: int, settings: dict[str, Any]
) -> None:
    assert find_published(metric, tokens, parameters, settings) is None


def test_every_optimizer_of_the_paper_has_settings() -> None:
    settings = [STANDARD]
    settings += [{"embeddings": "coupled", "scale_exponent": float(n)} for n in range(-5, 6)]
    settings += [{"embeddings": "sgd", "sgd_factor": float(f)} for f in range(100, 700, 100)]
    named = {name for each in settings for name in paper_optimizers(each)}
    assert named == {key[3] for key in published_numbers()}
