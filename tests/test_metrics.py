"""The registry of metrics: one key, label and direction for each, wherever it is stored or shown."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import coupled_adam
from coupled_adam import metrics as registry
from coupled_adam.cli import app
from coupled_adam.embeddings import EmbeddingMetrics
from coupled_adam.metrics import METRICS, TABLE_METRICS, Metric, logged_key, other_tasks, table_key, up_to_date
from coupled_adam.paper_tasks import PAPER_TASKS, label_of
from coupled_adam.report.shown_metrics import named

PACKAGE = Path(coupled_adam.__file__).parent
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def test_every_metric_is_named_and_explained() -> None:
    for key, metric in METRICS.items():
        assert metric.key == key
        assert metric.label
        assert metric.meaning
        assert metric.symbol
        assert metric.better in ("lower", "higher", None)
        assert metric.latex.isascii()
    labels = [metric.label for metric in METRICS.values()]
    assert len(labels) == len(set(labels))


def test_table_metrics_are_the_numeric_fields_of_the_record() -> None:
    counted = {"shape", "word_similarity", "singular_values", "norms", "zero_rows", "unseen_rows"}
    assert {metric.key for metric in TABLE_METRICS} == EmbeddingMetrics.__dataclass_fields__.keys() - counted


def test_an_untied_input_table_has_the_same_metrics_in_the_same_direction() -> None:
    for metric in TABLE_METRICS:
        of_input = METRICS[table_key("input", metric.key)]
        assert (of_input.better, of_input.decimals, of_input.of_table) == (metric.better, metric.decimals, True)
        assert of_input.published_key is None
        assert METRICS[table_key("output", metric.key)] == metric


def test_tasks_are_those_requested_from_lm_eval() -> None:
    assert [task.key for task in PAPER_TASKS] == [metric.key for metric in registry.TASKS]
    assert [label_of(task.name) for task in PAPER_TASKS] == [metric.label for metric in registry.TASKS]
    assert (label_of("piqa"), label_of("loss")) == ("piqa", "loss")


def test_missing_names_are_derived_from_the_label() -> None:
    metric = Metric("a_b", "a_b 5%", None, 2, "a test")
    assert (metric.symbol, metric.short, metric.latex) == ("a_b 5%", "a_b 5%", r"a\_b 5\%")
    (task,) = other_tasks([{"my_task": 0.5, "loss": 3.0, "task_limit": 5, "theory_batches": 2}])
    assert (task.key, task.latex_heading) == ("my_task", r"my\_task ($\uparrow$)")


def test_the_training_display_is_ascii() -> None:
    for key in ("train_loss", "lr", "grad_norm", "mu_norm_ratio", "tokens_per_second", "mfu"):
        assert METRICS[key].short.isascii()


def test_the_loss_of_a_row_belongs_to_its_split() -> None:
    assert [logged_key(kind, "loss") for kind in ("train", "val", "test")] == ["train_loss", "val_loss", "loss"]
    assert logged_key("train", "lr") == "lr"
    assert {logged_key(kind, "loss") for kind in ("train", "val", "test")} <= METRICS.keys()


def test_keys_of_older_versions_are_updated() -> None:
    row = {
        "kind": "embeddings",
        "step": 8,
        "output_iso_score": 0.5,
        "input_iso": 0.1,
        "output_simlex_999_pearson": None,
    }
    now = {"kind": "embeddings", "step": 8, "iso_score": 0.5, "input_iso": 0.1, "simlex_999_pearson": None}
    assert up_to_date(row, "embeddings") == now
    assert up_to_date(now, "embeddings") == now
    assert up_to_date({"isoscore": 0.5, "input_isoscore": 0.4}) == {"iso_score": 0.5, "input_iso_score": 0.4}
    # An lm-eval task may have any name.
    assert up_to_date({"output_format": 0.5}) == {"output_format": 0.5}
    assert up_to_date({"output_x": 1.0}, "train") == {"output_x": 1.0}


def test_published_results_have_no_key_that_the_registry_lacks() -> None:
    from coupled_adam.study.results import read_results
    from coupled_adam.training.logbook import read_metrics

    studies = sorted(path.parent for path in RESULTS.glob("*/results.jsonl"))
    assert studies
    for study in studies:
        stored = [json.loads(line)["metrics"] for line in (study / "results.jsonl").read_text().splitlines()]
        for result, before in zip(read_results(study), stored, strict=True):
            assert list(result.metrics.values()) == list(before.values())
            assert not other_tasks([result.metrics])
    files = sorted(RESULTS.glob("*/runs/*/*/metrics.jsonl"))
    assert files
    logged = {"zero_rows", "unseen_rows"}
    for path in files:
        for row in read_metrics(path):
            own = {logged_key(row["kind"], key) for key in row.keys() - {"kind", "step"}}
            unknown = own - METRICS.keys() - logged - {f"input_{key}" for key in logged}
            of_benchmarks = ("_pearson", "_spearman", "_pairs_used", "_pairs_total")
            assert all(key.endswith(of_benchmarks) for key in unknown), unknown


def test_the_registry_imports_only_base() -> None:
    code = "import sys, coupled_adam.metrics; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in found if name.startswith("coupled_adam.")}
    assert ours - {"coupled_adam.metrics"} == {name for name in ours if name.startswith("coupled_adam.base")}
    assert "torch" not in found


def strings_of(path: Path) -> set[str]:
    """The string constants of a module, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return {node.value for node in texts if isinstance(node.value, str)}


