"""A study that selects a setting: candidates with their own seed, the winner by validation loss, and the reported runs
with it. Most tests use workers that answer at once; the last ones train small models and kill the study."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest
from fabricated_study import fabricate
from study_cli import study as command
from study_runs import (
    SELECT,
    SLOW_COMMAND,
    comparable,
    kill_all,
    optimizers,
    plan,
    run_here,
    start_command,
    wait_until,
    write_study,
)

from coupled_adam.base.errors import UserError
from coupled_adam.config.loading import given_settings
from coupled_adam.config.run_config import Config
from coupled_adam.config.study_config import load_study, parse_study
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.report.contents import read_report
from coupled_adam.study.expansion import cells_of, with_value_of
from coupled_adam.study.results import from_json, merge_results, read_results, to_json
from coupled_adam.study.trials import Choice, all_beyond, beyond, choose


def selecting(folder: Path, *names: str, select: str = SELECT, **options: object) -> Path:
    """A study of these optimizers that selects the learning rate; its seeds are 1 and 2."""
    return write_study(folder, optimizers(*names), more=select, **options)  # type: ignore[arg-type]


def done(out: Path) -> list[str]:
    """The runs given to workers."""
    return sorted("/".join(path.parts[-3:-1]) for path in out.glob("runs/*/*/task.json"))


def rates(out: Path) -> dict[tuple[str, int], float]:
    """The learning rate of every reported run."""
    return {(each.optimizer, each.seed): each.settings["lr"] for each in read_results(out) if not each.is_candidate}


# The rule


def test_the_smallest_validation_loss_wins() -> None:
    assert choose([1, 2, 4], 2, {1: 3.0, 2: 2.5, 4: 2.6}) == Choice((1, 2, 4), 2, None)


def test_nothing_is_selected_before_every_value_is_finished() -> None:
    assert choose([1, 2, 4], 2, {1: 3.0, 2: 2.5}) == Choice((1, 2, 4))


def test_a_winner_at_an_edge_adds_a_value_by_the_ratio_of_the_last_two() -> None:
    losses = {1: 3.0, 2: 2.9, 6: 2.8}
    assert choose([1, 2, 6], 2, losses).tried == (1, 2, 6, 18)
    assert choose([1, 2, 6], 2, losses | {18: 2.7}).tried == (1, 2, 6, 18, 54)
    assert choose([1, 2, 6], 2, losses | {18: 2.9}) == Choice((1, 2, 6, 18), 6, None)
    assert choose([1, 2, 6], 2, losses | {18: 2.7, 54: 2.6}) == Choice((1, 2, 6, 18, 54), 54, "upper")


def test_the_lower_edge_is_extended_downwards() -> None:
    assert choose([1.0, 2.0, 6.0], 1, {1.0: 1.0, 2.0: 2.0, 6.0: 3.0}).tried == (0.5, 1.0, 2.0, 6.0)


def test_without_extension_a_winner_at_the_edge_is_flagged() -> None:
    assert choose([1, 2], 0, {1: 1.0, 2: 2.0}) == Choice((1, 2), 1, "lower")


def test_a_value_that_diverged_never_wins() -> None:
    assert choose([1, 2, 4], 0, {1: 3.0, 2: 2.0, 4: None}).winner == 2
    assert choose([1, 2, 4], 0, {1: 3.0, 2: 2.0, 4: float("nan")}).winner == 2
    assert choose([1, 2], 2, {1: None, 2: None}) == Choice((1, 2), all_diverged=True)


def test_values_beyond_have_few_digits_and_whole_numbers_stay_whole() -> None:
    assert beyond([1e-3, 3e-3], "upper") == 9e-3
    assert repr(beyond([100, 200], "upper")) == "400"
    assert all_beyond([1e-3, 2e-3, 4e-3], 2) == [2.5e-4, 5e-4, 8e-3, 1.6e-2]


# The study file


def test_a_study_with_a_selection_is_read_back_unchanged(tmp_path: Path) -> None:
    study = load_study(str(selecting(tmp_path, "a 0.002")))
    assert parse_study(to_toml(study), "copy", Path()) == study


def test_every_value_that_may_be_tried_is_planned_on_the_seed_of_the_selection(tmp_path: Path) -> None:
    _, cells = plan(selecting(tmp_path, "a 0.002"))
    candidates = [cell for cell in cells if cell.is_candidate]
    assert {cell.seed for cell in candidates} == {0}
    assert [cell.config.optimizer.lr for cell in candidates] == [1e-3, 2e-3, 4e-3, 2.5e-4, 5e-4, 8e-3, 1.6e-2]
    assert [(cell.seed, cell.is_open) for cell in cells if not cell.is_candidate] == [(1, True), (2, True)]
    assert len({cell.label for cell in cells}) == 9


def test_candidates_train_on_a_fraction_of_the_tokens_and_reported_runs_on_all(tmp_path: Path) -> None:
    _, whole = plan(selecting(tmp_path, "a 0.002"))
    _, cells = plan(selecting(tmp_path, "a 0.002", select=SELECT + "trial_fraction = 0.5\n"))
    full = whole[0].config.training.tokens
    assert {cell.config.training.tokens for cell in cells if cell.is_candidate} == {full // 2}
    assert {cell.config.total_steps for cell in cells if cell.is_candidate} == {whole[0].config.total_steps // 2}
    # The winner's setting, and nothing else of a candidate, goes to the reported runs.
    for shorter, same in zip(cells, whole, strict=True):
        if shorter.is_candidate:
            decided, expected = (with_value_of(runs[-1], each) for runs, each in ((cells, shorter), (whole, same)))
            assert decided.config == expected.config
            assert decided.config_hash == expected.config_hash


def test_the_fraction_of_the_tokens_follows_the_tokens_of_the_command_line(tmp_path: Path) -> None:
    study = load_study(str(selecting(tmp_path, "a 0.002", select=SELECT + "trial_fraction = 0.25\n")))
    tokens = 16 * cells_of(study)[0].config.tokens_per_step
    cells = cells_of(study, given_settings({"training.tokens": tokens}, Config))
    assert {(cell.is_candidate, cell.config.total_steps) for cell in cells} == {(True, 4), (False, 16)}


MISTAKES = {
    "no tokens": (SELECT + "trial_fraction = 0\n", "select.trial_fraction = 0"),
    "too few tokens for the warmup": (SELECT + "trial_fraction = 0.1\n", "select.trial_fraction = 0.1"),
    "more tokens": (SELECT + "trial_fraction = 2\n", "select.trial_fraction = 2"),
    "one value": ('[select]\nvalues = { "optimizer.lr" = [1e-3] }\n', "select.values: optimizer.lr"),
    "not ascending": ('[select]\nvalues = { "optimizer.lr" = [2e-3, 1e-3] }\n', "select.values: optimizer.lr"),
    "an unknown key": ('[select]\nvalues = { "optimizer.lrr" = [1e-3, 2e-3] }\n', "optimizer.lrr"),
    "two keys": (
        '[select]\nvalues = { "optimizer.lr" = [1e-3, 2e-3], "optimizer.beta2" = [0.9, 0.95] }\n',
        "select.values",
    ),
    "a reported seed": (SELECT + "trial_seed = 2\n", "select.trial_seed = 2"),
    "text": ('[select]\nvalues = { "optimizer.lr" = ["a", "b"] }\n', "select.values"),
    "the text": ('[select]\nvalues = { "training.tokens" = [1000, 2000] }\n', "training.tokens"),
    "zero with a ratio": ('[select]\nvalues = { "optimizer.weight_decay" = [0, 0.1] }\n', "select.extend = 0"),
    "beyond what is allowed": ('[select]\nvalues = { "optimizer.beta2" = [0.8, 0.95] }\n', "optimizer.beta2 = 1.12812"),
    "an override": (SELECT + '[override]\n"optimizer.lr" = 1e-3\n', "override: optimizer.lr"),
}


@pytest.mark.parametrize(("select", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_selection_is_refused_before_anything_is_trained(tmp_path: Path, select: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(selecting(tmp_path, "a 0.002", select=select))
    assert named in str(caught.value)


def test_every_optimizer_has_the_same_number_of_trials(tmp_path: Path) -> None:
    own = optimizers("b 0.002", more='select = { "optimizer.lr" = [1e-3, 2e-3] }\n')
    with pytest.raises(UserError, match="same number of values"):
        plan(write_study(tmp_path, optimizers("a 0.002") + own, more=SELECT))
    _, cells = plan(write_study(tmp_path, optimizers("a 0.002") + own.replace("2e-3", "2e-3, 3e-3"), more=SELECT))
    assert {cell.config.optimizer.lr for cell in cells if cell.is_candidate and cell.optimizer == "b 0.002"} >= {3e-3}


def test_an_optimizer_without_values_is_refused_next_to_one_with_values(tmp_path: Path) -> None:
    own = optimizers("b 0.002", more='select = { "optimizer.lr" = [1e-3, 2e-3] }\n')
    with pytest.raises(UserError, match=r"select\.values is missing"):
        plan(write_study(tmp_path, optimizers("a 0.002") + own))


def test_a_setting_of_an_optimizer_cannot_also_be_selected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[\[optimizers\]\] set: optimizer\.lr"):
        plan(write_study(tmp_path, optimizers("a 0.002", more='set = { "optimizer.lr" = 1e-3 }\n'), more=SELECT))


@pytest.mark.parametrize("setting", ["optimizer.lr=1e-3", "seed=5"])
def test_the_command_line_cannot_set_a_selected_setting(tmp_path: Path, setting: str) -> None:
    path = selecting(tmp_path, "a 0.002")
    result = command("run", str(path), "--out", str(tmp_path / "out"), "--set", setting)
    assert result.exit_code == 2
    assert f"--set {setting}" in result.output
    assert not (tmp_path / "out").exists()


def test_a_corpus_without_validation_text_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = selecting(tmp_path, "a 0.002")
    manifest = tmp_path / "corpus" / "manifest.json"
    values = json.loads(manifest.read_text())
    values["splits"].pop("val")
    manifest.write_text(json.dumps(values))
    result = command("run", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "select.values" in result.output
    assert not (tmp_path / "out").exists()


# Running


@pytest.mark.usefixtures("quick_selection")
def test_reported_runs_have_the_learning_rate_with_the_smallest_validation_loss(tmp_path: Path) -> None:
    outcome, shown = run_here(selecting(tmp_path, "low 0.001", "mid 0.002"), tmp_path / "out")
    assert outcome.failed == outcome.waiting == {}
    assert rates(tmp_path / "out") == {
        (n, s): lr for n, lr in (("low 0.001", 1e-3), ("mid 0.002", 2e-3)) for s in (1, 2)
    }
    low, mid = "small-1.536k-low-0.001", "small-1.536k-mid-0.002"
    trials = [f"{mid}-lr{value}/seed-0" for value in ("0.001", "0.002", "0.004")]
    # The lower edge won, so another value below it was tried, which did not win.
    trials += [f"{low}-lr{value}/seed-0" for value in ("0.0005", "0.001", "0.002", "0.004")]
    reported = [f"{cell}/seed-{seed}" for cell in (low, mid) for seed in (1, 2)]
    assert done(tmp_path / "out") == sorted(trials + reported)
    assert (outcome.finished, outcome.left) == (11, 0)
    assert "[11/11]" in shown
    assert re.search(rf"^selected  {re.escape(mid)}: optimizer\.lr = 0\.002, best of 3 values", shown, re.MULTILINE)


@pytest.mark.usefixtures("quick_selection")
def test_shorter_candidates_select_and_the_report_says_how_long_they_are(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002", select=SELECT + "trial_fraction = 0.5\n")
    outcome, _ = run_here(path, tmp_path / "out")
    assert outcome.failed == outcome.waiting == {}
    assert rates(tmp_path / "out") == {("mid 0.002", seed): 2e-3 for seed in (1, 2)}
    trials = [f"small-768-mid-0.002-lr{value}/seed-0" for value in ("0.001", "0.002", "0.004")]
    assert done(tmp_path / "out") == sorted([*trials, *(f"small-1.536k-mid-0.002/seed-{seed}" for seed in (1, 2))])
    [table] = [each for each in read_report([tmp_path / "out"]).tables if each.name == "selection"]
    assert [row[0].text for row in table.rows] == ["768"] * 3
    assert any("fewer tokens" in note for note in table.notes)


@pytest.mark.usefixtures("quick_selection")
def test_results_keep_every_candidate_and_flag_a_winner_at_the_edge(tmp_path: Path) -> None:
    run_here(selecting(tmp_path, "far 0.1"), tmp_path / "out")
    results = read_results(tmp_path / "out")
    candidates = [each for each in results if each.is_candidate]
    assert sorted(each.settings["lr"] for each in candidates) == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert all("loss" not in each.metrics for each in candidates)
    for each in results:
        if not each.is_candidate:
            assert each.trial is not None
            assert (each.trial.value, each.trial.edge, each.trial.trials) == (1.6e-2, "upper", 5)
            assert from_json(to_json(each), each.folder, "row") == each


@pytest.mark.usefixtures("quick_selection")
def test_a_winner_that_is_no_longer_at_the_edge_loses_its_flag(tmp_path: Path) -> None:
    path = selecting(tmp_path, "a 0.004", select=SELECT + "extend = 0\n")
    run_here(path, tmp_path / "out")
    assert {each.trial.edge for each in read_results(tmp_path / "out") if each.trial} == {None, "upper"}
    path.write_text(path.read_text().replace("extend = 0", "extend = 1"))
    run_here(path, tmp_path / "out")
    reported = [each.trial for each in read_results(tmp_path / "out") if not each.is_candidate]
    assert [(each.edge, each.trials) for each in reported if each] == [(None, 4)] * 2


@pytest.mark.usefixtures("quick_selection")
def test_a_run_trained_with_another_winner_is_refused(tmp_path: Path) -> None:
    path = selecting(tmp_path, "a 0.1", select=SELECT + "extend = 0\n")
    run_here(path, tmp_path / "out")
    path.write_text(path.read_text().replace("extend = 0", "extend = 1"))
    outcome, _ = run_here(path, tmp_path / "out")
    assert set(outcome.failed) == {"small-1.536k-a-0.1/seed-1", "small-1.536k-a-0.1/seed-2"}
    assert all("optimizer.lr" in reason for reason in outcome.failed.values())
    refused = command("run", str(path), "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "small-1.536k-a-0.1/seed-1: optimizer.lr" in refused.output


@pytest.mark.usefixtures("quick_selection")
def test_if_every_candidate_diverges_no_run_is_reported_and_the_command_fails(tmp_path: Path) -> None:
    path = selecting(tmp_path, "diverges", "mid 0.002")
    outcome, _ = run_here(path, tmp_path / "out")
    assert set(outcome.waiting) == {"small-1.536k-diverges/seed-1", "small-1.536k-diverges/seed-2"}
    assert set(rates(tmp_path / "out")) == {("mid 0.002", 1), ("mid 0.002", 2)}
    result = command("run", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "small-1.536k-diverges/seed-1" in result.output


@pytest.mark.usefixtures("quick_selection")
def test_a_failed_candidate_blocks_only_its_own_selection_and_is_retried(tmp_path: Path) -> None:
    path = selecting(tmp_path, "fails 0.002", "mid 0.002")
    outcome, _ = run_here(path, tmp_path / "out")
    assert set(outcome.failed) == {f"small-1.536k-fails-0.002-lr{lr}/seed-0" for lr in ("0.001", "0.002", "0.004")}
    assert set(outcome.waiting) == {f"small-1.536k-fails-0.002/seed-{seed}" for seed in (1, 2)}
    assert set(rates(tmp_path / "out")) == {("mid 0.002", 1), ("mid 0.002", 2)}
    outcome, _ = run_here(path, tmp_path / "out")
    assert outcome.failed == outcome.waiting == {}
    assert len(rates(tmp_path / "out")) == 4


@pytest.mark.usefixtures("quick_selection")
def test_a_part_of_a_study_includes_the_candidates_it_needs(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002", "high 0.004")
    run_here(path, tmp_path / "out", only=("*-mid-*/seed-1",))
    assert set(rates(tmp_path / "out")) == {("mid 0.002", 1)}
    assert not any("high" in label for label in done(tmp_path / "out"))
    run_here(path, tmp_path / "out", only=("*/seed-0",))
    assert set(rates(tmp_path / "out")) == {("mid 0.002", 1)}
    assert sum(label.endswith("/seed-0") for label in done(tmp_path / "out")) == 3 + 4


@pytest.mark.usefixtures("quick_selection")
def test_a_dry_run_shows_candidates_and_the_maximum_number_of_runs(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002", "far 0.1")
    result = command("run", str(path), "--out", str(tmp_path / "out"), "--dry-run")
    assert result.exit_code == 0
    assert "small-1.536k-mid-0.002-lr0.004" in result.output
    assert "lr0.008" not in result.output
    assert re.search(r"10 runs", result.output)
    assert re.search(r"At most 14 runs", result.output)
    run_here(path, tmp_path / "out")
    after = command("run", str(path), "--out", str(tmp_path / "out"), "--dry-run")
    assert re.search(r"12 runs", after.output)
    assert "At most" not in after.output


@pytest.mark.usefixtures("quick_selection")
def test_status_shows_the_candidates_and_the_selected_values(tmp_path: Path) -> None:
    path = selecting(tmp_path, "far 0.1")
    run_here(path, tmp_path / "out", only=("*lr0.001/seed-0",))
    before = command("status", str(tmp_path / "out"))
    assert re.search(r"lr0\.001/seed-0 +│ finished .*\d\.\d{3} \(val\)", before.output)
    assert re.search(r"far-0\.1/seed-1 +│ waiting", before.output)
    assert "Selected" not in before.output
    run_here(path, tmp_path / "out")
    after = command("status", str(tmp_path / "out"))
    assert re.search(
        r"Selected: small-1\.536k-far-0\.1: optimizer\.lr = 0\.016, best of 5 values.*largest", after.output
    )


@pytest.mark.usefixtures("quick_selection")
def test_two_machines_that_share_the_work_make_one_report(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002", "high 0.004")
    run_here(path, tmp_path / "a", only=("*-mid-*",))
    run_here(path, tmp_path / "b", only=("*-high-*",))
    contents = read_report([tmp_path / "a", tmp_path / "b"])
    assert {(run.optimizer, run.seed) for run in contents.grid.results} == {
        (name, seed) for name in ("mid 0.002", "high 0.004") for seed in (1, 2)
    }
    assert sum(each.is_candidate for each in merge_results([tmp_path / "a", tmp_path / "b"])) == 3 + 4
    assert {run.status for plan in contents.plans for run in plan.unfinished} <= {"waiting"}


@pytest.mark.usefixtures("quick_selection")
def test_copied_candidates_are_not_trained_again(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002")
    run_here(path, tmp_path / "a", only=("*/seed-1",))
    for run in (tmp_path / "a" / "runs").glob("*/seed-0"):
        target = tmp_path / "b" / run.relative_to(tmp_path / "a")
        target.mkdir(parents=True)
        for name in ("evaluation.json",):
            shutil.copy(run / name, target / name)
    shutil.copy(tmp_path / "a" / "study.toml", tmp_path / "b" / "study.toml")
    shutil.copy(tmp_path / "a" / "base-1.toml", tmp_path / "b" / "base-1.toml")
    run_here(path, tmp_path / "b", only=("*/seed-2",))
    assert done(tmp_path / "b") == ["small-1.536k-mid-0.002/seed-2"]
    assert len(read_report([tmp_path / "a", tmp_path / "b"]).grid.results) == 2


@pytest.mark.usefixtures("quick_selection")
def test_runs_of_different_winners_are_not_merged(tmp_path: Path) -> None:
    path = selecting(tmp_path, "a 0.004")
    run_here(path, tmp_path / "a", only=("*/seed-1",))
    path.write_text(path.read_text().replace("4e-3] }", "3e-3] }\nextend = 0"))
    run_here(path, tmp_path / "b", only=("*/seed-2",))
    with pytest.raises(UserError, match=r"optimizer\.lr|settings"):
        read_report([tmp_path / "a", tmp_path / "b"])


@pytest.mark.usefixtures("quick_selection")
def test_a_report_with_only_candidates_is_refused(tmp_path: Path) -> None:
    path = selecting(tmp_path, "mid 0.002")
    run_here(path, tmp_path / "out", only=("*/seed-0",))
    with pytest.raises(UserError, match="candidates"):
        read_report([tmp_path / "out"])


def test_rows_of_earlier_versions_have_no_selection(tmp_path: Path) -> None:
    values = json.loads(to_json(read_results(fabricate(tmp_path / "old"))[0]))
    del values["trial"]
    assert from_json(json.dumps(values), tmp_path, "row").trial is None


# Real runs

REAL = '[select]\nvalues = { "optimizer.lr" = [1e-3, 1e-2] }\nextend = 1\n'


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A study with real runs that selects the learning rate, and its folder."""
    folder = tmp_path_factory.mktemp("selection")
    path = selecting(
        folder,
        "plain",
        select=REAL,
        steps=40,
        training={"threads": 1},
        checkpoints={"every": 5},
        log={"every": 5, "val_every": 20},
    )
    path.write_text(path.read_text().replace("seeds = [1, 2]", "seeds = 1"))
    process = start_command("run", str(path), "--out", "out", "--jobs", "2", cwd=folder)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    return path, folder / "out"