def test_no_other_module_names_or_explains_a_metric() -> None:
    names = {
        text
        for metric in METRICS.values()
        for text in (metric.label, metric.symbol, metric.latex, metric.short, metric.meaning, metric.heading)
        # A word or a letter may mean something else, and text equal to the key is not a second name.
        if text not in METRICS and len(text) > 1 and (" " in text or not text.isascii() or text.startswith("$"))
    } - {METRICS["lr"].label}  # it is also an option of optimizers
    assert {"mean-embedding ratio", "training loss", "‖μ‖ ratio", r"$\kappa$", registry.NATS} <= names
    again = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "metrics.py" and (found := names & strings_of(path)):
            again[str(path.relative_to(PACKAGE))] = sorted(found)
    assert again == {}


def test_inspect_shows_labels_and_directions_of_the_registry(tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.random.default_rng(0).standard_normal((50, 8)).astype("float32"))
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["inspect", str(tmp_path / "table.npy")])
    shown = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert {metric.label_with_arrow for metric in TABLE_METRICS} <= set(shown)


def test_summary_of_a_training_shows_labels_and_directions_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coupled_adam.commands import train
    from coupled_adam.training import run

    values: dict[str, float | None] = dict.fromkeys(train.SHOWN, 0.25)
    outcome = run.Outcome(tmp_path, 10, 10, None, 5.0, values | {"lr": 1e-3})
    monkeypatch.setattr(run, "run_training", lambda *_, **__: outcome)
    settings = [f"data.folder={tmp_path}", "data.source=none", "model.vocabulary_size=64"]
    options = [f"--set={setting}" for setting in settings]
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["train", "tiny", *options, f"--out={tmp_path}"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    shown = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in lines if line.startswith("│")}
    expected = {key: "0.250" if key.endswith("loss") else "0.25" for key in train.SHOWN}
    assert shown == {METRICS[key].label_with_arrow: text for key, text in expected.items()}


def test_pages_and_tables_of_a_study_show_labels_and_directions_of_the_registry() -> None:
    report_tables = pytest.importorskip("coupled_adam.report.page_tables")
    from coupled_adam.report.grid import gather_grid
    from coupled_adam.report.result_tables import build_tables
    from coupled_adam.study.results import read_results

    results = read_results(RESULTS / "single-gpu")
    (runs,) = (table for table in build_tables(gather_grid(results)) if table.name == "runs")
    for column in runs.columns:
        if column.key in METRICS and column.key != "tokens_per_second":
            metric = METRICS[column.key]
            assert (column.label, column.latex) == (metric.heading, metric.latex_heading)
    head = {str(cell.html) for cell in report_tables.page_table(runs, {}).head}
    measured = {column.key for column in runs.columns} & {metric.key for metric in registry.MAIN}
    # The paper's metrics and the cost of a run; the others are in the CSV file.
    assert head >= {METRICS[key].heading for key in measured} | {"time", METRICS["tokens_per_second"].symbol}
    assert not head & {metric.heading for metric in registry.OTHERS}
    for metric in registry.MAIN:
        label, meaning = report_tables.label_and_meaning(metric, results)
        assert label.split("\N{NO-BREAK SPACE}") == [metric.label, metric.arrow]
        assert meaning == metric.meaning


def test_a_loss_of_both_splits_names_both() -> None:
    assert named(METRICS["loss"], {"test"}).label == "test loss"
    assert named(METRICS["loss"], {"val"}).label == "validation loss"
    assert named(METRICS["loss"], {"test", "val"}).label == f"test or {METRICS['val_loss'].label}"