def test_a_real_selection_uses_the_last_validation_loss_of_its_candidates(undisturbed: tuple[Path, Path]) -> None:
    _, out = undisturbed
    results = read_results(out)
    losses = {}
    for each in results:
        if each.is_candidate:
            rows = [json.loads(line) for line in (each.run_folder / "metrics.jsonl").read_text().splitlines()]
            last = [row["loss"] for row in rows if row["kind"] == "val"][-1]
            assert each.metrics["val_loss"] == last
            assert set(each.metrics) == {"train_loss", "val_loss"}
            losses[each.settings["lr"]] = last
    (reported,) = (each for each in results if not each.is_candidate)
    assert reported.settings["lr"] == min(losses, key=lambda lr: losses[lr])
    assert reported.metrics["loss"] is not None


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the workers")
def test_a_selection_killed_repeatedly_ends_with_the_same_result(undisturbed: tuple[Path, Path]) -> None:
    path, out = undisturbed
    command_line = ("run", str(path), "--out", "disturbed", "--jobs", "1")
    again = out.with_name("disturbed")
    for finished in range(3):  # once in each stage: the first candidate, the others, the reported run
        process = start_command(*command_line, cwd=out.parent, program=SLOW_COMMAND)
        wait_until(
            lambda finished=finished: (
                len(list(again.glob("runs/*/*/evaluation.json"))) > finished or process.poll() is not None  # noqa: B023
            )
        )
        time.sleep(0.3)
        kill_all(process)
    process = start_command(*command_line, cwd=out.parent)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode == 0, printed
    assert comparable(read_results(again)) == comparable(read_results(out))


@pytest.mark.usefixtures("trained_here")
def test_a_candidate_that_diverges_is_a_result_and_not_a_failure(tmp_path: Path) -> None:
    path = selecting(
        tmp_path, "plain", select='[select]\nvalues = { "optimizer.lr" = [1e-3, 1e30] }\nextend = 0\n', steps=12
    )
    outcome, _ = run_here(path, tmp_path / "out", only=("*/seed-1",))
    assert outcome.failed == {}
    losses = {
        each.settings["lr"]: each.metrics["val_loss"] for each in read_results(tmp_path / "out") if each.is_candidate
    }
    assert losses[1e30] is None
    assert rates(tmp_path / "out") == {("plain", 1): 1e-3}
    shown = command("status", str(tmp_path / "out")).output
    assert re.search(r"lr1e\+30/seed-0 +│ finished .*diverged", shown)
